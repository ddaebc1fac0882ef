"""A merged checkpoint answers as model and adapter do, in any dtype, and loads as any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from apollo_cli.errors import UsageError, WeightsError
from apollo_cli.finetune import merge
from apollo_cli.finetune.adapters import load_base
from apollo_cli.finetune.merge import RECORD, merge_result
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.weights.checkpoint import read_checkpoint
from apollo_cli.weights.load import load_model
from apollo_cli.weights.repack import save_quantized
from tests import tiny
from tests.command import apollo
from tests.finetune.results import look, recipe_of, train_randomly
from tests.finetune.test_checkpoints import full_disk
from tests.tiny import Tiny

METHODS = (
    {"method": "lora", "train": ("llm", "connector")},
    {"method": "qlora", "train": ("llm",)},
    {"method": "full", "train": ("llm", "connector", "encoders")},
    {"method": "lora", "train": ("encoders",), "lora_encoders": True},
)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("merge") / "tiny", Tiny(tied=request.param, shards=3))


def with_adapter(recipe: Recipe, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model makes of the fixed input in full precision, with the result put on it."""
    plain = replace(recipe, method="lora", adapters=(recipe.output,), **changes)
    return look(load_base(plain).network)


@pytest.mark.parametrize("what", METHODS, ids=lambda what: f"{what['method']}-{what['train'][-1]}")
def test_merged_is_base_and_adapter(what: dict[str, Any], checkpoint: Path, tmp_path: Path):
    recipe = recipe_of(checkpoint, tmp_path / "out", **what)
    train_randomly(recipe)
    merged, _ = load_model(merge_result(recipe.output, tmp_path / "merged"))
    for ours, theirs in zip(look(merged), with_adapter(recipe), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_in_16_bits_each_weight_is_rounded_once(tmp_path: Path):
    base = tiny.save(tmp_path / "tiny", Tiny(dtype=torch.bfloat16))
    recipe = recipe_of(base, tmp_path / "out")
    train_randomly(recipe)
    merged, checkpoint = load_model(merge_result(recipe.output, tmp_path / "merged"))
    assert {info.dtype for info in checkpoint.tensors["llm"].values()} == {"BF16"}
    exact = load_base(replace(recipe, adapters=(recipe.output,))).network.llm.state_dict()
    for name, tensor in merged.llm.state_dict().items():
        assert torch.equal(tensor, exact[name].bfloat16().float())


def test_a_chain_is_merged_whole_and_told(checkpoint: Path, tmp_path: Path):
    one = recipe_of(checkpoint, tmp_path / "one", train=("connector",))
    two = recipe_of(checkpoint, tmp_path / "two", adapters=(one.output,))
    train_randomly(one, 1)
    train_randomly(two, 2)
    target = merge_result(two.output, tmp_path / "merged")
    for ours, theirs in zip(look(load_model(target)[0]), with_adapter(two), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)
    record = json.loads((target / RECORD).read_text())
    assert record["base"]["name"] == str(checkpoint)
    assert [row["name"] for row in record["adapters"]] == ["one", "two"]


def test_what_did_not_change_is_the_same_file(checkpoint: Path, tmp_path: Path):
    recipe = recipe_of(checkpoint, tmp_path / "out", train=("connector",))
    train_randomly(recipe)
    target = merge_result(recipe.output, tmp_path / "merged")
    for path in checkpoint.rglob("*"):
        relative = path.relative_to(checkpoint)
        if path.is_file() and not path.parts[-2].startswith("mm_connector"):
            assert (target / relative).read_bytes() == path.read_bytes()


def test_a_merged_checkpoint_is_a_base_of_its_own(checkpoint: Path, tmp_path: Path):
    recipe = recipe_of(checkpoint, tmp_path / "out")
    train_randomly(recipe)
    target = merge_result(recipe.output, tmp_path / "merged")
    with pytest.raises(WeightsError, match="was trained from"):
        load_base(replace(recipe, model=str(target), adapters=(recipe.output,)))
    train_randomly(replace(recipe, model=str(target), output=tmp_path / "next"))
    assert (tmp_path / "next" / "apollo_adapter.json").is_file()


def test_an_output_is_never_overwritten(checkpoint: Path, tmp_path: Path):
    recipe = recipe_of(checkpoint, tmp_path / "out")
    train_randomly(recipe)
    (tmp_path / "merged").mkdir()
    with pytest.raises(UsageError, match="exists"):
        merge_result(recipe.output, tmp_path / "merged")
    assert list((tmp_path / "merged").iterdir()) == []


@pytest.mark.parametrize("name", ["merged.unfinished", ".merged", ".apollo-merge-mine"])
def test_a_merge_touches_nothing_that_was_there(checkpoint: Path, tmp_path: Path, name: str):
    recipe = recipe_of(checkpoint, tmp_path / "out")
    train_randomly(recipe)
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("mine")
    target = merge_result(recipe.output, tmp_path / "merged")
    assert (tmp_path / name / "thesis.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "merged", name}
    assert target.stat().st_mode == recipe.output.stat().st_mode


def test_two_merges_into_one_folder_never_mix(checkpoint: Path, tmp_path: Path):
    one = recipe_of(checkpoint, tmp_path / "one", train=("connector",))
    two = recipe_of(checkpoint, tmp_path / "two")
    train_randomly(one)
    train_randomly(two)
    alone = merge_result(two.output, tmp_path / "alone")

    def overtake(done: int, total: int) -> None:
        if not (tmp_path / "both").exists():
            merge_result(two.output, tmp_path / "both")

    with pytest.raises(WeightsError, match="both cannot be written"):
        merge_result(one.output, tmp_path / "both", on_progress=overtake)
    files = list(alone.rglob("*.safetensors"))
    assert files
    for path in files:
        assert (tmp_path / "both" / path.relative_to(alone)).read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "both" / RECORD).read_text())["adapters"][0]["name"] == "two"


def test_a_merge_that_fails_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = recipe_of(checkpoint, tmp_path / "out")
    train_randomly(recipe)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merge.ShardWriter, "add", full)
    with pytest.raises(WeightsError, match="No space left"):
        merge_result(recipe.output, tmp_path / "merged")
    assert not [path for path in tmp_path.iterdir() if "merge" in path.name]


def test_a_disk_that_is_full_while_tensors_are_written_is_one_clear_error(
    checkpoint: Path, tmp_path: Path
):
    recipe = recipe_of(checkpoint, tmp_path / "out")
    train_randomly(recipe)
    with (
        full_disk(limit_bytes=8192),
        pytest.raises(WeightsError, match=r"cannot be written .*make room"),
    ):
        merge_result(recipe.output, tmp_path / "merged")
    assert not [path for path in tmp_path.iterdir() if "merge" in path.name]


def test_a_result_of_a_quantised_copy_goes_into_the_full_model(checkpoint: Path, tmp_path: Path):
    stored = save_quantized(checkpoint, tmp_path / "stored", "4bit").folder
    recipe = recipe_of(stored, tmp_path / "out", method="qlora")
    train_randomly(recipe)
    with pytest.raises(WeightsError, match="--model"):
        merge_result(recipe.output, tmp_path / "merged")
    target = merge_result(recipe.output, tmp_path / "merged", base=str(checkpoint))
    merged, theirs = look(load_model(target)[0]), with_adapter(recipe, model=str(checkpoint))
    assert torch.allclose(merged[1], theirs[1], atol=1e-5, rtol=1e-5)


def test_the_command_prints_the_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    moved = Path(copytree(checkpoint, tmp_path / "renamed"))
    recipe = recipe_of(checkpoint, tmp_path / "out")
    train_randomly(recipe)
    monkeypatch.chdir(tmp_path)
    done = apollo("finetune", "merge", "out", "-o", "merged", "--model", moved)
    assert done == (0, f"{tmp_path / 'merged'}\n", "")
    assert read_checkpoint(tmp_path / "merged").tied_head == read_checkpoint(moved).tied_head
