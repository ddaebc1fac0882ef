"""A run that is killed or stopped at any moment ends as if it had never been."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from apollo_cli.finetune.training.records import read_log
from tests.command import apollo
from tests.finetune.toy import copy_toy, write_toy

STEPS = 8
KEYS = {"steps": STEPS, "lora_dropout": 0.1}


@contextmanager
def started(recipe: Path) -> Iterator[subprocess.Popen[str]]:
    """A real ``apollo finetune run``, as a user starts it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "apollo_cli", "finetune", "run", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # So that a Ctrl-C can be sent to all of its processes, as a terminal does.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(recipe: Path) -> str:
    ended = apollo("finetune", "run", recipe)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def wait_for_step(process: subprocess.Popen[str], log: Path, step: int) -> None:
    while process.poll() is None and not any(row["step"] >= step for row in read_log(log)):
        time.sleep(0.01)


def losses(recipe: Path) -> list[tuple[int, float, float, list[str]]]:
    rows = [row for row in read_log(recipe.parent / "out" / "log.jsonl") if "loss" in row]
    return [(row["step"], row["loss"], row["gradient_norm"], row["samples"]) for row in rows]


def tensors(recipe: Path) -> dict[str, torch.Tensor]:
    files = (recipe.parent / "out").glob("*.safetensors")
    return {f"{file.name}/{key}": t for file in files for key, t in load_file(file).items()}


def is_child_of(process_id: int, parent: int) -> bool:
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return False
    return int(fields[1]) == parent


def children(parent: int) -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if is_child_of(int(p.name), parent)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    recipe = write_toy(tmp_path_factory.mktemp("whole"), **KEYS)
    run(recipe)
    return recipe


def assert_same(found: Path, whole: Path) -> None:
    assert losses(found) == losses(whole)
    assert tensors(found).keys() == tensors(whole).keys()
    assert all(torch.equal(tensors(found)[name], t) for name, t in tensors(whole).items())


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_ends_the_same(tmp_path: Path, whole: Path):
    killed = copy_toy(whole, tmp_path)
    rng = random.Random()
    for step in sorted(rng.sample(range(1, STEPS), 2)):
        with started(killed) as process:
            wait_for_step(process, tmp_path / "out" / "log.jsonl", step)
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
    run(killed)
    assert_same(killed, whole)


@pytest.mark.slow
def test_a_stopped_run_saves_its_step_and_goes_on_to_the_same_end(tmp_path: Path, whole: Path):
    stopped = copy_toy(whole, tmp_path)
    with started(stopped) as process:
        wait_for_step(process, tmp_path / "out" / "log.jsonl", 2)
        decoders = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate()
    assert process.returncode == 130, told
    assert re.search(r"saved at step \d; run the same command again to go on", told)
    assert told.splitlines()[-1] == "interrupted"
    assert not (tmp_path / "out" / "quarantine.jsonl").exists()
    assert decoders
    assert not any(Path(f"/proc/{decoder}").exists() for decoder in decoders)
    assert re.search(rf"going on behind step \d of {STEPS}", run(stopped))
    assert_same(stopped, whole)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path):
    recipe = write_toy(tmp_path, steps=500, save_every=1000)
    with started(recipe) as process:
        wait_for_step(process, tmp_path / "out" / "log.jsonl", 1)
        # Held in between, so that both arrive in the same step.
        process.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, told = process.communicate()
    assert process.returncode == 130
    assert "saved" not in told
    assert not (tmp_path / "out" / "checkpoints").exists()
