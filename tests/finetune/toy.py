"""A small training project: clips of the drawn world, questions about them, and a recipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from lab.questions import ask
from lab.toybox import sample_world, write_video

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
    "readers": 1,
}


def write_toy(
    folder: Path,
    *,
    clips: int = 3,
    seconds: float = 4.0,
    questions: int = 2,
    texts: int = 2,
    **keys: object,
) -> Path:
    """Write videos, ``data.jsonl`` and ``recipe.toml``; the recipe.

    Args:
        clips, seconds: number and length of the videos. questions: about each of them.
        texts: samples without a video.
        keys: of the recipe, in place of the usual ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(clips):
        rng = np.random.default_rng(number)
        world = sample_world(number, seconds)
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


def copy_toy(recipe: Path, folder: Path) -> Path:
    """The same project elsewhere, without what was trained; the recipe.

    A video encoder may write the same pictures in other bytes, so that a copy is no second writing.
    """
    shutil.copytree(recipe.parent, folder, ignore=shutil.ignore_patterns("out"), dirs_exist_ok=True)
    return folder / recipe.name


def _row(question: str, answer: str, **files: str) -> dict[str, object]:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, **files}
