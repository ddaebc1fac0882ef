"""The loop: it learns, costs a broken sample only itself, and each trouble is one clear error."""

import importlib.metadata
import json
import shutil
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from apollo_cli.errors import DataError, FitError
from apollo_cli.finetune.adapters import load_base
from apollo_cli.finetune.data.dataset import load_dataset
from apollo_cli.finetune.recipe import Recipe, load_recipe
from apollo_cli.finetune.training import preparing
from apollo_cli.finetune.training.checkpoints import list_changes
from apollo_cli.finetune.training.loop import run_recipe
from apollo_cli.finetune.training.preparing import identify_run
from apollo_cli.finetune.training.records import read_log
from apollo_cli.finetune.training.stopping import LossWatch
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.loaded_model import LoadedModel
from apollo_cli.model.tokenizer import load_tokenizer
from apollo_cli.weights.store import locate_model
from tests import tiny
from tests.finetune.test_checkpoints import full_disk
from tests.finetune.toy import copy_toy, write_toy


def run(recipe: Path | Recipe, *, fresh: bool = False) -> tuple[Path, list[str]]:
    told: list[str] = []
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    return run_recipe(loaded, say=told.append, fresh=fresh), told


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_log(out / "log.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    recipe = write_toy(tmp_path_factory.mktemp("toy"), steps=12, validation_share=0.2)
    return run(recipe)


def test_a_run_leaves_its_result_its_log_its_picture_and_the_next_commands(
    done: tuple[Path, list[str]],
):
    out, told = done
    assert {path.name for path in out.iterdir()} >= {
        *("apollo_adapter.json", "adapter_model.safetensors", "connector.safetensors"),
        *("recipe.toml", "run.json", "log.jsonl", "loss.png", "checkpoints"),
    }
    assert len(losses(out)) == 12
    with Image.open(out / "loss.png") as picture:
        assert picture.format == "PNG"
    facts = json.loads((out / "run.json").read_text())
    # As the package manager names it, which may leave out the local part (+cpu) that torch says.
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    assert len(facts["run"]["data data.jsonl"]) == 64
    assert facts["validation"]["answered"] == 2
    assert any(line.startswith("step 12/12  loss ") for line in told)
    assert f"--adapter {out}" in told[-2]
    assert "apollo finetune merge" in told[-1]


def test_a_run_learns(tmp_path: Path):
    recipe = write_toy(tmp_path, clips=0, texts=4, steps=25, learning_rate=5e-3)
    out, _ = run(recipe)
    assert losses(out)[-1] < 0.2 * losses(out)[0]


def test_running_again_says_that_it_is_done(done: tuple[Path, list[str]]):
    out, _ = done
    again, told = run(load_recipe(out.parent / "recipe.toml"))
    assert again == out
    assert told == [f"this run is done: {out} holds its result; --fresh trains it again"]


def test_a_changed_recipe_or_data_is_refused_with_what_has_changed(
    done: tuple[Path, list[str]], tmp_path: Path
):
    out, _ = done
    folder = tmp_path / "copy"
    shutil.copytree(out.parent, folder)
    recipe = load_recipe(folder / "recipe.toml")
    with (folder / "data.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": "Why?"},
                        {"role": "assistant", "content": "So."},
                    ]
                }
            )
            + "\n"
        )
    with pytest.raises(DataError, match="--fresh") as caught:
        run(replace(recipe, seed=1, readers=1, micro_batch_size=2))
    assert set(caught.value.faults) == {
        "seed was 0 and is 1",
        "data data.jsonl has changed",
        "the list of samples that can be used has changed",
    }


def identify(recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint would know a run by."""
    model = locate_model(recipe.model, adapters=recipe.adapters)
    return json.loads(json.dumps(identify_run(recipe, load_dataset(recipe), model)))


def test_each_of_two_data_files_of_one_name_is_known(tmp_path: Path):
    recipes = [load_recipe(write_toy(tmp_path / name, clips=0, texts=3)) for name in "ab"]
    both = replace(recipes[0], data=recipes[0].data + recipes[1].data)
    before = identify(both)
    for recipe in recipes:
        path = recipe.data[0].path
        text = path.read_text()
        path.write_text(text.replace("It is 2.", "It is two."))
        assert list_changes(before, identify(both)) == [f"data {path} has changed"]
        path.write_text(text)


def test_micro_batches_are_free_to_change_unless_inputs_are_dropped(tmp_path: Path):
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=3))
    assert identify(replace(recipe, micro_batch_size=2)) == identify(recipe)
    one, two = [identify(replace(recipe, lora_dropout=0.1, micro_batch_size=n)) for n in (1, 2)]
    assert list_changes(one, two) == ["micro_batch_size was 1 and is 2"]


@pytest.mark.parametrize("train", [["llm", "connector"], ["llm"]], ids=["decoded", "watched"])
def test_a_run_that_goes_on_says_that_a_video_has_changed(tmp_path: Path, train: list[str]):
    recipe = load_recipe(write_toy(tmp_path, clips=2, train=train))

    def stop(line: str) -> None:
        if line.startswith("step 3/4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, say=stop)
    shutil.copytree(tmp_path, tmp_path / "same")
    _, told = run(load_recipe(tmp_path / "same" / "recipe.toml"))
    assert told[0] == "going on behind step 2 of 4"
    shutil.copyfile(tmp_path / "0.mp4", tmp_path / "1.mp4")
    out, told = run(recipe)
    assert told[0] == (
        "videos or images were written anew since step 2; they are learned from as they are now"
    )
    assert told[1] == "going on behind step 2 of 4"
    assert len(losses(out)) == 4
    shutil.copyfile(tmp_path / "0.mp4", tmp_path / "1.mp4")
    assert run(recipe)[1][0].startswith("this run is done")


def test_fresh_forgets_the_earlier_run(tmp_path: Path):
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=4, steps=2))
    first, _ = run(recipe)
    before = losses(first)
    (first / "quarantine.jsonl").write_text('{"name": "data.jsonl:1", "files": []}\n')
    _, told = run(replace(recipe, steps=3), fresh=True)
    assert not any("going on" in line for line in told)
    assert len(losses(first)) == 3
    assert losses(first)[0] == before[0]
    assert not (first / "quarantine.jsonl").exists()


def test_the_micro_batch_changes_nothing_but_the_order_of_sums(tmp_path: Path):
    recipe = load_recipe(write_toy(tmp_path, clips=1, steps=3))
    one, _ = run(recipe)
    all_at_once = replace(recipe, micro_batch_size=4, output=tmp_path / "other", readers=1)
    other, _ = run(all_at_once)
    assert losses(one) == pytest.approx(losses(other), abs=1e-5)


@pytest.mark.parametrize("train", [["llm", "connector"], ["llm"]], ids=["decoded", "watched"])
def test_a_broken_video_costs_its_samples_and_never_the_run(tmp_path: Path, train: list[str]):
    recipe = write_toy(tmp_path, clips=3, questions=1, texts=4, steps=6, train=train)
    (tmp_path / "1.mp4").write_bytes(b"not a video")
    told: list[str] = []

    def take_away(stage: str, done: int, total: int) -> None:
        # After all files were looked at, so that only reading finds out.
        if stage == "load":
            (tmp_path / "2.mp4").unlink(missing_ok=True)

    threads = threading.active_count()
    out = run_recipe(load_recipe(recipe), say=told.append, on_progress=take_away)
    assert told[0] == "1 sample is left out; apollo finetune check names each"
    assert told[1].startswith("  1 x broken video, such as data.jsonl:2: 1.mp4: ")
    assert sum(line.startswith("sample data.jsonl:3 is left out: ") for line in told) == 1
    rows = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    named = {row["name"]: row["reason"] for row in rows}
    assert named.keys() == {"data.jsonl:2", "data.jsonl:3"}
    assert "1.mp4" in named["data.jsonl:2"]
    assert "2.mp4" in named["data.jsonl:3"]
    trained = {n for row in read_log(out / "log.jsonl") for n in row.get("samples", [])}
    assert not trained & set(named)
    assert len(losses(out)) == 6
    assert threading.active_count() == threads


@pytest.mark.parametrize("train", [["llm", "connector"], ["llm"]], ids=["decoded", "watched"])
def test_a_broken_video_that_is_held_out_is_said_once_and_counted_each_time(
    tmp_path: Path, train: list[str]
):
    keys: dict[str, Any] = {"steps": 4, "validate_every": 2, "validation_share": 0.4}
    recipe = load_recipe(write_toy(tmp_path, clips=3, questions=1, texts=4, train=train, **keys))
    held_out = [sample for sample in load_dataset(recipe).held_out if sample.visuals]
    assert held_out
    told: list[str] = []

    def take_away(stage: str, done: int, total: int) -> None:
        # After all files were looked at, so that only reading finds out.
        for sample in held_out if stage == "load" else ():
            sample.visuals[0].path.unlink(missing_ok=True)

    out = run_recipe(recipe, say=told.append, on_progress=take_away)
    for sample in held_out:
        assert sum(line.startswith(f"sample {sample.name} is left out: ") for line in told) == 1
    rows = [row["validation"] for row in read_log(out / "log.jsonl") if "validation" in row]
    assert [row["broken"] for row in rows] == [len(held_out)] * 2


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("train", [["connector"], ["encoders"], ["connector", "encoders"]], ids=str)
def test_text_teaches_nothing_to_what_it_does_not_reach_and_stops_no_run(
    tmp_path: Path, method: str, train: list[str]
):
    keys = {"stage": "custom", "method": method, "train": train, "learning_rate": None}
    more = {"steps": 3, "batch_size": 1, "save_every": 1, "keep_checkpoints": 3}
    recipe = load_recipe(write_toy(tmp_path, clips=1, questions=1, **keys, **more))
    out, _ = run(recipe)
    rows = [row for row in read_log(out / "log.jsonl") if "loss" in row]
    states = [load_file(p / "trained.safetensors") for p in sorted(out.glob("checkpoints/step-*"))]
    assert len(rows) == len(states) == 3
    for row, before, after in zip(rows[1:], states, states[1:], strict=False):
        learned = row["samples"] == ["data.jsonl:1"]
        assert (row["gradient_norm"] > 0) == learned
        assert all(torch.equal(before[name], after[name]) for name in before) != learned
    assert len({tuple(row["rates"].values()) for row in rows}) == 3


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_text_beside_video_adds_nothing_and_counts_in_the_loss(tmp_path: Path, micro: int):
    keys: dict[str, Any] = {"stage": "custom", "train": ["connector"], "learning_rate": None}
    recipe = load_recipe(write_toy(tmp_path, clips=1, steps=3, **keys))
    one, _ = run(recipe)
    other, _ = run(replace(recipe, micro_batch_size=micro, output=tmp_path / "other"))
    assert losses(one) == pytest.approx(losses(other), abs=1e-5)
    assert losses(one)[-1] < losses(one)[0]


def test_data_that_is_mostly_broken_is_no_run(tmp_path: Path):
    recipe = write_toy(tmp_path, clips=3, texts=1)
    for number in range(3):
        (tmp_path / f"{number}.mp4").write_bytes(b"not a video")
    with pytest.raises(DataError, match=r"6 of 7 samples cannot be read.*apollo finetune check"):
        run(recipe)


def test_data_that_turns_out_to_be_mostly_broken_while_it_is_watched_is_no_run(tmp_path: Path):
    recipe = load_recipe(write_toy(tmp_path, clips=3, texts=1, train=["llm"]))
    told: list[str] = []

    def take_away(stage: str, done: int, total: int) -> None:
        # After all files were looked at, so that only reading finds out.
        for number in range(2) if stage == "load" else ():
            (tmp_path / f"{number}.mp4").write_bytes(b"not a video")

    with pytest.raises(DataError, match=r"4 of 7 samples cannot be read"):
        run_recipe(recipe, say=told.append, on_progress=take_away)
    assert sum(line.startswith("sample data.jsonl:") for line in told) == 4


def test_samples_that_are_left_out_are_counted_by_kind(tmp_path: Path):
    recipe = write_toy(tmp_path, clips=0, texts=4, steps=1)
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"messages": []}\n{"messages": \n')
    _, told = run(recipe)
    assert "2 samples are left out; apollo finetune check names each" in told


def test_a_loss_that_is_no_number_stops_and_names_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tiny.save(tmp_path / "model")
    recipe = write_toy(
        tmp_path, clips=0, texts=4, steps=8, batch_size=2, save_every=1, model=str(model)
    )
    # A token that only the last sample has is sick; not in the file, which would be refused.
    tokenizer = load_tokenizer(model / "llm")
    sick = set(tokenizer.encode("What is 3 and 3?It is 6."))
    for n in range(3):
        sick -= set(tokenizer.encode(f"What is {n} and {n}? It is {2 * n}."))

    def load_sick(*args: Any, **options: Any) -> LoadedModel:
        base = load_base(*args, **options)
        base.network.llm.model.embed_tokens.weight[sorted(sick)] = float("nan")
        return base

    monkeypatch.setattr(preparing, "load_base", load_sick)
    with pytest.raises(
        DataError, match=r"the loss is nan; its samples are data\.jsonl:4;"
    ) as caught:
        run(recipe)
    step = len(losses(tmp_path / "out"))
    last = f"the last checkpoint is of step {step}" if step else "nothing saved"
    assert last in caught.value.message
    saved = sorted((tmp_path / "out").glob("checkpoints/*/trained.safetensors"))
    assert all(t.isfinite().all() for path in saved for t in load_file(path).values())


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path):
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=4, steps=2))
    refused: list[str] = []

    def again(line: str) -> None:
        if line.startswith("step 1/2") and not refused:
            with pytest.raises(DataError) as caught:
                run(recipe)
            refused.append(caught.value.message)

    run_recipe(recipe, say=again)
    assert "another run is writing to" in refused[0]


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "qlora", "train": ["llm"], "optimizer": "adamw8bit", "tensorboard": True},
        {"stage": 1, "method": "full", "texts": 0, "learning_rate": None, "warmup_share": 0.5},
        {"stage": 2, "method": "lora", "texts": 0, "learning_rate": None, "lora_encoders": True},
        {"length_grouped": False, "micro_batch_size": 3, "gradient_checkpointing": True},
    ],
    ids=["qlora, cached, 8 bit", "stage 1", "stage 2", "checkpointed"],
)
def test_a_run_that_goes_on_equals_one_that_was_not_stopped(tmp_path: Path, keys: dict[str, Any]):
    recipe = load_recipe(write_toy(tmp_path, clips=2, **{"texts": 1, "lora_dropout": 0.1} | keys))
    whole, _ = run(replace(recipe, output=tmp_path / "whole"))

    def stop(line: str) -> None:
        if line.startswith("step 3/4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, say=stop)
    out, told = run(recipe)
    assert told[0] == "going on behind step 2 of 4"
    assert losses(out) == losses(whole)
    for file in whole.rglob("*.safetensors"):
        if "features" in file.parts:
            continue
        expected, found = load_file(file), load_file(out / file.relative_to(whole))
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


MOMENTS = {
    "before a measurement": ("step 1/4", 2),
    "in a measurement": ("validate 1", 2),
    "behind a measurement": ("step 2: held out", 2),
    "in the last measurement": ("validate 3", 4),
    "behind the last measurement": ("step 4: held out", 4),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with measurements on the way that nothing disturbed; its recipe."""
    keys: dict[str, Any] = {"validation_share": 0.3, "save_every": 2, "validate_every": 2}
    recipe = write_toy(tmp_path_factory.mktemp("measured"), **keys)
    run(recipe)
    return recipe


@pytest.mark.parametrize(("moment", "last"), MOMENTS.values(), ids=MOMENTS.keys())
def test_a_stop_around_a_measurement_costs_no_step_and_none_is_told_twice(
    tmp_path: Path, measured: Path, moment: str, last: int
):
    whole = measured.parent / "out"
    recipe = load_recipe(copy_toy(measured, tmp_path))
    seen: list[int] = []

    def stop(line: str) -> None:
        if not line.startswith(moment):
            return
        if "1/4" in line:
            # The loop ends itself, behind the next step.
            signal.raise_signal(signal.SIGINT)
        else:
            raise KeyboardInterrupt

    def count(stage: str, done: int, total: int) -> None:
        if stage == "validate":
            seen.append(done)
            stop(f"validate {len(seen)}")

    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, say=stop, on_progress=count)
    out, told = run(recipe)
    assert told[0] == f"going on behind step {last} of 4"
    logs = [read_log(folder / "log.jsonl") for folder in (out, whole)]
    keys = ("step", "loss", "validation")
    found, expected = [[[row.get(key) for key in keys] for row in log] for log in logs]
    assert found == expected
    assert [row["step"] for row in logs[0] if "validation" in row] == [2, 4]
    facts = [json.loads((folder / "run.json").read_text()) for folder in (out, whole)]
    assert facts[0]["validation"] == facts[1]["validation"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_or_measurement_too_large_for_the_memory_says_what_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: float
):
    keys: dict[str, Any] = {"texts": 4, "validation_share": 0.3, "lora_dropout": dropout}
    recipe = load_recipe(write_toy(tmp_path, clips=0, steps=2, micro_batch_size=2, **keys))

    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError

    def at_measurement(stage: str, done: int, total: int) -> None:
        if stage == "validate":
            too_much()

    with pytest.raises(FitError, match="the measurement behind step 2 does not fit"):
        run_recipe(recipe, say=lambda line: None, on_progress=at_measurement)
    monkeypatch.setattr(Trainee, "forward", too_much)
    with pytest.raises(FitError, match="step 1 does not fit") as caught:
        run(recipe, fresh=True)
    # What may change and what may not, as the same run sees it.
    free, _, fresh = caught.value.next_step.partition(", or ")
    assert ("micro_batch_size" in free) == (dropout == 0)
    assert identify(replace(recipe, gradient_checkpointing=True)) == identify(recipe)
    assert "gradient_checkpointing = true" in free
    assert list_changes(identify(recipe), identify(replace(recipe, max_tokens=300)))
    assert "max_tokens" in fresh
    assert fresh.endswith("--fresh")


def test_a_full_disk_is_one_error_and_the_run_goes_on_from_the_last_checkpoint(tmp_path: Path):
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=4, steps=6))
    whole, _ = run(replace(recipe, output=tmp_path / "whole"))
    with ExitStack() as disk:

        def fill(line: str) -> None:
            if line.startswith("step 3/6"):
                disk.enter_context(full_disk(10_000))

        with pytest.raises(DataError, match=r"step 4 cannot be .* last good one is step-000002"):
            run_recipe(recipe, say=fill)
    out, told = run(recipe)
    assert told[0] == "going on behind step 2 of 6"
    assert losses(out) == losses(whole)


def test_an_exploding_loss_is_told_after_some_steps_and_noise_is_not():
    watch = LossWatch(10)
    assert not any(watch.explodes(step, 3.0 if step < 5 else 1.0) for step in range(40))
    assert not watch.explodes(40, 30.0)
    assert not watch.explodes(41, 1.0)
    assert [watch.explodes(step, 7.0) for step in range(42, 47)] == [False] * 4 + [True]
    tiny = LossWatch(0)
    assert not any(tiny.explodes(step, 0.001 if step % 3 else 0.5) for step in range(100))
    # Batches of hard samples come in rows now and then.
    mixed = LossWatch(0)
    assert not any(mixed.explodes(step, 9.0 if step % 20 < 8 else 0.001) for step in range(300))


def test_a_result_that_the_disk_does_not_hold_is_saved_by_the_next_run(tmp_path: Path):
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=4, validation_share=0.3, steps=2))
    with ExitStack() as disk:

        def fill(line: str) -> None:
            if line.startswith("step 2: held out"):
                disk.enter_context(full_disk(10_000))

        with pytest.raises(DataError, match=r"the result .* cannot .*; make room and run again"):
            run_recipe(recipe, say=fill)
    assert not (recipe.output / "apollo_adapter.json").exists()
    out, told = run(recipe)
    assert told[0] == "going on behind step 2 of 2"
    assert (out / "apollo_adapter.json").exists()
    assert any(line.startswith("done: 2 steps") for line in told)
