"""What does not fit is told as that: max_tokens with the number needed, memory with its samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apollo_cli import cli
from apollo_cli.errors import DataError, FitError
from apollo_cli.finetune.recipe import load_recipe
from apollo_cli.finetune.training import validation
from apollo_cli.finetune.training.loop import run_recipe
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.model.apollo import ApolloModel
from tests.finetune.toy import write_toy


def silent(line: str) -> None: ...


@pytest.mark.parametrize("clips", [0, 1], ids=["text", "video"])
def test_max_tokens_that_is_too_small_is_told_as_that_with_the_number_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clips: int
) -> None:
    path = write_toy(tmp_path, clips=clips, questions=1, texts=1 - clips, steps=1, max_tokens=32)
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace('": "What', f'": "{"So " * 40} what'))
    assert cli.main(["finetune", "check", str(path)]) == 7
    assert "mostly_too_long" in capsys.readouterr().out

    def needed(most: int) -> int:
        with pytest.raises(DataError) as caught:
            run_recipe(replace(load_recipe(path), max_tokens=most), say=silent)
        assert f"max_tokens = {most} " in caught.value.message
        assert ".mp4" not in caught.value.message
        return int(caught.value.message.partition("set max_tokens = ")[2].split()[0])

    enough = needed(32)
    assert needed(enough - 1) == enough
    # What was left out before is learned from now, without --fresh.
    lines: list[str] = []
    run_recipe(replace(load_recipe(path), max_tokens=enough), say=lines.append)
    assert any(line.startswith("done") for line in lines)
    assert not any("left out" in line for line in lines)


def test_samples_beyond_the_context_are_told_as_too_long_for_the_model(tmp_path: Path) -> None:
    path = write_toy(tmp_path, clips=0, texts=2, steps=1)
    text = (tmp_path / "data.jsonl").read_text().replace("It is", "It is " * 3000)
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(DataError, match="longer than the model's context") as caught:
        run_recipe(load_recipe(path), say=silent)
    assert "max_tokens" not in caught.value.message


def full(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("keys", "remedies"),
    [
        ({"micro_batch_size": 2}, {"micro_batch_size", "gradient_checkpointing"}),
        ({"micro_batch_size": 2, "lora_dropout": 0.1}, {"gradient_checkpointing"}),
        ({"gradient_checkpointing": True}, set()),
    ],
)
def test_a_step_beyond_the_memory_names_its_samples_and_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], remedies: set[str]
) -> None:
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=2, steps=1, **keys))
    monkeypatch.setattr(Trainee, "forward", full)
    with pytest.raises(FitError) as caught:
        run_recipe(recipe, say=silent)
    assert "data.jsonl:" in caught.value.received
    assert " tokens)" in caught.value.received
    found = {
        key
        for key in ("micro_batch_size", "gradient_checkpointing")
        if key in caught.value.next_step
    }
    assert found == remedies
    assert "max_tokens" in caught.value.next_step


def test_a_held_out_sample_beyond_the_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=4, steps=1, validation_share=0.3))
    monkeypatch.setattr(validation, "generate", full)
    with pytest.raises(FitError, match=r"data\.jsonl:\d"):
        run_recipe(recipe, say=silent)


def test_a_clip_beyond_the_memory_is_no_broken_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(write_toy(tmp_path, clips=1, texts=0, steps=1, train=["llm"]))
    monkeypatch.setattr(ApolloModel, "encode_clips", full)
    with pytest.raises(FitError, match=r"data\.jsonl:1.*memory"):
        run_recipe(recipe, say=silent)
    assert not (recipe.output / "quarantine.jsonl").exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("steps = 3\n", ["data 1: steps", "above"]),
        ('model = "apollo-nano"\n', ["data 1: model", "above"]),
        ("shares = 1\n", ["data 1: shares", "did you mean share"]),
    ],
)
def test_a_key_below_data_that_belongs_above_is_told_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, words: list[str]
) -> None:
    path = write_toy(tmp_path, clips=0)
    path.write_text(path.read_text() + lines)
    assert cli.main(["finetune", "run", str(path)]) == 7
    told = capsys.readouterr().err
    assert all(word in told for word in words)


def test_a_key_above_that_belongs_below_data_is_told_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_toy(tmp_path, clips=0)
    path.write_text("share = 1.0\n" + path.read_text())
    assert cli.main(["finetune", "run", str(path)]) == 7
    assert "below [[data]]" in capsys.readouterr().err
