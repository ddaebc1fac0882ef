"""Where one of two processes fails, both end with its message and its exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.finetune.toy import write_toy


@pytest.mark.slow
def test_an_error_of_one_process_while_it_watches_ends_both_with_its_message(
    tmp_path: Path,
) -> None:
    recipe = write_toy(tmp_path, clips=1, questions=1, texts=1, train=["llm"])
    # Only the second process writes this file, and it cannot.
    (tmp_path / "out" / "features" / "list-1.json").mkdir(parents=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "apollo_cli", "finetune", "run", str(recipe)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
        )
        for rank in "01"
    ]
    try:
        told = [process.communicate(timeout=300)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [7, 7], told
    assert all("features cannot be written" in text for text in told)
