"""Clips and videos of the drawn world as the model's own path sees them, with labels and questions.

Letters: B clips or videos of a batch, C clips of all videos, T frames, G patches along one side,
P = G * G patches, V encoder widths, L sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from apollo_cli.config import SamplingOptions
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.prompt import VISUAL_ID, PromptBuilder, VisualPart
from apollo_cli.video.sampler import FrameGrid, plan_clips
from apollo_cli.video.transforms import PixelSpec, resize_square
from lab.network import CLIP_SECONDS, FRAMES, PIXELS
from lab.questions import Question, ask
from lab.toybox import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    SPEEDS,
    Thing,
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
# What the throw-away readout is asked about each clip, in this order.
QUERIES = (*SHAPES, *COLOURS, "digit")
TARGETS = {
    "colour": 1 + len(COLOURS),
    "shape": 1 + len(SHAPES),
    "motion": len(MOTIONS),
    "digit": 11,
    "frames": 16,
}
# Rough sizes, for batches of about equal cost.
_LABEL_TOKENS, _ASK_TOKENS = 8, 16


@dataclass(frozen=True)
class ClipBatch:
    """Pixels and labels of B clips.

    Attributes:
        pixels: for each encoder, uint8 (B, T, 3, S, S).
        labels: ``shape``, ``colour`` and ``digit`` (B, T, P), ``motion`` (B, P), all uint8.
    """

    pixels: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]


def motion_class(thing: Thing) -> int:
    """The index of a thing's motion in ``MOTIONS``."""
    return MOTIONS.index(f"{thing.direction} {thing.speed}" if thing.direction else "still")


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
        motion[number] = motion_class(thing)
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


def draw_ahead(draw_one: Callable[[Any], Any], jobs: Iterable[Any], ahead: int) -> Iterator[Any]:
    """Yield what a child process draws, some of it ahead of the training."""
    feed = iter(jobs)
    with get_context("spawn").Pool(1) as pool:
        waiting = deque(pool.apply_async(draw_one, (job,)) for job in islice(feed, ahead))
        while waiting:
            yield waiting.popleft().get()
            waiting.extend(pool.apply_async(draw_one, (job,)) for job in islice(feed, 1))


def stream_clips(
    seed: int, batches: int, batch: int, specs: tuple[PixelSpec, ...]
) -> Iterator[ClipBatch]:
    """Yield batches of fresh clips."""
    jobs = ((seed * 1_000_003 + i, batch, specs) for i in range(batches))
    return draw_ahead(_render_batch, jobs, 4)


@dataclass(frozen=True)
class Videos:
    """Worlds with the features of their clips.

    Attributes:
        worlds: one for each video. times: for each video (clips, frames) in seconds.
        features: float16 (C, P, V). first: where each video's clips start, and C at the end.
        visual: (C, R, H) of a connector that is frozen, else None.
    """

    worlds: list[World]
    times: list[np.ndarray]
    features: torch.Tensor
    first: np.ndarray
    visual: torch.Tensor | None = None


def clip_times(world: World) -> np.ndarray:
    """Times of the pictures that the sampler of the real path takes from a file of this world."""
    grid = FrameGrid(np.arange(world.frame_count) / world.fps, float(world.fps), np.empty(0))
    plan = plan_clips(
        world.duration_seconds,
        clip_seconds=CLIP_SECONDS,
        frames_per_clip=FRAMES,
        limit=1000,
        options=SamplingOptions(),
        grid=grid,
    )
    return np.floor(plan.times * world.fps + 1e-6) / world.fps


def _draw_world(job: tuple[int, float | None]) -> tuple[World, np.ndarray, dict[str, np.ndarray]]:
    seed, seconds = job
    world = sample_world(seed, seconds)
    times = clip_times(world)
    clips = [render_clip(world, row, PIXELS) for row in times]
    return world, times, {s.name: np.stack([c[s.name] for c in clips]) for s in PIXELS}


def encode_worlds(model: ApolloModel, jobs: Sequence[tuple[int, float | None]]) -> Videos:
    """Draw worlds (seed and length, None for a drawn length) and keep their features."""
    worlds, all_times, features = [], [], []
    with torch.no_grad():
        for world, times, pixels in draw_ahead(_draw_world, jobs, 16):
            tensors = {name: torch.from_numpy(value) for name, value in pixels.items()}
            features.append(model.encode_features(tensors).half())
            worlds.append(world)
            all_times.append(times)
    first = np.cumsum([0, *(len(f) for f in features)])
    return Videos(worlds, all_times, torch.cat(features), first)


def clip_targets(world: World, times: np.ndarray) -> dict[str, np.ndarray]:
    """Right classes for every query about one clip; 0 is absent.

    Args:
        world: the facts.
        times: (frames,) of the clip.

    Returns:
        For each of ``TARGETS``, (queries,) int64.
    """
    targets = {name: np.zeros(len(QUERIES), np.int64) for name in TARGETS}
    for thing in world.things:
        seen = sum(1 << i for i, t in enumerate(times) if thing.is_there(float(t)))
        if not seen:
            continue
        for row in (QUERIES.index(thing.shape), QUERIES.index(thing.colour)):
            targets["colour"][row] = 1 + list(COLOURS).index(thing.colour)
            targets["shape"][row] = 1 + SHAPES.index(thing.shape)
            targets["motion"][row] = motion_class(thing)
            targets["frames"][row] = seen
    digit = world.digit
    if digit is not None:
        seen = sum(1 << i for i, t in enumerate(times) if digit.is_there(float(t)))
        targets["frames"][-1] = seen
        targets["digit"][-1] = 1 + digit.value if seen else 0
    return targets


def ask_many(
    world: World, weights: dict[str, float], count: int, rng: np.random.Generator
) -> list[Question]:
    """Draw questions about one world, kinds by weight."""
    kinds = rng.choice(list(weights), size=4 * count, p=np.array([*weights.values()]))
    made = (ask(world, str(kind), rng) for kind in kinds)
    return list(islice((question for question in made if question is not None), count))


@dataclass(frozen=True)
class QuestionBatch:
    """B videos, each with several questions behind one shared prefix.

    Attributes:
        ids: (B, L), ``VISUAL_ID`` at visual tokens. positions: (B, L); each question's start
            right behind the prefix.
        mask: bool (B, 1, L, L): a question sees the prefix and itself, never another question.
        targets: (B, L), the next token where it belongs to an answer, else -100.
        clips: indices of the clips, video by video.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor
    clips: torch.Tensor


def visual_part(videos: Videos, index: int) -> VisualPart:
    """A video as the prompt tells it."""
    spans = tuple((float(row[0]), float(row[-1])) for row in videos.times[index])
    return VisualPart(spans, videos.worlds[index].duration_seconds)


def pack_questions(
    videos: Videos, picked: Sequence[int], asked: Sequence[list[Question]], builder: PromptBuilder
) -> QuestionBatch:
    """Lay out videos and their questions as one padded batch."""
    rows = [
        _row(builder, visual_part(videos, index), questions)
        for index, questions in zip(picked, asked, strict=True)
    ]
    length = max(len(ids) for ids, *_ in rows)
    ids = np.zeros((len(rows), length), np.int64)
    positions, segments = ids.copy(), ids - 1
    targets = ids - 100
    for i, (row, places, owner, wanted) in enumerate(rows):
        ids[i, : len(row)], positions[i, : len(row)] = row, places
        segments[i, : len(row)], targets[i, : len(row)] = owner, wanted
    owner = torch.from_numpy(segments)
    same = (owner[:, None, :] == owner[:, :, None]) | (owner[:, None, :] == 0)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    clips = [np.arange(videos.first[i], videos.first[i + 1]) for i in picked]
    return QuestionBatch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        (same & causal).unsqueeze(1),
        torch.from_numpy(targets),
        torch.from_numpy(np.concatenate(clips)),
    )


def _row(
    builder: PromptBuilder, part: VisualPart, questions: list[Question]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ids, positions, segment numbers and targets of one video with its questions."""
    ids = builder.prefix_ids([part])
    start = len(ids)
    positions, segments, targets = list(range(start)), [0] * start, [-100] * start
    for number, question in enumerate(questions, start=1):
        asked, answer = builder.suffix_ids(question.text), builder.answer_ids(question.answer)
        whole = asked + answer
        ids += whole
        positions += range(start, start + len(whole))
        segments += [number] * len(whole)
        targets += [-100] * (len(asked) - 1) + answer + [-100]
    return ids, positions, segments, targets


def plan_batches(
    videos: Videos, *, token_budget: int, questions: int, tokens_per_clip: int, seed: int
) -> Iterator[tuple[list[int], int]]:
    """Endless groups of about equally long videos, each with a seed for its questions.

    Nothing is laid out yet, so a stopped training skips what it has seen at no cost.
    """
    rng = np.random.default_rng(seed)
    lengths = np.diff(videos.first)
    while True:
        pool = rng.permutation(len(videos.worlds))[:256]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        groups: list[list[int]] = [[]]
        for index in pool:
            size = lengths[index] * (tokens_per_clip + _LABEL_TOKENS) + _ASK_TOKENS * questions
            if groups[-1] and (len(groups[-1]) + 1) * size > token_budget:
                groups.append([])
            groups[-1].append(int(index))
        for number in rng.permutation(len(groups)):
            yield groups[number], int(rng.integers(1 << 31))


def lay_out(
    videos: Videos,
    picked: Sequence[int],
    weights: dict[str, float],
    builder: PromptBuilder,
    *,
    questions: int,
    seed: int,
) -> QuestionBatch:
    """Ask questions about some videos and pack them."""
    rng = np.random.default_rng(seed)
    asked = [ask_many(videos.worlds[i], weights, questions, rng) for i in picked]
    return pack_questions(videos, picked, asked, builder)


def embed_batch(model: ApolloModel, batch: QuestionBatch, visual: torch.Tensor) -> torch.Tensor:
    """Input embeddings (B, L, H) with visual tokens (clips, R, H) at their places, in order."""
    places = batch.ids == VISUAL_ID
    embeddings = model.llm.get_input_embeddings()(batch.ids.masked_fill(places, 0))
    return embeddings.masked_scatter(places.unsqueeze(-1), visual.flatten(0, 1).to(embeddings))
