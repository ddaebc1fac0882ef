"""Results of training without the training: a model whose opened parts were moved at random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from apollo_cli.finetune.adapters import load_base, prepare_network, save_result
from apollo_cli.finetune.recipe import DataSource, Recipe
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.prompt import VISUAL_ID


def recipe_of(model: Path, output: Path, **changes: Any) -> Recipe:
    """A recipe that trains the language model through LoRA, or what else is asked for."""
    plain = Recipe(
        path=output.parent / "recipe.toml",
        model=str(model),
        stage="custom",
        method="lora",
        train=("llm",),
        output=output,
        data=(DataSource(output.parent / "data.jsonl"),),
        device="cpu",
        dtype="float32",
        lora_rank=4,
        lora_alpha=12.0,
    )
    return replace(plain, **changes)


def train_randomly(recipe: Recipe, seed: int = 0) -> ApolloModel:
    """Move everything that the recipe opens, save the result, and return the network."""
    base = load_base(recipe)
    trained = prepare_network(base.network, recipe)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    save_result(base, trained, recipe, recipe.output, {"seed": seed})
    return base.network.eval()


@torch.no_grad()
def look(network: ApolloModel) -> tuple[torch.Tensor, torch.Tensor]:
    """What a network makes of fixed clips and a fixed prompt: visual tokens, and logits."""
    generator, config = torch.Generator().manual_seed(1), network.config
    pixels = {
        encoder.name: torch.randint(
            256,
            (2, config.frames_per_clip, 3, encoder.pixels.size, encoder.pixels.size),
            dtype=torch.uint8,
            generator=generator,
        )
        for encoder in config.encoders
    }
    visual = network.encode_clips(pixels)
    tokens = visual.flatten(0, 1)
    embedded = network.embed([7, *[VISUAL_ID] * len(tokens), 8, 9], tokens)
    return visual, network.llm(inputs_embeds=embedded).logits
