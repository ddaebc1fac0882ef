"""Clips of the drawn world as the model's own path would see them, with labels for every patch.

Letters: B clips, T frames, G patches along one side, P = G * G patches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

import numpy as np

from apollo_cli.video.transforms import PixelSpec, resize_square
from lab.toybox import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    SPEEDS,
    World,
    draw,
    draw_owners,
    sample_world,
)

GRID = 8
MOTIONS = ("nothing", "still", *(f"{d} {s}" for d in DIRECTIONS for s in SPEEDS))
# Classes of a patch: 0 is background, or a thing without that property.
CLASSES = {"shape": 1 + len(SHAPES), "colour": 1 + len(COLOURS), "digit": 11}
_DIGIT_OWNER = 255
_ENOUGH_PIXELS = 5
# Batches drawn ahead of the training.
_AHEAD = 4


@dataclass(frozen=True)
class ClipBatch:
    """Pixels and labels of B clips.

    Attributes:
        pixels: for each encoder, uint8 (B, T, 3, S, S).
        labels: ``shape``, ``colour`` and ``digit`` (B, T, P), ``motion`` (B, P), all uint8.
    """

    pixels: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]


def render_clip(
    world: World, times: np.ndarray, specs: tuple[PixelSpec, ...]
) -> dict[str, np.ndarray]:
    """Draw the pictures at some times and bring them to each encoder's pixels (T, 3, S, S).

    A file shows the picture of its frame grid, so times are taken down to that grid.
    """
    shown = np.floor(times * world.fps + 1e-6) / world.fps
    pictures = [draw(world, float(t)) for t in shown]
    return {spec.name: np.stack([resize_square(p, spec) for p in pictures]) for spec in specs}


def label_patches(world: World, times: np.ndarray) -> dict[str, np.ndarray]:
    """Class of every patch of every frame, and the motion of every patch over the clip."""
    owners = np.stack([_patch_owners(draw_owners(world, float(t))) for t in times])
    things = world.things
    shape, colour, digit, motion = (np.zeros(256, np.uint8) for _ in range(4))
    for number, thing in enumerate(things, start=1):
        shape[number] = 1 + SHAPES.index(thing.shape)
        colour[number] = 1 + list(COLOURS).index(thing.colour)
        words = f"{thing.direction} {thing.speed}" if thing.direction else "still"
        motion[number] = MOTIONS.index(words)
    if world.digit is not None:
        digit[_DIGIT_OWNER] = 1 + world.digit.value
    counts = np.stack([(owners == n).sum(0) for n in range(1, len(things) + 1)])
    mover = np.where(counts.max(0) > 0, counts.argmax(0) + 1, 0)
    return {
        "shape": shape[owners],
        "colour": colour[owners],
        "digit": digit[owners],
        "motion": motion[mover],
    }


def _patch_owners(owners: np.ndarray) -> np.ndarray:
    """The owner of most pixels of each patch (P,), 0 where too little is covered."""
    height, width = owners.shape
    side = max(height, width)
    cells = GRID * 8
    square = np.zeros((side, side), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = owners
    picks = ((np.arange(cells) + 0.5) * side / cells).astype(int)
    patches = square[picks][:, picks].reshape(GRID, 8, GRID, 8).swapaxes(1, 2).reshape(-1, 64)
    ids = np.array([1, 2, 3, _DIGIT_OWNER], np.uint8)
    counts = (patches[:, :, None] == ids).sum(1)
    return np.where(counts.max(1) >= _ENOUGH_PIXELS, ids[counts.argmax(1)], 0)


def _render_batch(job: tuple[int, int, tuple[PixelSpec, ...]]) -> ClipBatch:
    seed, count, specs = job
    rng = np.random.default_rng(seed)
    pixels: dict[str, list[np.ndarray]] = {spec.name: [] for spec in specs}
    labels: dict[str, list[np.ndarray]] = {name: [] for name in (*CLASSES, "motion")}
    for _ in range(count):
        world = sample_world(int(rng.integers(1 << 31)), float(rng.choice([3, 4])), crowded=True)
        times = rng.uniform(0, world.duration_seconds - 2) + np.arange(4) / 2
        for name, value in render_clip(world, times, specs).items():
            pixels[name].append(value)
        for name, value in label_patches(world, times).items():
            labels[name].append(value)
    return ClipBatch(
        {name: np.stack(values) for name, values in pixels.items()},
        {name: np.stack(values) for name, values in labels.items()},
    )


def stream_clips(
    seed: int, batches: int, batch: int, specs: tuple[PixelSpec, ...]
) -> Iterator[ClipBatch]:
    """Yield batches of fresh clips, drawn in one child process while the model trains."""
    jobs = ((seed * 1_000_003 + i, batch, specs) for i in range(batches))
    with get_context("spawn").Pool(1) as pool:
        waiting = deque(pool.apply_async(_render_batch, (job,)) for job in islice(jobs, _AHEAD))
        while waiting:
            yield waiting.popleft().get()
            waiting.extend(pool.apply_async(_render_batch, (job,)) for job in islice(jobs, 1))
