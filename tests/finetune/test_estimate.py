"""The arithmetic of training against networks that are built, and against what autograd keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apollo_cli.finetune.adapters import load_base, prepare_network
from apollo_cli.finetune.estimate import (
    SampleSize,
    Training,
    estimate_training,
)
from apollo_cli.finetune.needs import lowered
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.stages import METHODS, Method, Part
from apollo_cli.finetune.training.examples import IGNORED, Example
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.memory_plan import Run
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.prompt import VISUAL_ID
from apollo_cli.weights.network import released_network
from apollo_cli.weights.registry import known_models
from tests.finetune.results import recipe_of

NANO = Path(__file__).parents[2] / "weights" / "nano"
OUT = Path("out").absolute()
TRAINS: tuple[tuple[Part, ...], ...] = (
    ("llm",),
    ("llm", "connector"),
    ("encoders",),
    ("connector",),
)
LONG = SampleSize(tokens=4096, trained=256, clips=90)


def training_of(recipe: Recipe, config: Any, device: str = "cpu") -> Training:
    return Training(recipe, Run(config, device, recipe.dtype or "bfloat16"))


def released(model: str, method: Method, **changes: Any) -> Training:
    recipe = recipe_of(Path(model), OUT, method=method, dtype="bfloat16", **changes)
    return training_of(recipe, released_network(known_models()[model]).config, "cuda")


@pytest.mark.parametrize("lora_encoders", [False, True])
@pytest.mark.parametrize("train", [("llm",), ("llm", "connector", "encoders")])
@pytest.mark.parametrize("method", METHODS)
def test_weights_gradients_and_states_are_those_of_a_real_network(
    method: Method, train: tuple[Part, ...], lora_encoders: bool
):
    recipe = recipe_of(NANO, OUT, method=method, train=train, lora_encoders=lora_encoders)
    network = load_base(recipe).network
    trained = prepare_network(network, recipe)
    estimate = estimate_training(training_of(recipe, network.config), LONG)
    weights = sum(parameter.nbytes for parameter in network.parameters())
    # Scales of 4-bit weights are no parameters.
    assert weights <= estimate.weights <= 1.03 * weights
    optimiser = torch.optim.AdamW(trained.groups())
    for parameter in trained.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    states = [value for state in optimiser.state.values() for value in state.values()]
    assert estimate.gradients == sum(p.nbytes for p in trained.parameters.values())
    assert estimate.optimiser == sum(value.nbytes for value in states if value.ndim)


def kept_bytes(network: ApolloModel, recipe: Recipe, size: SampleSize) -> int:
    """Bytes that autograd keeps of a sample until its backward pass, weights left out."""
    visual = size.clips * network.config.visual_tokens_per_clip
    pixels = {
        e.name: torch.zeros(
            size.clips,
            network.config.frames_per_clip,
            3,
            e.pixels.size,
            e.pixels.size,
            dtype=torch.uint8,
        )
        for e in network.config.encoders
    }
    example = Example(
        "long",
        [VISUAL_ID] * visual + [5] * (size.tokens - visual),
        [IGNORED] * (size.tokens - size.trained) + [5] * size.trained,
        pixels,
        None,
        (),
    )
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    # The tensors are held too, so that no address is used twice.
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    trainee = Trainee(network, recipe.gradient_checkpointing)
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=recipe.dtype == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed:
        trainee([example])
    return sum(count for count, _ in kept.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", TRAINS)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_activations_are_about_what_autograd_keeps(
    method: Method, train: tuple[Part, ...], dtype: str, checkpointing: bool
):
    recipe = recipe_of(
        NANO,
        OUT,
        method=method,
        train=train,
        dtype=dtype,
        gradient_checkpointing=checkpointing,
        cache_features=False,
    )
    network = load_base(recipe).network
    prepare_network(network, recipe)
    size = SampleSize(tokens=400, trained=100, clips=8)
    estimate = estimate_training(training_of(recipe, network.config), size)
    measured = kept_bytes(network, recipe, size)
    computed = estimate.activations + estimate.logits
    if checkpointing:
        # What one layer needs while it is computed again comes on top of what is kept.
        assert computed > measured
    else:
        assert 0.9 < computed / measured < 1.4


def test_checkpointing_small_batches_and_few_bits_lower_the_peak():
    usual = released("apollo-3b", "lora", micro_batch_size=4)
    peak = estimate_training(usual, LONG).peak
    for change in (
        {"gradient_checkpointing": False},
        {"micro_batch_size": 8},
        {"method": "full"},
        {"lora_rank": 64},
        {"train": ("llm", "connector")},
        {"train": ("llm", "encoders")},
    ):
        more = replace(usual, recipe=replace(usual.recipe, **change))
        assert estimate_training(more, LONG).peak > peak
    less = replace(usual, recipe=replace(usual.recipe, method="qlora"))
    assert estimate_training(less, LONG).peak < peak


def test_what_is_watched_ahead_leaves_room_for_training():
    ahead = released("apollo-3b", "qlora")
    each_time = replace(ahead, recipe=replace(ahead.recipe, cache_features=False))
    here = replace(ahead, run=replace(ahead.run, device="cpu"))
    first, second, third = (estimate_training(t, LONG) for t in (ahead, each_time, here))
    parts = ahead.part_values("encoders") + ahead.part_values("connector")
    assert second.weights - first.weights == parts * ahead.run.value_bytes
    assert third.weights == second.weights
    assert first.watching > first.weights
    assert second.watching == 0
    short = estimate_training(ahead, SampleSize(tokens=64, trained=8, clips=2))
    assert short.peak == short.watching
    assert "watched ahead" in short.describe()


def test_eight_bit_states_are_a_quarter():
    full = released("apollo-1.5b", "full")
    small = replace(full, recipe=replace(full.recipe, optimizer="adamw8bit"))
    whole, quarter = (estimate_training(t, LONG).optimiser for t in (full, small))
    assert whole == 4 * quarter


def test_what_to_lower_is_named_cheapest_first_and_fits():
    full = released("apollo-3b", "full", gradient_checkpointing=False, micro_batch_size=4)
    words, fits = lowered(full, LONG, 50_000_000_000)
    assert fits
    assert words.startswith("gradient_checkpointing = true, micro_batch_size = 1")
    words, fits = lowered(full, LONG, 10_000_000_000)
    assert fits
    assert 'method = "qlora"' in words
    words, fits = lowered(full, LONG, 1_000_000_000)
    assert not fits
    assert words.endswith("max_tokens = 512")


def test_a_small_peak_of_a_longer_sample_comes_from_fewer_tokens():
    training = released("apollo-3b", "qlora")
    words, fits = lowered(training, replace(LONG, tokens=30_000, clips=800), 9_500_000_000)
    assert fits
    assert words == "max_tokens = 8192"
