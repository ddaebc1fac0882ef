"""Files that break and are mended between runs: what is counted, what is said, what stays."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from apollo_cli.cli import main
from apollo_cli.errors import DataError
from apollo_cli.finetune.check import check_recipe
from apollo_cli.finetune.recipe import DataSource, load_recipe
from apollo_cli.finetune.training.feed import read_quarantine
from apollo_cli.finetune.training.loop import run_recipe
from apollo_cli.finetune.training.records import read_log
from apollo_cli.weights.adapter import read_adapter
from tests.finetune.test_loop import losses, run
from tests.finetune.toy import write_toy


def seen(out: Path) -> set[str]:
    return {name for row in read_log(out / "log.jsonl") for name in row.get("samples", [])}


@pytest.mark.parametrize("has_stamps", [True, False], ids=["", "rows of old"])
def test_a_mended_video_counts_again_and_the_error_says_which_to_mend(
    tmp_path: Path, has_stamps: bool
):
    recipe = load_recipe(write_toy(tmp_path, clips=3, questions=1, texts=1, steps=None, epochs=1.0))
    for number in (0, 1, 2):
        shutil.move(tmp_path / f"{number}.mp4", tmp_path / f"{number}.good")
        (tmp_path / f"{number}.mp4").write_bytes(b"not a video")
    with pytest.raises(DataError) as caught:
        run(recipe)
    assert "mend 0.mp4, 1.mp4, 2.mp4, which the next run takes up" in caught.value.message
    listed = recipe.output / "quarantine.jsonl"
    assert len(read_quarantine(listed)) == 3
    if not has_stamps:
        rows = [{k: v for k, v in row.items() if k != "stamps"} for row in read_quarantine(listed)]
        listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in (0, 1):
        shutil.move(tmp_path / f"{number}.good", tmp_path / f"{number}.mp4")
    out, _ = run(recipe)
    assert seen(out) == {"data.jsonl:1", "data.jsonl:2", "data.jsonl:4"}
    assert [row["name"] for row in read_quarantine(listed)] == ["data.jsonl:3"]


def test_what_was_not_mended_is_not_tried_again(tmp_path: Path):
    recipe = load_recipe(write_toy(tmp_path, clips=2, questions=1, texts=3, steps=6))
    whole, _ = run(replace(recipe, output=tmp_path / "whole"))
    told: list[str] = []

    def stop(line: str) -> None:
        told.append(line)
        if line.startswith("step 3/6"):
            raise KeyboardInterrupt

    def break_one(stage: str, done: int, total: int) -> None:
        # After all files were looked at, so that only reading finds out.
        if stage == "load":
            (tmp_path / "1.mp4").write_bytes(b"not a video")

    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, say=stop, on_progress=break_one)
    before = (recipe.output / "quarantine.jsonl").read_text()
    out, told = run(recipe)
    assert (out / "quarantine.jsonl").read_text() == before
    assert "data.jsonl:2" not in seen(out)
    assert "data.jsonl:2" in seen(whole)
    # As long as it was when it began, however many samples are left.
    assert "going on behind step 2 of 6" in told
    assert len(losses(out)) == 6


@pytest.mark.parametrize("broken", [(), (0,), (0, 1)])
def test_check_and_run_count_the_same_samples_and_steps(tmp_path: Path, broken: tuple[int, ...]):
    keys = {"epochs": 2.0, "batch_size": 1, "length_grouped": False}
    recipe = write_toy(tmp_path, clips=3, questions=1, texts=3, steps=None, **keys)
    for number in broken:
        (tmp_path / f"{number}.mp4").write_bytes(b"not a video")
    loaded = load_recipe(recipe)
    told = check_recipe(loaded)
    good = 6 - len(broken)
    assert told.steps == 2 * good
    assert told.sources[0].samples == good
    out, _ = run(loaded)
    rows = [row["samples"][0] for row in read_log(out / "log.jsonl") if "loss" in row]
    # Each pass sees each good sample once.
    assert len(set(rows[:good])) == len(set(rows[good:])) == good
    assert len(rows) == told.steps


def test_a_file_of_data_whose_videos_are_all_broken_ends_no_run(tmp_path: Path):
    recipe = load_recipe(write_toy(tmp_path, clips=1, questions=1, texts=0, steps=3))
    (tmp_path / "0.mp4").write_bytes(b"not a video")
    other = load_recipe(write_toy(tmp_path / "more", clips=0, texts=4))
    both = replace(recipe, data=(*recipe.data, DataSource(other.data[0].path)))
    assert [source.samples for source in check_recipe(both).sources] == [4]
    out, _ = run(both)
    assert len(losses(out)) == 3


def test_a_check_changes_nothing(tmp_path: Path):
    recipe = write_toy(tmp_path, clips=1, questions=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main(["finetune", "check", str(recipe)]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = write_toy(tmp_path_factory.mktemp("toy"), clips=0, texts=4, steps=2, train=["llm"])
    return run(recipe)[0]


@pytest.mark.parametrize(
    ("name", "damage", "has_checkpoint"),
    [
        ("apollo_adapter.json", None, True),
        ("adapter_model.safetensors", b"", True),
        ("adapter_config.json", b"{}", True),
        ("recipe.toml", None, True),
        ("apollo_adapter.json", b"{", False),
        ("adapter_model.safetensors", None, False),
    ],
)
def test_a_result_that_is_not_whole_is_written_again_or_told_to_be_lost(
    done: Path, tmp_path: Path, name: str, damage: bytes | None, has_checkpoint: bool
):
    shutil.copytree(done.parent, tmp_path, dirs_exist_ok=True)
    recipe = load_recipe(tmp_path / "recipe.toml")
    path = recipe.output / name
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    if has_checkpoint:
        _, told = run(recipe)
        assert told[0].startswith("the result of this run is not whole (")
        assert told[0].endswith("it is written again")
        assert read_adapter(recipe.output).parts == ("llm",)
        weights = "adapter_model.safetensors"
        assert (recipe.output / weights).read_bytes() == (done / weights).read_bytes()
        assert run(recipe)[1][0].startswith("this run is done")
        return
    shutil.rmtree(recipe.output / "checkpoints")
    with pytest.raises(DataError, match=r"is not whole: .*train it again with --fresh"):
        run(recipe)
    run(recipe, fresh=True)
    assert read_adapter(recipe.output).parts == ("llm",)


def test_a_row_of_a_quarantine_that_makes_no_sense_is_left_out(tmp_path: Path):
    path = tmp_path / "quarantine.jsonl"
    path.write_text("[" * 100_000 + '\n{"name": "a:1", "files": []}\n{"files": 3}\n')
    assert [row["name"] for row in read_quarantine(path)] == ["a:1"]
