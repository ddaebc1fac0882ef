"""What a run keeps: checkpoints by time, no value that is NaN, and nothing that a kill left."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from apollo_cli import cli
from apollo_cli.errors import DataError
from apollo_cli.finetune.adapters import load_base, prepare_network, save_result
from apollo_cli.finetune.merge import merge_result
from apollo_cli.finetune.recipe import Recipe, load_recipe
from apollo_cli.finetune.training.loop import run_recipe
from apollo_cli.finetune.training.trainee import Optimiser
from tests import tiny
from tests.cases import FOLDER as MEDIA
from tests.finetune.results import recipe_of, train_randomly
from tests.finetune.toy import write_toy


def silent(line: str) -> None: ...


def kill_in(recipe: Recipe, step: int, save_seconds: float) -> None:
    """End a run in a step, before anything that follows it."""

    def stop(line: str) -> None:
        if line.startswith(f"step {step}/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, say=stop, save_seconds=save_seconds)


def names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").glob("*"))


def test_a_run_shorter_than_save_every_is_gone_on_with_behind_its_last_minute(
    tmp_path: Path,
) -> None:
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=4, save_every=100, lora_dropout=0.1))
    whole = run_recipe(
        Recipe(**{**vars(recipe), "output": tmp_path / "whole"}), say=silent, save_seconds=1e9
    )
    assert names(whole) == ["step-000004"]
    kill_in(recipe, 3, save_seconds=1e9)
    assert names(recipe.output) == []
    kill_in(recipe, 3, save_seconds=0)
    assert names(recipe.output) == ["step-000001", "step-000002"]
    told: list[str] = []
    run_recipe(recipe, say=told.append, save_seconds=1e9)
    assert told[0] == "going on behind step 2 of 4"
    for file in whole.glob("*.safetensors"):
        one, other = load_file(file), load_file(recipe.output / file.name)
        assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def test_what_a_kill_left_in_the_output_is_cleared_by_the_next_run(tmp_path: Path) -> None:
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=2, steps=1))
    output = recipe.output
    torn = [output / ".result.unfinished" / "a", output / "checkpoints" / ".step-000001.part" / "a"]
    torn += [output / ".log.jsonl.77.new", output / "features" / ".list-0.json.77.new"]
    kept = [output / "notes.new", output / ".hidden"]
    for path in (*torn, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    run_recipe(recipe, say=silent)
    assert not [path for path in (*torn, *(path.parent for path in torn[:2])) if path.exists()]
    assert all(path.read_text() == "x" for path in kept)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "model")


def spoil(file: Path, value: float) -> str:
    """Put a value into the middle of a file's first tensor; the tensor's name."""
    tensors = load_file(file)
    name = min(tensors)
    tensors[name].view(-1)[tensors[name].numel() // 2] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=str)
@pytest.mark.parametrize("kind", ["lora", "full", "merged"])
def test_a_result_with_a_value_that_is_no_number_is_refused_by_its_tensor(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], kind: str, value: float
) -> None:
    out = tmp_path / "out"
    train_randomly(recipe_of(model, out, method="full" if kind == "full" else "lora"))
    if kind == "merged":
        merged = merge_result(out, tmp_path / "merged")
        file, flags = merged / "llm" / "model.safetensors", ["--model", str(merged)]
        name = spoil(file, value)
    else:
        file = out / ("llm.safetensors" if kind == "full" else "adapter_model.safetensors")
        name = spoil(file, value)
        manifest = json.loads((out / "apollo_adapter.json").read_text())
        manifest["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        (out / "apollo_adapter.json").write_text(json.dumps(manifest))
        flags = ["--model", str(model), "--adapter", str(out)]
    asked = ["ask", str(MEDIA / "cfr30.mp4"), "What?", "--device", "cpu", *flags]
    assert cli.main(asked) == 5
    told = capsys.readouterr().err
    assert name in told
    assert file.name in told


def test_a_value_that_is_no_number_is_not_saved_as_a_result(tmp_path: Path, model: Path) -> None:
    recipe = recipe_of(model, tmp_path / "out")
    train_randomly(recipe)
    before = {path.name: path.read_bytes() for path in recipe.output.iterdir() if path.is_file()}
    base = load_base(recipe)
    trained = prepare_network(base.network, recipe)
    with torch.no_grad():
        next(iter(trained.parameters.values())).view(-1)[0] = float("nan")
    with pytest.raises(DataError, match=r"lora_A.* NaN") as caught:
        save_result(base, trained, recipe, recipe.output)
    assert caught.value.exit_code == 7
    after = {path.name: path.read_bytes() for path in recipe.output.iterdir() if path.is_file()}
    assert after == before


def test_a_last_step_that_ends_in_no_number_leaves_neither_checkpoint_nor_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(write_toy(tmp_path, clips=0, texts=2, steps=1))
    step = Optimiser.step

    def overflow(self: Optimiser, learned: bool) -> None:
        step(self, learned)
        with torch.no_grad():
            next(iter(self.parameters.values())).fill_(float("inf"))

    monkeypatch.setattr(Optimiser, "step", overflow)
    with pytest.raises(DataError, match="NaN or infinite"):
        run_recipe(recipe, say=silent)
    assert names(recipe.output) == []
    assert not (recipe.output / "apollo_adapter.json").exists()
