"""What is opened for training, how it is grouped, and results that are the trained network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from apollo_cli.errors import DataError
from apollo_cli.finetune.adapters import load_base, prepare_network, save_result
from apollo_cli.finetune.recipe import load_recipe
from apollo_cli.finetune.stages import METHODS, Method, Part
from apollo_cli.weights.adapter import MANIFEST
from apollo_cli.weights.quantize import report_of
from apollo_cli.weights.repack import save_quantized
from tests import tiny
from tests.finetune.results import look, recipe_of, train_randomly
from tests.tiny import Tiny

NANO = Path(__file__).parents[2] / "weights" / "nano"
Seen = tuple[torch.Tensor, torch.Tensor]
ALL: tuple[Part, ...] = ("llm", "connector", "encoders")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("adapters") / "tiny", Tiny(tied=True))


def close(one: Seen, other: Seen, tolerance: float = 1e-4) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, atol=tolerance, rtol=1e-4) for a, b in pairs)


@pytest.mark.parametrize("lora_encoders", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_result_put_on_its_model_is_the_trained_network(
    method: Method, lora_encoders: bool, checkpoint: Path, tmp_path: Path
):
    recipe = recipe_of(
        checkpoint, tmp_path / "out", method=method, train=ALL, lora_encoders=lora_encoders
    )
    trained = train_randomly(recipe)
    again = load_base(replace(recipe, adapters=(recipe.output,))).network
    assert close(look(trained), look(again))
    assert not close(look(load_base(recipe).network), look(again))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_trained_is_float32_and_nothing_else_is_opened(
    dtype: str, checkpoint: Path, tmp_path: Path
):
    recipe = recipe_of(checkpoint, tmp_path / "out", train=("llm", "connector"), dtype=dtype)
    base = load_base(recipe)
    trained = prepare_network(base.network, recipe)
    for name, parameter in base.network.named_parameters():
        opened = name.startswith("connector.") or ".lora_" in name
        assert parameter.requires_grad == opened
        assert (name in trained.parameters) == opened
        assert parameter.dtype == (torch.float32 if opened else getattr(torch, dtype))


def test_frozen_parts_are_in_evaluation_mode_whatever_happened_before(
    checkpoint: Path, tmp_path: Path
):
    recipe = recipe_of(checkpoint, tmp_path / "out", train=("connector",))
    network = load_base(recipe).network.train()
    prepare_network(network, recipe)
    assert network.connector.training
    assert not any(module.training for module in network.llm.modules())
    assert not any(module.training for module in network.encoders.modules())


def test_vectors_do_not_decay_and_each_part_has_its_rate(checkpoint: Path, tmp_path: Path):
    recipe = recipe_of(
        checkpoint,
        tmp_path / "out",
        method="full",
        train=("llm", "connector"),
        learning_rate=1e-4,
        connector_learning_rate=2e-4,
        weight_decay=0.1,
    )
    groups = prepare_network(load_base(recipe).network, recipe).groups()
    facts = {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}
    assert facts == {
        "llm": (1e-4, 0.1),
        "llm, vectors": (1e-4, 0.0),
        "connector": (2e-4, 0.1),
        "connector, vectors": (2e-4, 0.0),
    }


def test_the_same_seed_starts_from_the_same_factors_and_leaves_other_randomness_alone(
    checkpoint: Path, tmp_path: Path
):
    recipe = recipe_of(checkpoint, tmp_path / "out")
    starts = []
    for seed in (0, 0, 1):
        network = load_base(recipe).network
        before = torch.random.get_rng_state()
        starts.append(prepare_network(network, replace(recipe, seed=seed)).parameters)
        assert torch.equal(torch.random.get_rng_state(), before)
    same, other = ([torch.equal(starts[0][n], start[n]) for n in start] for start in starts[1:])
    assert all(same)
    assert not all(other)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_every_trained_tensor_gets_a_gradient_and_the_base_stays(method: Method, tmp_path: Path):
    recipe = recipe_of(NANO, tmp_path / "out", method=method)
    network = load_base(recipe).network
    before = look(network)
    trained = prepare_network(network, recipe)
    assert close(before, look(network))
    assert (report_of(network.llm) is not None) == (method == "qlora")
    ids = torch.arange(20)[None]
    for parameter in trained.parameters.values():
        # The second factors start at zero, behind which nothing gets a gradient.
        parameter.data += 0.01
    logits = network.llm(input_ids=ids).logits[0]
    functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    assert all(p.grad is not None and p.grad.any() for p in trained.parameters.values())


def test_training_goes_on_after_an_answer_on_a_quantised_model(tmp_path: Path):
    recipe = recipe_of(NANO, tmp_path / "out", method="qlora")
    network = load_base(recipe).network
    trained = prepare_network(network, recipe)
    first = look(network.eval())
    trained.train_mode()
    network.llm(input_ids=torch.arange(9)[None]).logits.sum().backward()
    assert close(first, look(network.eval()), 1e-6)


def test_the_adapter_is_one_that_peft_loads_by_itself(checkpoint: Path, tmp_path: Path):
    recipe = recipe_of(checkpoint, tmp_path / "out")
    ours = train_randomly(recipe).llm
    plain = AutoModelForCausalLM.from_pretrained(checkpoint / "llm", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, str(recipe.output)).eval()
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)


def test_a_chain_of_stages_is_applied_in_its_order(checkpoint: Path, tmp_path: Path):
    one = recipe_of(checkpoint, tmp_path / "one", train=("connector",))
    two = replace(one, output=tmp_path / "two", train=("llm", "connector"), adapters=(one.output,))
    three = recipe_of(checkpoint, tmp_path / "three", method="full", adapters=(two.output,))
    train_randomly(one, 1)
    train_randomly(two, 2)
    trained = train_randomly(three, 3)
    base = load_base(replace(three, adapters=(three.output,)))
    assert [adapter.name for adapter in base.located.chain] == ["one", "two", "three"]
    assert close(look(trained), look(base.network))


def test_factors_stay_beside_quantised_layers_when_the_next_stage_begins(tmp_path: Path):
    one = recipe_of(NANO, tmp_path / "one", method="qlora")
    two = replace(one, output=tmp_path / "two", adapters=(one.output,))
    train_randomly(one, 1)
    trained = train_randomly(two, 2)
    again = load_base(replace(two, adapters=(two.output,))).network
    assert close(look(trained), look(again), 1e-3)


def test_a_second_result_in_the_same_folder_leaves_nothing_of_the_first(
    checkpoint: Path, tmp_path: Path
):
    recipe = recipe_of(checkpoint, tmp_path / "out", train=ALL, lora_encoders=True)
    train_randomly(recipe)
    (recipe.output / "log.jsonl").write_text("kept")
    train_randomly(replace(recipe, method="full", train=("llm",), lora_encoders=False))
    files = {p.relative_to(recipe.output).as_posix() for p in recipe.output.rglob("*.*")}
    assert files == {MANIFEST, "llm.safetensors", "recipe.toml", "log.jsonl"}


def test_the_result_tells_its_recipe_and_what_the_run_adds(checkpoint: Path, tmp_path: Path):
    (tmp_path / "data.jsonl").touch()
    recipe = recipe_of(checkpoint, tmp_path / "out", lora_dropout=0.1)
    train_randomly(recipe, seed=4)
    assert load_recipe(recipe.output / "recipe.toml") == recipe
    manifest = json.loads((recipe.output / MANIFEST).read_text())
    assert manifest["facts"] == {"seed": 4}
    assert manifest["base"]["name"] == str(checkpoint)
    tensors = load_file(recipe.output / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert len(tensors) == 2 * 7 * 2
    # What the run wrote down is its own to write over; what the user made of it is not.
    with (recipe.output / "recipe.toml").open("a") as file:
        file.write("# mine\n")
    with pytest.raises(DataError, match="is the folder of this recipe"):
        load_recipe(recipe.output / "recipe.toml")


def test_a_disk_that_takes_no_more_leaves_no_result(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = recipe_of(checkpoint, tmp_path / "out")
    base = load_base(recipe)
    trained = prepare_network(base.network, recipe)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("apollo_cli.finetune.adapters.save_file", full)
    with pytest.raises(DataError, match="No space left"):
        save_result(base, trained, recipe, recipe.output)
    assert list(recipe.output.iterdir()) == []


def test_weights_in_few_bits_are_not_trained_whole(checkpoint: Path, tmp_path: Path):
    stored = save_quantized(checkpoint, tmp_path / "stored", "4bit").folder
    with pytest.raises(DataError, match='allowed is "qlora"'):
        load_base(recipe_of(stored, tmp_path / "out", method="full"))
