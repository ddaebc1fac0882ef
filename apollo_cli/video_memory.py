"""What a model keeps of a video: visual tokens, their real times, and how they were made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apollo_cli.errors import FitError, UsageError
from apollo_cli.model.prompt import PromptBuilder, VisualPart
from apollo_cli.planner import Spoken
from apollo_cli.video.container import is_from_stdin
from apollo_cli.video.sampler import ClipPlan, largest_fitting, share_clips

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class VideoMemory:
    """One watched video or image.

    Attributes:
        path: the file that was watched. kind: ``video`` or ``image``.
        duration_seconds: length of the whole video.
        plan: which clips, of which window.
        tokens: (clips, R, H), visual tokens of each clip.
        times: (clips, frames a clip), real presentation times in seconds.
        clip_seconds: length of a clip as the prompt tells it.
        notes: what a user should know about the file and its reading, a sentence each.
        decode_seconds, encode_seconds: what making it cost; 0 when it was remembered.
        remembered: the file it came from, when nothing was decoded.
        spoken: what is said, where subtitles were asked for.
    """

    path: Path
    kind: str
    duration_seconds: float
    plan: ClipPlan
    tokens: torch.Tensor
    times: np.ndarray
    clip_seconds: float
    notes: tuple[str, ...] = ()
    decode_seconds: float = 0.0
    encode_seconds: float = 0.0
    remembered: Path | None = None
    spoken: Spoken = field(default_factory=Spoken)

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self.tokens.shape)
        return f"VideoMemory({self.path.name!r}, tokens {shape}, {self.plan.describe()})"

    def __len__(self) -> int:
        return len(self.times)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes, and those on its subtitles."""
        return (*self.notes, *self.spoken.notes)

    @property
    def part(self) -> VisualPart:
        """As the prompt tells it."""
        spans = tuple((float(clip[0]), float(clip[-1])) for clip in self.times)
        return VisualPart(
            spans,
            self.duration_seconds,
            self.kind == "image",
            self.clip_seconds,
            self.spoken.words(self.times, self.plan.clip_seconds),
        )

    @property
    def listed(self) -> str:
        """The subtitles of its window, where they are listed before the question."""
        return self.spoken.listed((self.plan.start_seconds, self.plan.end_seconds))

    def kept(self, clips: np.ndarray) -> VideoMemory:
        """Keep the clips with these indices."""
        plan = replace(self.plan, times=self.plan.times[clips])
        return replace(self, plan=plan, tokens=self.tokens[clips], times=self.times[clips])

    def thinned(self, clips: int) -> VideoMemory:
        """Keep ``clips`` clips: a smaller budget without watching again.

        Each is the one in the middle of its share, where the sampler would have put it.
        """
        if clips >= len(self):
            return self
        return self.kept(((np.arange(clips) + 0.5) * len(self) / clips).astype(int))

    def within(self, start_seconds: float, end_seconds: float | None) -> VideoMemory:
        """Keep the clips of a window: another question's part without watching again.

        Raises:
            UsageError: no clip lies in the window.
        """
        end = self.plan.end_seconds if end_seconds is None else end_seconds
        window = max(start_seconds, self.plan.start_seconds), min(end, self.plan.end_seconds)
        if window == (self.plan.start_seconds, self.plan.end_seconds):
            return self
        first, last = self.times[:, 0], self.times[:, -1]
        inside = np.flatnonzero((first >= window[0] - 1e-6) & (last < window[1]))
        if not len(inside):
            raise UsageError(
                f"no remembered clip lies between {start_seconds:g} and {end:g} s",
                f"{self.path.name} was watched from {self.plan.start_seconds:g} to "
                f"{self.plan.end_seconds:g} s",
            )
        share = (window[1] - window[0]) / (self.plan.end_seconds - self.plan.start_seconds)
        chosen = self.kept(inside)
        wanted = max(len(chosen), round(self.plan.wanted_clips * share))
        plan = replace(
            chosen.plan, start_seconds=window[0], end_seconds=window[1], wanted_clips=wanted
        )
        return replace(chosen, plan=plan)

    def describe(self) -> dict[str, Any]:
        """For ``--json``: what was looked at and what was not."""
        return {
            "path": "-" if is_from_stdin(self.path) else str(self.path),
            "kind": self.kind,
            "duration_seconds": round(self.duration_seconds, 3),
            "window_seconds": [round(self.plan.start_seconds, 3), round(self.plan.end_seconds, 3)],
            "clips": len(self),
            "clips_for_everything": self.plan.wanted_clips,
            "frames_per_clip": self.times.shape[1],
            "clip_seconds": self.clip_seconds,
            "coverage": None if self.plan.is_uniform else round(self.plan.coverage, 4),
            "coverage_text": self.plan.describe(),
            "clip_times": [[round(float(t), 3) for t in clip] for clip in self.times],
            "subtitles": len(self.spoken.subtitles),
            "remembered": None if self.remembered is None else str(self.remembered),
            "warnings": list(self.warnings),
        }


def fit_memories(
    memories: list[VideoMemory],
    prompts: PromptBuilder,
    context: int,
    needed: int,
    notes: list[str],
    *,
    spare: int = 0,
) -> list[VideoMemory]:
    """Thin clips out when a question turns out longer than what was kept free for it.

    Args:
        memories: what was watched; may be empty for text alone.
        context: tokens that the model holds.
        needed: tokens of question, history and answer.
        notes: gets a sentence when clips were left out.
        spare: as of ``largest_fitting``.

    Raises:
        FitError: not even one clip of each video fits.
    """
    clips = [len(memory) for memory in memories]

    def thinned(total: int) -> list[VideoMemory]:
        shares = share_clips(clips, total)
        return [memory.thinned(n) for memory, n in zip(memories, shares, strict=True)]

    def tokens_of(total: int) -> int:
        parts = [memory.part for memory in thinned(total)]
        return len(prompts.prefix_ids(parts)) + needed

    if not memories and needed <= context:
        return memories
    if not memories:
        raise FitError(
            f"the question and the answer need {needed} tokens",
            f"the context of the model holds {context}",
            "shorten the question or lower --max-new-tokens",
        )
    fitting = largest_fitting(sum(clips), tokens_of, context, len(clips), spare)
    if fitting < sum(clips):
        notes.append(f"{fitting} of {sum(clips)} clips fit beside this question")
    return thinned(fitting)
