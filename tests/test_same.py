"""The same question gets the same answer: whatever was seen before, and whoever asks."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from apollo_cli import engine
from apollo_cli.cli import main
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions
from apollo_cli.engine import Apollo
from apollo_cli.errors import MediaError, UsageError
from apollo_cli.model.tokenizer import load_tokenizer
from apollo_cli.text import apart, percent
from apollo_cli.video.sampler import FrameGrid, plan_clips
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
    keeping.watch(CASES / name, SamplingOptions(fps=7.0))
    plain = second = keeping.watch(CASES / name)
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


@pytest.mark.parametrize(
    ("part", "stage"),
    [
        (f"vision_tower/{tiny.VIDEO}", tiny.VIDEO),
        (f"vision_tower/{tiny.IMAGE}", tiny.IMAGE),
        ("mm_connector", "connector"),
        ("llm", "language model"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--choice", "one", "--choice", "two"]])
def test_values_that_are_no_numbers_name_their_stage(
    part: str, stage: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = tiny.save(tmp_path / "model")
    file = model / part / "model.safetensors"
    tensors = load_file(file)
    # Finite, since a file with NaN is refused when it is loaded; sums of them are not.
    for tensor in tensors.values():
        tensor.fill_(3e38)
    save_file(tensors, file)
    video = str(CASES / "five_frames.webm")
    assert main(["ask", video, "one?", *flags, "--model", str(model), "--no-cache"]) == 5
    told = capsys.readouterr()
    assert stage in told.err
    assert "apollo models verify" in told.err
    # It is float32 already.
    assert "--dtype" not in told.err
    assert told.out == ""


def test_float16_that_overflows_names_the_dtypes_that_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = tiny.save(tmp_path / "model")
    file = model / "llm" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e5
    save_file(tensors, file)
    flags = ["--model", str(model), "--max-new-tokens", "2", "--no-cache"]
    asked = ["ask", str(CASES / "five_frames.webm"), "one?", *flags]
    assert main([*asked, "--dtype", "float16"]) == 6
    assert "bfloat16" in capsys.readouterr().err
    assert main([*asked, "--dtype", "float32"]) == 0


@pytest.mark.parametrize("state", ["truncation", "padding", "dropout", "both"])
def test_no_state_of_a_tokenizer_file_changes_a_prompt(state: str, tmp_path: Path):
    folder = tiny.TOKENIZER
    plain = load_tokenizer(folder)
    stored = json.loads(plain.backend.to_str())
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 50}, "direction": "Left", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    stored["truncation"] = cut if state in ("truncation", "both") else None
    stored["padding"] = pad if state in ("padding", "both") else None
    stored["model"]["dropout"] = 0.5 if state == "dropout" else None
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    loaded = load_tokenizer(tmp_path)
    for text in ("one two three four five six seven?", "<|im_start|>user\n 1 caf\u00e9<|im_end|>"):
        for _ in range(3):
            assert loaded.encode(text) == plain.encode(text)
            assert loaded.encode_many([text, "a"]) == plain.encode_many([text, "a"])


def test_numbers_that_differ_look_different():
    numbers = np.geomspace(1e-3, 1e6, 200)
    for one, other in [
        *pairwise(numbers),
        *((n, n + gap) for n in numbers for gap in (1e-4, 0.04)),
    ]:
        low, high = apart(one, other)
        assert float(low) < float(high)
    assert apart(2.0, 2.0 + 1e-12) == ("2.0", "2.0")
    for share in (0.0, 1e-6, 0.004, 0.3, 0.994, 0.9951, 1 - 1e-6, 1.0):
        told = percent(share)
        assert (told == "100%") == (share == 1)
        assert (told == "0%") == (share == 0)


def test_what_is_seen_never_contradicts_its_share():
    for seconds in (*np.linspace(2.1, 30, 60), 299.8, 3600.4, 86_400.0):
        grid = FrameGrid(np.arange(int(seconds * 4)) / 4, 4.0, np.empty(0))
        for limit, steady in ((1, grid), (4, grid), (9, None), (149, None), (1799, None)):
            plan = plan_clips(
                float(seconds),
                clip_seconds=2,
                frames_per_clip=4,
                limit=limit,
                options=SamplingOptions(),
                grid=steady,
            )
            told = plan.describe()
            if "every moment" in told:
                assert plan.coverage == pytest.approx(1)
                continue
            seen, every = map(float, re.findall(r"([\d.]+) s ", told))
            assert seen < every
            assert "100%" not in told
            share = re.search(r"\((\d+)%\)", told)
            if share:
                assert seen / every == pytest.approx(int(share[1]) / 100, abs=0.03)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"start_seconds": 1.98}, UsageError), ({"short": "error"}, MediaError)],
)
def test_a_refusal_shows_two_numbers_that_differ(options: dict[str, Any], error: type[Exception]):
    with pytest.raises(error) as refused:
        plan_clips(
            1.97, clip_seconds=2, frames_per_clip=4, limit=9, options=SamplingOptions(**options)
        )
    given, allowed = re.findall(r"([\d.]+) s", str(refused.value))
    assert float(given) != float(allowed)
