"""A command finds its model once: how often it opens each file, counted by the interpreter."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.command import apollo
from tests.finetune.toy import write_toy

CLIP = Path(__file__).parent / "cases" / "cfr30.mp4"
SUBTITLES = "1\n00:00:00,000 --> 00:00:01,000\nhello\n"
# Configs and tokenizer files of a checkpoint, and the weights that no fingerprint samples.
CHECKPOINT = ("config.json", "llm/config.json", "llm/vocab.json", "llm/model.safetensors")
_counts: list[Counter[str]] = []


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if _counts and event == "open" and isinstance(arguments[0], str):
        _counts[-1][arguments[0]] += 1


sys.addaudithook(_count)


def opens_of(*arguments: object) -> Counter[str]:
    """How often Python code opens each file while ``apollo ARGUMENTS`` runs."""
    _counts.append(counts := Counter[str]())
    try:
        done = apollo(*arguments)
    finally:
        _counts.pop()
    assert done.returncode == 0, done.stderr
    return counts


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))
    return tiny.save(tmp_path / "model")


@pytest.mark.parametrize("fit", [[], ["--fit", "auto"]])
def test_ask_reads_model_and_subtitles_once(tmp_path: Path, model: Path, fit: list[str]):
    video = tmp_path / "video.mp4"
    shutil.copy(CLIP, video)
    video.with_suffix(".srt").write_text(SUBTITLES)
    flags = ["--model", model, "--subtitles", "auto", "--max-new-tokens", "2", "--device", "cpu"]
    counts = opens_of("ask", video, "What?", *flags, *fit)
    files = [*(model / name for name in CHECKPOINT), video.with_suffix(".srt")]
    assert {counts[str(file)] for file in files} == {1}


def test_a_training_run_reads_its_model_once_and_hashes_its_adapters_once(
    tmp_path: Path, model: Path
):
    keys: dict[str, Any] = {"model": str(model), "clips": 1, "questions": 1, "texts": 3, "steps": 1}
    apollo("finetune", "run", write_toy(tmp_path / "one", **keys))
    result = tmp_path / "one" / "out"
    counts = opens_of(
        "finetune", "run", write_toy(tmp_path / "two", adapters=[str(result)], **keys)
    )
    # The identity of the base samples each tensor, so its headers are known by their configs.
    assert {counts[str(model / name)] for name in CHECKPOINT if name.endswith("json")} == {1}
    weights = [counts[str(file)] for file in result.glob("*.safetensors")]
    # One opening hashes a file, the other reads its header.
    assert weights
    assert max(weights) <= 2
