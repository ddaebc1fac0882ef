"""Writes the tables of docs/finetuning.md: ``python -m tests.finetune.cards``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from apollo_cli.finetune.data.samples import FAULT_KINDS
from apollo_cli.finetune.estimate import SampleSize, Training, estimate_training
from apollo_cli.finetune.places import spell
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.stages import METHODS, Method, Part, StageName
from apollo_cli.memory_plan import Run
from apollo_cli.weights.network import released_network
from apollo_cli.weights.registry import known_models

PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"
CARDS_GB = (8, 12, 16, 24, 48, 80)
# Cards are sold in GiB, and a driver and a desktop keep a part.
SHARE = 0.95
MODELS = ("apollo-1.5b", "apollo-3b", "apollo-7b")
# The longest sample of a recipe that `finetune new` writes: three minutes, and a long answer.
SAMPLE = SampleSize(tokens=4096, trained=256, clips=90)
TRAINS: tuple[tuple[Part, ...], ...] = (("llm",), ("llm", "connector"))


def page_with_tables(text: str) -> str:
    """The page with the tables of now."""
    tables = {"cards": _cards(), "stages": _stages(), "keys": _keys(), "faults": _faults()}
    for name, rows in tables.items():
        start = f"<!-- {name}: written by python -m tests.finetune.cards -->"
        end = f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = "\n".join([before + start, *map(_row, rows), end + after])
    return text


def _row(cells: list[str]) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


def _cards() -> Iterator[list[str]]:
    yield ["model", "method", "train", "peak", *(f"{size} GB" for size in CARDS_GB)]
    yield ["---"] * (4 + len(CARDS_GB))
    for model in MODELS:
        for method in METHODS:
            for train in TRAINS:
                yield [model, method, ", ".join(train), *_fits(model, method, 3, train)]


def _stages() -> Iterator[list[str]]:
    yield ["stage", "train", "peak", *(f"{size} GB" for size in CARDS_GB)]
    yield ["---"] * (3 + len(CARDS_GB))
    rows: tuple[tuple[StageName, Part, str, bool], ...] = (
        (1, "connector", "connector", False),
        (2, "encoders", "encoders, whole", False),
        (2, "encoders", "encoders, `lora_encoders`", True),
    )
    for stage, part, words, low_rank in rows:
        fits = _fits("apollo-3b", "qlora", stage, (part,), lora_encoders=low_rank)
        yield [str(stage), words, *fits]


def _fits(
    model: str, method: Method, stage: StageName, train: tuple[Part, ...], **changes: Any
) -> list[str]:
    """The peak, and whether each card holds it."""
    config = released_network(known_models()[model]).config
    recipe = Recipe(
        path=Path(),
        model=model,
        stage=stage,
        method=method,
        train=train,
        output=Path(),
        data=(),
        **changes,
    )
    if method == "full":
        recipe = replace(recipe, optimizer="adamw8bit")
    peak = estimate_training(Training(recipe, Run(config, "cuda", "bfloat16")), SAMPLE).peak
    fits = ["yes" if peak <= SHARE * size * 2**30 else "" for size in CARDS_GB]
    return [f"{peak / 1e9:.1f} GB", *fits]


def _keys() -> Iterator[list[str]]:
    yield ["key", "default", "what it is"]
    yield ["---"] * 3
    needed = {"train": "the stage's"}
    for key in (key for key in fields(Recipe) if key.metadata):
        shown = "" if key.default is None else f"`{spell(key.default)}`"
        needs = needed.get(key.name, "needed")
        yield [f"`{key.name}`", needs if key.default is MISSING else shown, key.metadata["comment"]]


def _faults() -> Iterator[list[str]]:
    yield ["name", "it costs", "what is allowed, or what becomes of it; what to do"]
    yield ["---"] * 3
    costs = {"run": "the run", "sample": "its sample", "note": ""}
    for name, kind in FAULT_KINDS.items():
        words = "; ".join(filter(None, (kind.allowed, kind.next_step)))
        yield [f"`{name}`", costs[kind.cost], words]


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text("utf-8")), "utf-8")
