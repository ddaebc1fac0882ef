"""A small training project: clips of the drawn world, questions about them, and a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from apollo_cli.finetune.nano.questions import ask
from apollo_cli.finetune.nano.toybox import sample_world, write_video

_KINDS = ("colour", "shape", "direction")
_KEYS = {
    "model": "apollo-nano",
    "stage": 3,
    "method": "lora",
    "output": "out",
    "device": "cpu",
    "steps": 4,
    "batch_size": 4,
    "learning_rate": 1e-3,
    "save_every": 2,
    "validation_share": 0.0,
    "gradient_checkpointing": False,
}


def write_toy(
    folder: Path, *, clips: int = 3, questions: int = 2, texts: int = 2, **keys: object
) -> Path:
    """Write videos, ``data.jsonl`` and ``recipe.toml``; the recipe.

    Args:
        keys: of the recipe, in place of the usual ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(clips):
        rng = np.random.default_rng(number)
        world = sample_world(number, 4.0)
        write_video(world, folder / f"{number}.mp4")
        for turn in range(questions):
            asked = ask(world, _KINDS[turn % len(_KINDS)], rng)
            assert asked is not None
            rows.append(_row(asked.text, asked.answer, video=f"{number}.mp4"))
    rows += [_row(f"What is {n} and {n}?", f"It is {2 * n}.") for n in range(texts)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {key: value for key, value in (_KEYS | keys).items() if value is not None}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join([*lines, "", "[[data]]", 'path = "data.jsonl"', ""]))
    return recipe


def _row(question: str, answer: str, **files: str) -> dict[str, object]:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, **files}
