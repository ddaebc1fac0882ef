"""The same question gets the same answer: whatever was seen before, and whoever asks."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch

from apollo_cli import engine
from apollo_cli.cli import main
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions
from apollo_cli.engine import Apollo
from tests import tiny
from tests.tiny import Tiny

CASES = Path(__file__).parent / "cases"
BRIEF = GenerationOptions(max_new_tokens=4)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"max_clips": 2},
    {"end_seconds": 3.0},
    {"start_seconds": 1.0, "end_seconds": 8.3, "max_clips": 2},
    {"fps": 7.0, "max_clips": 2},
    {"fps": 7.0, "end_seconds": 0.5, "short": "stretch"},
    {"mode": "uniform", "frames": 8},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("same") / "checkpoint", Tiny(context=600))


@pytest.fixture(scope="module")
def fresh(checkpoint: Path) -> Apollo:
    """Watches everything anew."""
    return engine.load(checkpoint, use_cache=False)


@pytest.mark.parametrize("name", ["cfr30.mp4", "vfr_screen.mp4"])
def test_what_was_seen_before_changes_nothing(
    name: str, fresh: Apollo, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path))
    keeping = engine.load(checkpoint)
    for fps in (None, 7.0):
        keeping.watch(CASES / name, SamplingOptions(fps=fps))
    for number, chosen in enumerate(SAMPLINGS):
        sampling, reading = SamplingOptions(**chosen), ReadingOptions(strict=number % 2 == 0)
        plain = fresh.watch(CASES / name, sampling, reading=reading)
        first, second = (keeping.watch(CASES / name, sampling, reading=reading) for _ in range(2))
        assert torch.equal(first.tokens, plain.tokens), sampling
        assert torch.equal(second.tokens, plain.tokens), sampling
        assert first.part == second.part == plain.part
        told = [memory.describe() | {"remembered": 0} for memory in (plain, first, second)]
        assert told[0] == told[1] == told[2]
        assert second.remembered is not None
        assert second.decode_seconds == 0
    assert fresh.ask(plain, "one?", BRIEF).text == keeping.ask(second, "one?", BRIEF).text


def test_a_file_that_is_named_says_when_not_all_of_it_is_used(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    video = Path(copyfile(CASES / "one_key_60s.mp4", tmp_path / "video.mp4"))
    memory, model = video.with_suffix(".apollo"), ["--model", str(checkpoint)]
    assert main(["remember", str(video), *model]) == 0
    for flags, used in (
        (["--max-clips", "3"], {3}),
        (["--from", "10", "--to", "20"], {5}),
        (["--to", "20", "--max-clips", "4"], {4}),
        ([], set(range(5, 30))),
    ):
        capsys.readouterr()
        short = ["--json", "--max-new-tokens", "4"]
        assert main(["ask", str(memory), "one?", *flags, *model, *short]) == 0
        told = capsys.readouterr()
        (video_told,) = json.loads(told.out)["videos"]
        assert video_told["clips"] in used
        assert any(f"{video_told['clips']} of the 30" in note for note in video_told["warnings"])
        assert f"{video_told['clips']} of the 30" in told.err


@pytest.mark.parametrize("answer", [4, 256, 460])
def test_everyone_sees_the_same_number_of_clips(
    answer: int, checkpoint: Path, fresh: Apollo, capsys: pytest.CaptureFixture[str]
):
    video, model = str(CASES / "one_key_60s.mp4"), ["--model", str(checkpoint)]
    flags = ["--max-new-tokens", str(answer), *model, "--json"]
    assert main(["plan", video, *flags]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["models"]
    seen = {planned["clips"]}
    for question in ("one?", "how many times is it one, two or three?"):
        assert main(["ask", video, question, "--no-cache", *flags]) == 0
        seen.add(json.loads(capsys.readouterr().out)["videos"][0]["clips"])
    if answer == GenerationOptions().max_new_tokens:
        seen.add(len(fresh.watch(video)))
    assert len(seen) == 1
    assert 0 < planned["tokens"]["question"] < 100
