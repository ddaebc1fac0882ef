"""Videos of the drawn world as frozen features, and batches of questions that share a video.

Letters: C clips of all videos, B videos in a batch, P patches, V encoder widths, L sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

import numpy as np
import torch

from apollo_cli.config import SamplingOptions
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.prompt import VISUAL_ID, PromptBuilder, VisualPart
from apollo_cli.video.sampler import FrameGrid, plan_clips
from lab.clips import MOTIONS, render_clip
from lab.network import CLIP_SECONDS, FRAMES, PIXELS
from lab.questions import Question, ask
from lab.toybox import COLOURS, SHAPES, World, sample_world

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
    grid = FrameGrid(np.arange(world.frame_count) / world.fps, float(world.fps))
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
    feed = iter(jobs)
    with get_context("spawn").Pool(1) as pool, torch.no_grad():
        waiting = deque(pool.apply_async(_draw_world, (job,)) for job in islice(feed, 16))
        while waiting:
            world, times, pixels = waiting.popleft().get()
            waiting.extend(pool.apply_async(_draw_world, (job,)) for job in islice(feed, 1))
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
        words = f"{thing.direction} {thing.speed}" if thing.direction else "still"
        for row in (QUERIES.index(thing.shape), QUERIES.index(thing.colour)):
            targets["colour"][row] = 1 + list(COLOURS).index(thing.colour)
            targets["shape"][row] = 1 + SHAPES.index(thing.shape)
            targets["motion"][row] = MOTIONS.index(words)
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
