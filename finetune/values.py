"""What each key of a recipe may hold, and how values are written as TOML."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apollo_cli.finetune.stages import METHODS, PARTS, STAGES

# Turns a value of the file into one of the recipe, or raises ValueError with what is allowed.
Check = Callable[[Any], Any]

# A run of a step a millisecond would take twelve days.
MOST_STEPS = 1_000_000_000


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError("allowed is a text that is not empty")
    return value.strip()


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("allowed are true and false")
    return value


def _one_of(*allowed: Any) -> Check:
    def check(value: Any) -> Any:
        # True equals 1 and 1.0 equals 1 in Python.
        if not any(value == item and type(value) is type(item) for item in allowed):
            raise ValueError(f"allowed are {', '.join(spell(item) for item in allowed)}")
        return value

    return check


def _whole(low: int, high: int = 2**63 - 1) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            # The largest number that fits is told only to who is beyond it.
            is_beyond = isinstance(value, int) and value > high
            upper = f" to {high:,}" if is_beyond or high < 2**63 - 1 else ""
            raise ValueError(f"allowed is a whole number from {low}{upper}")
        return value

    return check


def _number(low: float, high: float, *, above: bool = False) -> Check:
    def check(value: Any) -> float:
        fits = not isinstance(value, bool) and isinstance(value, int | float)
        if not fits or not low <= value <= high or (above and value == low):
            edge = f"above {low:g}, up to" if above else f"{low:g} to"
            raise ValueError(f"allowed is a number {edge} {high:g}")
        return float(value)

    return check


def _list_of(check: Check) -> Check:
    def check_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError('allowed is a list, such as ["a", "b"]')
        checked = tuple(check(item) for item in value)
        if len(set(checked)) < len(checked):
            raise ValueError("each may be named once")
        return checked

    return check_all


_RATE = _number(0, 1, above=True)
CHECKS: dict[str, Check] = {
    "model": _text,
    "stage": _one_of(*STAGES),
    "method": _one_of(*METHODS),
    "train": _list_of(_one_of(*PARTS)),
    "output": _text,
    "adapters": _list_of(_text),
    "validation_share": _number(0, 0.5),
    "device": _text,
    "dtype": _one_of("bfloat16", "float32"),
    "template": _one_of("qwen_2", "qwen_1_5"),
    "learning_rate": _RATE,
    "connector_learning_rate": _RATE,
    "encoder_learning_rate": _RATE,
    "lora_rank": _whole(1, 1024),
    "lora_alpha": _number(0, 4096, above=True),
    "lora_dropout": _number(0, 0.9),
    "lora_encoders": _flag,
    "optimizer": _one_of("adamw", "adamw8bit"),
    "weight_decay": _number(0, 1),
    "clip_norm": _number(0, 1e6, above=True),
    "warmup_share": _number(0, 0.9),
    "epochs": _number(0, 10_000, above=True),
    "steps": _whole(1, MOST_STEPS),
    "batch_size": _whole(1, 65_536),
    "micro_batch_size": _whole(1, 65_536),
    "gradient_checkpointing": _flag,
    "length_grouped": _flag,
    "seed": _whole(0),
    "fps": _number(0, 1000, above=True),
    "max_clips": _whole(1),
    "max_tokens": _whole(32),
    "save_every": _whole(1),
    "keep_checkpoints": _whole(1, 10_000),
    "validate_every": _whole(1),
    "readers": _whole(1, 256),
    "read_seconds": _number(0, 86_400, above=True),
    "images_in_stage_2": _flag,
    "cache_features": _flag,
    "tensorboard": _flag,
}
SOURCE_CHECKS: dict[str, Check] = {
    "path": _text,
    "share": _number(0, 1, above=True),
    "format": _one_of("auto", "jsonl", "llava", "messages", "csv"),
    "media": _text,
}


def spell(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(spell(item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's as well, but for this character.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)
