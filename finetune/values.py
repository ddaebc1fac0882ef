"""What each key of a recipe may hold, and how values are written as TOML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from apollo_cli.finetune.stages import METHODS, PARTS, STAGES
from apollo_cli.values import Check, flag, list_of, number, one_of, text, whole

# A run of a step a millisecond would take twelve days.
MOST_STEPS = 1_000_000_000


_RATE = number(0, 1, above=True)
CHECKS: dict[str, Check] = {
    "model": text,
    "stage": one_of(*STAGES),
    "method": one_of(*METHODS),
    "train": list_of(one_of(*PARTS), once=True),
    "output": text,
    "adapters": list_of(text, once=True),
    "validation_share": number(0, 0.5),
    "device": text,
    "dtype": one_of("bfloat16", "float32"),
    "template": one_of("qwen_2", "qwen_1_5"),
    "learning_rate": _RATE,
    "connector_learning_rate": _RATE,
    "encoder_learning_rate": _RATE,
    "lora_rank": whole(1, 1024),
    "lora_alpha": number(0, 4096, above=True),
    "lora_dropout": number(0, 0.9),
    "lora_encoders": flag,
    "optimizer": one_of("adamw", "adamw8bit"),
    "weight_decay": number(0, 1),
    "clip_norm": number(0, 1e6, above=True),
    "warmup_share": number(0, 0.9),
    "epochs": number(0, 10_000, above=True),
    "steps": whole(1, MOST_STEPS),
    "batch_size": whole(1, 65_536),
    "micro_batch_size": whole(1, 65_536),
    "gradient_checkpointing": flag,
    "length_grouped": flag,
    "seed": whole(0),
    "fps": number(0, 1000, above=True),
    "max_clips": whole(1),
    "max_tokens": whole(32),
    "save_every": whole(1),
    "keep_checkpoints": whole(1, 10_000),
    "validate_every": whole(1),
    "readers": whole(1, 256),
    "read_seconds": number(0, 86_400, above=True),
    "images_in_stage_2": flag,
    "cache_features": flag,
    "tensorboard": flag,
}
SOURCE_CHECKS: dict[str, Check] = {
    "path": text,
    "share": number(0, 1, above=True),
    "format": one_of("auto", "jsonl", "llava", "messages", "csv"),
    "media": text,
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
