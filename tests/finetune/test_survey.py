"""Files are looked at once, and lengths are those of the examples that a run would build."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from shutil import copy

import pytest

from apollo_cli.config import SamplingOptions
from apollo_cli.finetune.data.samples import Fault, Sample, Visual
from apollo_cli.finetune.data.survey import Length, measure_samples, probe_files
from apollo_cli.finetune.training.examples import ExampleBuilder
from apollo_cli.model.prompt import Turn
from apollo_cli.planner import Planner, load_planner
from apollo_cli.weights.checkpoint import read_checkpoint
from tests.cases import FOLDER

NANO = Path(__file__).parents[2] / "weights" / "nano"
CLIP, PHOTO, LONG = FOLDER / "cfr30.mp4", FOLDER / "photo.jpg", FOLDER / "one_key_60s.mp4"
UNEVEN, BROKEN = FOLDER / "vfr_screen.mp4", FOLDER / "moov_missing.mp4"


@pytest.fixture(scope="module")
def planner() -> Planner:
    return load_planner(read_checkpoint(NANO))


def sample(*visuals: Visual, answer: str = "a grid.") -> Sample:
    return Sample("d.jsonl:1", (Turn("what is shown?", answer), Turn("why?", "so")), visuals)


def video(path: Path = CLIP, start: float = 0.0, end: float | None = None) -> Visual:
    return Visual(path.resolve(), "video", start, end)


def survey(
    planner: Planner, *samples: Sample, max_tokens: int | None = None
) -> tuple[list[Length | None], list[Fault]]:
    named = [replace(one, name=f"d.jsonl:{n}") for n, one in enumerate(samples, start=1)]
    files = probe_files(named)
    lengths, faults = measure_samples(
        named, files, planner=planner, sampling=SamplingOptions(), max_tokens=max_tokens
    )
    faults = [fault for fault in faults if fault.kind != "odd_file"]
    return [lengths.get(one.name) for one in named], faults


def test_lengths_are_those_of_the_examples(planner: Planner) -> None:
    samples = [
        sample(),
        sample(video()),
        sample(video(start=1.0, end=3.0)),
        sample(Visual(PHOTO.resolve(), "image"), video(UNEVEN)),
        sample(video(LONG)),
    ]
    lengths, faults = survey(planner, *samples, max_tokens=500)
    assert [fault.kind for fault in faults] == ["thinned"]
    assert "clips" in faults[0].received
    with ExampleBuilder(planner, SamplingOptions(), max_tokens=500) as builder:
        for one, length in zip(samples, lengths, strict=True):
            example = builder.build(one)
            assert length is not None
            assert (length.tokens, length.trained) == (len(example.ids), example.trained_tokens)
            assert (length.coverage < 1) == (one is samples[-1])


@pytest.mark.parametrize(
    ("visual", "kind"),
    [
        (video(BROKEN), "broken_video"),
        (Visual(BROKEN.resolve(), "image"), "broken_image"),
        (Visual(CLIP.resolve(), "image"), "wrong_kind"),
        (video(PHOTO), "wrong_kind"),
        (video(start=4.5), "outside_video"),
    ],
)
def test_a_bad_file_costs_its_sample(planner: Planner, visual: Visual, kind: str) -> None:
    lengths, faults = survey(planner, sample(visual), sample())
    assert lengths[0] is None
    assert lengths[1] is not None
    assert [(fault.kind, fault.where) for fault in faults] == [(kind, "d.jsonl:1")]


def test_an_end_behind_the_video_is_a_note(planner: Planner) -> None:
    lengths, faults = survey(planner, sample(video(end=60.0)), sample(video(end=4.2)))
    assert [fault.kind for fault in faults] == ["end_after_video"]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("visuals", [(), (video(),)])
def test_text_that_does_not_fit_is_too_long(planner: Planner, visuals: tuple[Visual, ...]) -> None:
    words = "word " * 2000
    lengths, faults = survey(planner, sample(*visuals, answer=words))
    assert lengths == [None]
    assert (faults[0].kind, faults[0].cost) == ("too_long", "sample")
    assert "1024" in faults[0].message


@pytest.mark.parametrize("most", [None, 500, 5000])
def test_max_tokens_is_a_remedy_only_where_it_is_the_bound(
    planner: Planner, most: int | None
) -> None:
    samples = [sample(*[video(LONG)] * 3), sample(answer="word " * 2000)]
    _, faults = survey(planner, *samples, max_tokens=most)
    told = {fault.kind: fault.message for fault in faults}
    assert {"thinned", "too_long"} <= told.keys()
    for kind in ("thinned", "too_long"):
        assert ("raise max_tokens" in told[kind]) == (most == 500)


def test_a_pipe_is_told_at_once(planner: Planner, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    _, faults = survey(planner, sample(video(tmp_path / "pipe.mp4")))
    assert faults[0].kind == "broken_video"
    assert "pipe" in faults[0].received


def test_each_file_is_looked_at_once_and_counted(tmp_path: Path) -> None:
    clip, photo, broken = (Path(copy(path, tmp_path)) for path in (CLIP, PHOTO, BROKEN))
    samples = [sample(video(clip)), sample(video(clip), Visual(photo, "image"), video(broken))]
    steps: list[tuple[str, int, int]] = []
    found = probe_files(samples, on_progress=lambda *step: steps.append(step))
    assert steps == [("check", 1, 3), ("check", 2, 3), ("check", 3, 3)]
    assert list(found) == [clip, photo, broken]
    assert isinstance(found[broken], str)
