"""From a sample to what the network is trained on: the prompt that ``ask`` would build, and labels.

Letters: C clips, T frames a clip, S image side, R tokens a clip, H language model width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from apollo_cli.config import ENCODE_BATCH, ReadingOptions, SamplingOptions
from apollo_cli.errors import FitError
from apollo_cli.finetune.data.samples import Sample
from apollo_cli.model.prompt import VISUAL_ID, PromptBuilder, Turn, VisualPart
from apollo_cli.planner import Planned, Planner
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.reader import describe_damage
from apollo_cli.video_memory import VideoMemory
from apollo_cli.watcher import read_planned

# Label of a token that is not trained on, as torch's cross entropy knows it.
IGNORED = -100
# Questions of about the same length see the same clips of a long video, and share its memory.
RESERVE_STEP = 64
# Longest time without any progress of a decoder.
_STALL_SECONDS = 30.0


@dataclass(frozen=True, repr=False)
class Example:
    """One sample as the network takes it.

    Attributes:
        name: of the sample.
        ids: the whole talk, ``VISUAL_ID`` at visual tokens.
        labels: ``ids`` at answers and their end tokens, else ``IGNORED``; not shifted.
        pixels: for each encoder, uint8 (C, T, 3, S, S) of all videos and images in order; None
            for text alone, and where tokens are there.
        tokens: (C x R, H), visual tokens that were computed before; else None.
        notes: what is wrong with the files, a sentence each.
    """

    name: str
    ids: list[int]
    labels: list[int]
    pixels: dict[str, torch.Tensor] | None = None
    tokens: torch.Tensor | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Example({self.name!r}, {len(self.ids)} tokens, {self.trained_tokens} trained)"

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss looks at."""
        return sum(label != IGNORED for label in self.labels)


@dataclass(frozen=True)
class SamplePlan:
    """Which clips a sample shows, decided before any decoding.

    Attributes:
        files: its videos and images. tokens: of the whole example.
    """

    files: tuple[Planned, ...]
    tokens: int

    @property
    def notes(self) -> tuple[str, ...]:
        """What the files' owners should know, with the name of each file."""
        infos = [file.info for file in self.files]
        return tuple(f"{info.path.name}: {note}" for info in infos for note in info.warnings)


def spell_turns(
    prompts: PromptBuilder, turns: Sequence[Turn], visual: bool
) -> tuple[list[int], list[int]]:
    """Ids of a talk behind its visual tokens, and their labels."""
    ids: list[int] = []
    labels: list[int] = []
    told = [Turn(turn.question.strip(), turn.answer.strip()) for turn in turns]
    for asked, answer in prompts.turn_ids(told, visual):
        ids += asked + answer
        labels += [IGNORED] * len(asked) + answer
    return ids, labels


def join_clips(pieces: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put the clips of several pieces behind each other, for each encoder."""
    if len(pieces) == 1:
        return pieces[0]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def sampling_of(sample: Sample, sampling: SamplingOptions) -> list[SamplingOptions]:
    """The recipe's sampling inside the window of each video and image."""
    return [
        replace(sampling, start_seconds=visual.start_seconds, end_seconds=visual.end_seconds)
        for visual in sample.visuals
    ]


def reserve_of(text_tokens: int) -> int:
    """Tokens that are kept free for a sample's talk when its clips are planned."""
    return -(-text_tokens // RESERVE_STEP) * RESERVE_STEP


def is_bound(planner: Planner, max_tokens: int | None) -> bool:
    """Whether the recipe, not the model's context, says how long a sample may be."""
    return max_tokens is not None and max_tokens < planner.config.context


def plan_sample(
    planner: Planner,
    sample: Sample,
    infos: Sequence[VideoInfo],
    sampling: SamplingOptions,
    max_tokens: int | None = None,
) -> SamplePlan:
    """Decide which clips a sample shows; long videos are thinned until everything fits.

    Args:
        infos: of the sample's videos and images.
        max_tokens: longest example; None is the model's context.

    Raises:
        FitError: the text alone, or with one clip of each video, is too long.
        UsageError: a window lies outside its video.
    """
    budget = min(planner.config.context, max_tokens or planner.config.context)
    text = len(spell_turns(planner.prompts, sample.turns, bool(infos))[0])
    allowed = f"allowed are {budget}", "shorten the sample's text"
    if is_bound(planner, max_tokens):
        allowed = allowed[0], f"{allowed[1]} or raise max_tokens"
    if not infos:
        if text > budget:
            raise FitError(f"{sample.name}: the text has {text} tokens", *allowed)
        return SamplePlan((), text)
    wishes = sampling_of(sample, sampling)
    try:
        files = planner.plan(infos, wishes, reserve_of(text), budget=budget)
    except FitError as error:
        raise FitError(f"{sample.name}: {error.received}", *allowed) from error
    prefix = planner.prompts.prefix_ids([planner.part(file) for file in files])
    return SamplePlan(tuple(files), len(prefix) + text)


class ExampleBuilder:
    """Builds examples; safe for several threads, each of which gets a reader of its own.

    Args:
        planner: of the model. sampling: of the recipe.
        max_tokens: longest example; None is the model's context.
        read_seconds: longest time that the files of one sample may take.
        remembered: gives the memories of a sample's videos and images where they were watched
            before; None decodes.
    """

    def __init__(
        self,
        planner: Planner,
        sampling: SamplingOptions,
        *,
        max_tokens: int | None = None,
        read_seconds: float = 120.0,
        remembered: Callable[[Sample], list[VideoMemory] | None] | None = None,
    ) -> None:
        self.planner = planner
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.read_seconds = read_seconds
        self.remembered = remembered
        self._own = threading.local()
        self._readers: list[GuardedReader] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def reader(self) -> GuardedReader:
        """The reader of this thread."""
        if not hasattr(self._own, "reader"):
            self._own.reader = GuardedReader(stall_seconds=min(_STALL_SECONDS, self.read_seconds))
            self._readers.append(self._own.reader)
        return self._own.reader

    def interrupt(self) -> None:
        """Let the readings under way fail, from another thread."""
        for reader in list(self._readers):
            reader.interrupt()

    def close(self) -> None:
        """End the decoders of all threads, when none of them reads."""
        for reader in self._readers:
            reader.close()

    def plan(self, sample: Sample) -> SamplePlan:
        """Look at the files of a sample and decide which clips it shows.

        Raises:
            MediaError: a file cannot be opened in time.
            FitError, UsageError: as ``plan_sample``.
        """
        infos = [self.reader.probe(visual.path) for visual in sample.visuals]
        return plan_sample(self.planner, sample, infos, self.sampling, self.max_tokens)

    def build(self, sample: Sample) -> Example:
        """Make an example of a sample.

        Raises:
            MediaError: a file cannot be read, or not in ``read_seconds``.
            FitError: the sample's text is too long.
            UsageError: a window lies outside its video.
        """
        memories = self.remembered(sample) if self.remembered and sample.visuals else None
        if memories is not None:
            tokens = torch.cat([memory.tokens.flatten(0, 1) for memory in memories])
            notes = tuple(f"{m.path.name}: {note}" for m in memories for note in m.notes)
            return self._join(sample, [m.part for m in memories], None, tokens, notes)
        with self.reader.time_limit(self.read_seconds):
            planned = self.plan(sample)
            seen = [self._read(file) for file in planned.files]
        if not seen:
            return self._join(sample, [], None, None, ())
        parts, pixels, notes = zip(*seen, strict=True)
        return self._join(sample, parts, join_clips(pixels), None, planned.notes + sum(notes, ()))

    def _read(
        self, planned: Planned
    ) -> tuple[VisualPart, dict[str, torch.Tensor], tuple[str, ...]]:
        """The pictures of one file, and how the prompt tells them."""
        info, plan = planned.info, planned.plan
        batches = list(
            read_planned(
                self.reader,
                self.planner.config,
                info,
                plan.times,
                ReadingOptions(),
                batch_clips=ENCODE_BATCH["cpu"],
            )
        )
        times = np.concatenate([batch.seconds for batch in batches])
        pixels = [{n: torch.from_numpy(a) for n, a in b.pixels.items()} for b in batches]
        damaged = [seconds for batch in batches for seconds in batch.damaged]
        told = describe_damage(info, damaged, plan.times)
        notes = (f"{info.path.name}: {told}",) if told else ()
        return self.planner.part(planned, times), join_clips(pixels), notes

    def _join(
        self,
        sample: Sample,
        parts: Sequence[VisualPart],
        pixels: dict[str, torch.Tensor] | None,
        tokens: torch.Tensor | None,
        notes: tuple[str, ...],
    ) -> Example:
        prompts = self.planner.prompts
        ids, labels = spell_turns(prompts, sample.turns, bool(parts))
        prefix = prompts.prefix_ids(parts) if parts else []
        assert tokens is None or prefix.count(VISUAL_ID) == len(tokens)
        return Example(
            sample.name,
            prefix + ids,
            [IGNORED] * len(prefix) + labels,
            pixels,
            tokens,
            notes,
        )
