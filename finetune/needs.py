"""What a run needs on this machine, in words: its memory, what to lower."""

from __future__ import annotations

import importlib.util
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from apollo_cli.errors import DataError, DeviceError
from apollo_cli.finetune.data.survey import Length
from apollo_cli.finetune.estimate import (
    FLOAT32,
    STATE_BYTES,
    SampleSize,
    Training,
    estimate_training,
)
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.hardware import FLASH, HardwareChoice, choose_device, free_bytes
from apollo_cli.memory_plan import Run
from apollo_cli.model.config import NetworkConfig
from apollo_cli.text import apart, count
from apollo_cli.video.container import shown
from apollo_cli.weights.checkpoint import Checkpoint, stored_kind


def choose_hardware(recipe: Recipe) -> HardwareChoice:
    """Device and dtype of a recipe.

    Raises:
        DeviceError: the device is not there, or has no such dtype; the remedy is one of a recipe.
    """
    try:
        return choose_device(recipe.device, recipe.dtype)
    except DeviceError as error:
        key = "dtype" if error.received.startswith("dtype") else "device"
        value = "float32" if key == "dtype" else "cpu"
        remedy = f'set {key} = "{value}" in the recipe, or leave {key} out'
        raise DeviceError(error.received, error.allowed, remedy) from None


def check_method(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Refuse to train weights whole that are stored in few bits.

    Raises:
        DataError: the method cannot train this checkpoint.
    """
    stored = stored_kind(checkpoint)
    if stored is not None and recipe.method == "full" and "llm" in recipe.train:
        raise DataError(
            f'method = "full": {recipe.model} stores its language model in {stored}',
            'such weights are frozen; allowed is "qlora"',
            "or take the model that it was made from",
        )


def describe_needs(
    recipe: Recipe,
    config: NetworkConfig,
    lengths: Sequence[Length],
    hardware: HardwareChoice,
) -> Iterator[tuple[str, str]]:
    """Names and words for a report.

    Args:
        recipe: of the run. config: of its model.
        lengths: of its samples, of which there is at least one.
        hardware: that it runs on.
    """
    sizes = np.array([(each.tokens, each.trained, each.clips) for each in lengths])
    longest = SampleSize(*map(int, sizes.max(0)))
    kind = hardware.device.partition(":")[0]
    dtype = "float32" if hardware.dtype == "float16" else hardware.dtype
    run = Run(config, kind, dtype, fused=hardware.attention == FLASH)
    training = Training(recipe, run)
    estimate = estimate_training(training, longest)
    free = free_bytes(hardware.device)
    peak, left = apart(estimate.peak / 1e9, (estimate.peak if free is None else free) / 1e9)
    known = "" if free is None else f"; free on {hardware.device} are {left} GB"
    yield "memory", f"{peak} GB, computed ({estimate.describe()}){known}"
    if free is not None and estimate.peak > free:
        words, fits = lowered(training, longest, free)
        enough = "it fits with" if fits else "a smaller model is needed; not enough is"
        yield "too much", f"{enough} {words}" if words else "a smaller model is needed"


def list_lacking(recipe: Recipe, config: NetworkConfig, steps: int, is_here: bool) -> Iterator[str]:
    """What is to be done on this machine before a run can begin, in words.

    Args:
        recipe: of the run. config: of its model. steps: of the whole run.
        is_here: whether the model is on this machine.
    """
    if not is_here:
        yield f"apollo models pull {shlex.quote(recipe.model)}"
    wanted = {"finetune": ["accelerate", "matplotlib", "peft"], "quant": []}
    if recipe.method == "qlora" or recipe.optimizer == "adamw8bit":
        wanted["quant"].append("bitsandbytes")
    for extra, packages in wanted.items():
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            yield f'pip install "apollo-video-cli[{extra}]", for {" and ".join(missing)}'
    if recipe.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield "pip install tensorboard, or tensorboard = false"
    values = sum(Training(recipe, Run(config, "cpu", "float32")).trained_values().values())
    # One more is written before the oldest goes.
    kept = min(recipe.keep_checkpoints, -(-steps // recipe.save_every)) + 1
    needed = values * (kept * (FLOAT32 + STATE_BYTES[recipe.optimizer]) + FLOAT32)
    free = _free_disk(recipe.output)
    if free is not None and free < needed:
        taken, left = apart(needed / 1e9, free / 1e9)
        yield (
            f"room on the disk of {shown(recipe.output)}: {count(kept, 'checkpoint')} and the "
            f"result take {taken} GB, free are {left}"
        )


def _free_disk(output: Path) -> int | None:
    """Bytes that a run may write there, over what its earlier checkpoints hold; None if unknown."""
    place = output
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        own = sum(path.stat().st_size for path in output.glob("checkpoints/*/*"))
        return shutil.disk_usage(place).free + own
    except OSError:
        return None


def lowered(training: Training, sample: SampleSize, free_bytes: int) -> tuple[str, bool]:
    """What to lower so that training fits, in words, and whether it fits then.

    Cheaper things come first; what is named is to be changed together.
    """
    changes: dict[str, str] = {}
    for words, change in _rungs(training.recipe, sample):
        training = replace(training, recipe=change(training.recipe))
        changes[words.partition(" = ")[0]] = words
        tokens = min(sample.tokens, training.recipe.max_tokens or sample.tokens)
        clips = math.ceil(sample.clips * tokens / sample.tokens)
        sample = SampleSize(tokens, min(sample.trained, tokens), clips)
        if estimate_training(training, sample).peak <= free_bytes:
            return ", ".join(changes.values()), True
    return ", ".join(changes.values()), False


def _rungs(recipe: Recipe, sample: SampleSize) -> Iterator[tuple[str, Callable[[Recipe], Recipe]]]:
    if not recipe.gradient_checkpointing:
        yield "gradient_checkpointing = true", lambda r: replace(r, gradient_checkpointing=True)
    if recipe.micro_batch_size > 1:
        yield "micro_batch_size = 1", lambda r: replace(r, micro_batch_size=1)
    if recipe.optimizer == "adamw" and recipe.method == "full":
        yield 'optimizer = "adamw8bit"', lambda r: replace(r, optimizer="adamw8bit")
    if "llm" in recipe.train and recipe.method == "full":
        yield 'method = "lora"', lambda r: replace(r, method="lora")
    if recipe.method != "qlora":
        yield 'method = "qlora"', lambda r: replace(r, method="qlora")
    if "encoders" in recipe.train and not recipe.lora_encoders:
        yield "lora_encoders = true", lambda r: replace(r, lora_encoders=True)
    for tokens in (16_384, 8192, 4096, 2048, 1024, 512):
        if tokens < sample.tokens:
            yield f"max_tokens = {tokens}", lambda r, most=tokens: replace(r, max_tokens=most)
