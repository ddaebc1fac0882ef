"""A result of training on its model: found, checked in every way, and told in the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from apollo_cli import engine
from apollo_cli.config import GenerationOptions
from apollo_cli.errors import WeightsError
from apollo_cli.finetune.adapters import load_base
from apollo_cli.finetune.merge import merge_result
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.memory_cache import fingerprint
from apollo_cli.weights.adapter import (
    LORA_CONFIG,
    LORA_FILE,
    MANIFEST,
    read_adapter,
    resolve_chain,
)
from apollo_cli.weights.checkpoint import read_checkpoint
from apollo_cli.weights.repack import save_quantized
from tests import tiny
from tests.command import apollo
from tests.finetune.results import look, recipe_of, train_randomly
from tests.tiny import Tiny

NANO = Path(__file__).parents[2] / "weights" / "nano"
CASES = Path(__file__).parents[1] / "cases"
SHORT = GenerationOptions(max_new_tokens=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("adapter") / "tiny")


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    recipe = recipe_of(
        checkpoint, tmp_path_factory.mktemp("trained") / "out", train=("llm", "connector")
    )
    train_randomly(recipe)
    return recipe


@pytest.fixture
def copy(trained: Recipe, tmp_path: Path) -> Path:
    return Path(copytree(trained.output, tmp_path / "copy"))


def change(folder: Path, name: str, edit: Callable[[Any], None]) -> None:
    """Change a JSON file of a result, and its hash in the manifest besides."""
    path = folder / name
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    seal(folder, name)


def seal(folder: Path, name: str) -> None:
    """Make the manifest agree with a file that was changed."""
    place = folder / MANIFEST
    if name != MANIFEST:
        manifest = json.loads(place.read_text())
        manifest["files"][name] = sha256((folder / name).read_bytes()).hexdigest()
        place.write_text(json.dumps(manifest))


def rewrite(folder: Path, name: str, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change tensors of a result."""
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name)
    seal(folder, name)


def refused(folder: Path, checkpoint: Path, words: str) -> None:
    with pytest.raises(WeightsError, match=words) as caught:
        engine.load(checkpoint, adapter=folder, device="cpu")
    assert "\n" not in caught.value.message


def test_the_answer_tells_which_result_is_on_the_model(trained: Recipe, checkpoint: Path):
    apollo = engine.load(checkpoint, adapter=trained.output, device="cpu", dtype="float32")
    adapter = apollo.ask(None, "one?", SHORT).model["adapter"]
    assert adapter == read_adapter(trained.output).describe()
    assert adapter["name"] == "out"
    plain = engine.load(checkpoint, device="cpu", dtype="float32")
    assert plain.ask(None, "one?", SHORT).model["adapter"] is None
    one, other = look(apollo.network)[1], look(plain.network)[1]
    assert not torch.allclose(one, other, atol=0.01)


def test_without_a_model_the_result_names_it(trained: Recipe, checkpoint: Path):
    apollo = engine.load(adapter=trained.output, device="cpu")
    assert apollo.located.folder == checkpoint
    assert not apollo.located.chosen


def test_a_model_that_moved_is_asked_for(tmp_path: Path):
    base = tiny.save(tmp_path / "base")
    recipe = recipe_of(base, tmp_path / "out")
    train_randomly(recipe)
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(WeightsError, match="base' does not exist; that model is needed"):
        engine.load(adapter=recipe.output, device="cpu")
    engine.load(moved, adapter=recipe.output, device="cpu")


def test_the_same_weights_under_another_name_and_in_other_files_are_the_same_model(
    trained: Recipe, tmp_path: Path
):
    moved = tiny.save(tmp_path / "another name", Tiny(shards=2))
    apollo = engine.load(moved, adapter=trained.output, device="cpu")
    assert apollo.describe()["adapter"]["name"] == trained.output.name


def test_a_file_in_place_of_a_result_is_not_called_missing(checkpoint: Path):
    file = checkpoint / "config.json"
    refused(file, checkpoint, f"adapter {file} is a file; ")


def test_a_part_that_differs_is_named_once(trained: Recipe, checkpoint: Path, tmp_path: Path):
    other = Path(copytree(checkpoint, tmp_path / "other"))
    tensors = load_file(other / "llm" / "model.safetensors")
    for tensor in tensors.values():
        tensor.mul_(1.5)
    save_file(tensors, other / "llm" / "model.safetensors", {"format": "pt"})
    refused(trained.output, other, r"differs in llm; allowed")


@pytest.mark.parametrize("other", [Tiny(seed=1), Tiny(dtype=torch.bfloat16)])
def test_another_model_is_refused(other: Tiny, trained: Recipe, tmp_path: Path):
    refused(trained.output, tiny.save(tmp_path / "other", other), "was trained from .*tiny; .*")


def test_a_model_with_one_changed_tensor_is_refused(
    trained: Recipe, checkpoint: Path, tmp_path: Path
):
    other = Path(copytree(checkpoint, tmp_path / "other"))
    tensors = load_file(other / "mm_connector" / "model.safetensors")
    next(iter(tensors.values())).mul_(1.5)
    save_file(tensors, other / "mm_connector" / "model.safetensors")
    refused(trained.output, other, "differs in mm_connector")


@pytest.mark.parametrize("name", [LORA_FILE, "connector.safetensors"])
def test_missing_extra_and_misshapen_tensors_are_refused(name: str, copy: Path, checkpoint: Path):
    rewrite(copy, name, lambda tensors: tensors.pop(next(iter(tensors))))
    refused(copy, checkpoint, "lacks 1 tensor")
    rewrite(copy, name, lambda tensors: tensors.update(more=torch.ones(2)))
    refused(copy, checkpoint, r"has 1 unknown tensor \(more\)")
    key = next(key for key in load_file(copy / name) if key != "more")
    rewrite(copy, name, lambda tensors: tensors.update({key: torch.ones(3, 5)}))
    refused(copy, checkpoint, r"is \[3, 5\], needed is")


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"something_new": 1},
        {"peft_type": "IA3"},
        {"target_modules": "all-linear"},
        {"target_modules": [1]},
        {"r": True},
        {"r": 0},
        {"lora_alpha": "8"},
    ],
)
def test_settings_that_are_not_known_are_refused(
    setting: dict[str, Any], copy: Path, checkpoint: Path
):
    change(copy, LORA_CONFIG, lambda config: config.update(setting))
    refused(copy, checkpoint, "settings that are not read here")


def test_a_target_that_is_no_linear_layer_is_refused(copy: Path, checkpoint: Path):
    change(copy, LORA_CONFIG, lambda config: config["target_modules"].append("embed_tokens"))
    refused(copy, checkpoint, "embed_tokens is not a linear layer")


@pytest.mark.parametrize("name", [LORA_FILE, LORA_CONFIG, "connector.safetensors", "recipe.toml"])
def test_a_file_that_changed_or_went_is_named(name: str, copy: Path, checkpoint: Path):
    path = copy / name
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    refused(copy, checkpoint, f"{name}.*has changed|settings|JSON")
    path.unlink()
    refused(copy, checkpoint, f"{name}.* is missing")


@pytest.mark.parametrize("name", [MANIFEST, LORA_CONFIG])
def test_no_bad_value_of_a_result_is_an_unexpected_error(name: str, copy: Path, checkpoint: Path):
    place, expected = copy / name, read_adapter(copy)
    before, kept = json.loads(place.read_text()), (copy / MANIFEST).read_text()
    for key in before:
        for bad in (
            None,
            float("nan"),
            1e999,
            -3,
            True,
            [],
            {},
            [[{"a": 1}]],
            {"a": {"b": 2}},
            "x",
        ):
            place.write_text(json.dumps(before | {key: bad}))
            seal(copy, name)
            try:
                found = read_adapter(copy)
            except WeightsError as error:
                assert name in error.message
                assert key in error.message or "JSON" in error.message or key == "files"
            else:
                assert found.lora.keys() == expected.lora.keys()
            (copy / MANIFEST).write_text(kept)
    place.write_text(json.dumps(before))


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.pop("base"),
        lambda m: m.update(files={}),
        lambda m: m.update(files=[]),
        lambda m: m["files"].update({"model.bin": "0"}),
        lambda m: m["files"].update({"../../etc/passwd": "0"}),
        lambda m: m.update(adapters={"a": 1}),
        lambda m: m.update(version=2),
        lambda m: m.update(format="other"),
        lambda m: m["base"].update(identity=None),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(
    edit: Callable[[Any], None], copy: Path, checkpoint: Path
):
    change(copy, MANIFEST, edit)
    refused(copy, checkpoint, MANIFEST)


def test_a_folder_without_a_result_says_what_makes_one(tmp_path: Path, checkpoint: Path):
    refused(tmp_path, checkpoint, "apollo finetune run")
    refused(tmp_path / "none", checkpoint, "does not exist")


def test_watched_videos_stay_valid_while_only_the_language_model_changed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))
    results = {}
    for train in ("llm", "connector", "encoders"):
        recipe = recipe_of(checkpoint, tmp_path / train, train=(train,), lora_encoders=False)
        train_randomly(recipe)
        results[train] = recipe.output
    video = CASES / "cfr30.mp4"
    plain = engine.load(checkpoint, device="cpu", dtype="float32").watch(video)
    again = {
        name: engine.load(adapter=folder, device="cpu", dtype="float32").watch(video).remembered
        for name, folder in results.items()
    }
    assert plain.remembered is None
    assert again["llm"] is not None
    assert (again["connector"], again["encoders"]) == (None, None)


def test_training_knows_videos_by_the_same_fingerprint_as_asking(trained: Recipe, checkpoint: Path):
    base = load_base(replace(trained, adapters=(trained.output,)))
    apollo = engine.load(adapter=trained.output, device="cpu", dtype="float32")
    assert base.fingerprint == apollo.watcher.fingerprint
    assert base.fingerprint != fingerprint(read_checkpoint(checkpoint), "float32")


@pytest.mark.parametrize("quant", ["4bit", "8bit"])
def test_factors_stay_beside_layers_in_few_bits(quant: Any, tmp_path: Path):
    recipe = recipe_of(NANO, tmp_path / "out", train=("llm", "connector"))
    train_randomly(recipe)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    full = look(engine.load(adapter=recipe.output, **options).network)
    few = look(engine.load(adapter=recipe.output, quant=quant, **options).network)
    before = look(engine.load(NANO, **options).network)
    assert torch.allclose(full[0], few[0], atol=1e-4)
    off, moved = (full[1] - few[1]).norm(), (full[1] - before[1]).norm()
    assert off < 0.5 * moved


def test_a_copy_that_is_stored_in_few_bits_is_the_same_model(tmp_path: Path):
    recipe = recipe_of(NANO, tmp_path / "out")
    train_randomly(recipe)
    stored = save_quantized(NANO, tmp_path / "stored", "4bit").folder
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "adapter": recipe.output}
    one = look(engine.load(stored, **options).network)
    other = look(engine.load(NANO, quant="4bit", **options).network)
    assert torch.equal(one[1], other[1])


def test_weights_that_were_trained_whole_are_quantised_as_a_merged_model_is(
    checkpoint: Path, tmp_path: Path
):
    recipe = recipe_of(checkpoint, tmp_path / "out", method="full")
    train_randomly(recipe)
    merged = merge_result(recipe.output, tmp_path / "merged")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quant": "4bit"}
    one = look(engine.load(adapter=recipe.output, **options).network)
    other = look(engine.load(merged, **options).network)
    assert torch.equal(one[1], other[1])


@pytest.fixture
def chain(checkpoint: Path, tmp_path: Path) -> Path:
    one = recipe_of(checkpoint, tmp_path / "runs" / "one", train=("connector",))
    two = replace(one, output=tmp_path / "runs" / "two", train=("llm",), adapters=(one.output,))
    train_randomly(one, 1)
    train_randomly(two, 2)
    return two.output


def test_a_chain_moves_as_a_whole(chain: Path, tmp_path: Path):
    moved = (tmp_path / "runs").rename(tmp_path / "elsewhere")
    adapters = resolve_chain([moved / "two"])
    assert [adapter.folder for adapter in adapters] == [moved / "one", moved / "two"]


def test_the_lower_result_stays_where_it_was_when_the_upper_one_moves(chain: Path, tmp_path: Path):
    moved = chain.rename(tmp_path / "two")
    assert [adapter.name for adapter in resolve_chain([moved])] == ["one", "two"]


def test_naming_the_whole_chain_is_the_same_and_a_wrong_one_is_refused(chain: Path, copy: Path):
    one = chain.parent / "one"
    assert resolve_chain([one, chain]) == resolve_chain([chain])
    with pytest.raises(WeightsError, match="was not trained on top of"):
        resolve_chain([chain, one])
    with pytest.raises(WeightsError, match="was not trained on top of"):
        resolve_chain([copy, chain])


def test_a_link_that_is_gone_or_trained_anew_is_named(chain: Path, checkpoint: Path):
    one = chain.parent / "one"
    train_randomly(recipe_of(checkpoint, one, train=("connector",)), seed=9)
    refused(chain, checkpoint, f"stands on {one}, which is missing or has changed")
    rmtree(one)
    refused(chain, checkpoint, f"stands on {one}, which is missing or has changed")


def test_the_command_asks_with_a_result(trained: Recipe):
    command = ("ask", "-q", "one?", "--json", "--adapter", trained.output, "--device", "cpu")
    done = apollo(*command, "--max-new-tokens", "4", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["adapter"]["name"] == "out"
