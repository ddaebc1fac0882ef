"""What a run needs on this machine, in words: its memory, what to lower, and roughly how long."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from apollo_cli.errors import DeviceError
from apollo_cli.finetune.data.survey import Length
from apollo_cli.finetune.estimate import (
    SampleSize,
    Training,
    estimate_seconds,
    estimate_training,
    lowered,
)
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.words import count
from apollo_cli.fit import Run
from apollo_cli.hardware import FLASH, HardwareChoice, choose_device, free_bytes
from apollo_cli.model.config import NetworkConfig

# Side of the matrices by which the speed of a device is felt out; and how often.
_SIDE = {"cpu": 512, "cuda": 4096, "mps": 2048}
_TRIES = 3


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


def describe_needs(
    recipe: Recipe,
    config: NetworkConfig,
    lengths: Sequence[Length],
    steps: int,
    hardware: HardwareChoice,
) -> Iterator[tuple[str, str]]:
    """Names and words for a report.

    Args:
        recipe: of the run. config: of its model.
        lengths: of its samples, of which there is at least one. steps: of the whole run.
        hardware: that it runs on.
    """
    sizes = np.array([(each.tokens, each.trained, each.clips) for each in lengths])
    longest, mean = (SampleSize(*map(int, row)) for row in (sizes.max(0), np.ceil(sizes.mean(0))))
    kind = hardware.device.partition(":")[0]
    dtype = "float32" if hardware.dtype == "float16" else hardware.dtype
    run = Run(config, kind, dtype, fused=hardware.attention == FLASH)
    training = Training(recipe, run)
    estimate = estimate_training(training, longest)
    free = free_bytes(hardware.device)
    known = "" if free is None else f"; free on {hardware.device} are {free / 1e9:.1f} GB"
    yield "memory", f"{estimate.peak / 1e9:.1f} GB, computed ({estimate.describe()}){known}"
    if free is not None and estimate.peak > free:
        words, fits = lowered(training, longest, free)
        enough = "it fits with" if fits else "a smaller model is needed; not enough is"
        yield "too much", f"{enough} {words}" if words else "a smaller model is needed"
    samples = steps * recipe.batch_size
    seconds = estimate_seconds(training, mean, samples, _speed(hardware, dtype))
    yield "time", f"about {_spell_time(seconds)} of computing, roughly, without reading videos"


def _speed(hardware: HardwareChoice, dtype: str) -> float:
    """Operations a second of a matrix multiplication, felt out in a moment."""
    import torch

    side = _SIDE[hardware.device.partition(":")[0]]
    matrix = torch.ones(side, side, device=hardware.device, dtype=getattr(torch, dtype))
    fastest = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * side**3 / fastest


def _spell_time(seconds: float) -> str:
    for size, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return count(max(1, round(seconds)), "second")
