"""What a model keeps of a video: visual tokens, their real times, and how they were made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from apollo_cli.errors import FitError
from apollo_cli.model.prompt import PromptBuilder, VisualPart
from apollo_cli.planning import visual_part
from apollo_cli.video.budget import largest_fitting, share_clips
from apollo_cli.video.probe import VideoInfo
from apollo_cli.video.sampler import ClipPlan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class VideoMemory:
    """One watched video or image.

    Attributes:
        info: facts of the file.
        plan: what was to be looked at.
        tokens: (clips, R, H), visual tokens of each clip.
        times: (clips, frames a clip), real presentation times in seconds.
        clip_seconds: length of a clip as the prompt tells it.
        decode_seconds, encode_seconds: what making it cost.
        notes: what a user should know about this reading, a sentence each.
    """

    info: VideoInfo
    plan: ClipPlan
    tokens: torch.Tensor
    times: np.ndarray
    clip_seconds: float
    decode_seconds: float
    encode_seconds: float
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self.tokens.shape)
        return f"VideoMemory({self.info.path.name!r}, tokens {shape}, {self.plan.describe()})"

    def __len__(self) -> int:
        return len(self.times)

    @property
    def part(self) -> VisualPart:
        """As the prompt tells it."""
        return visual_part(self.info, self.times, self.clip_seconds)

    def thinned(self, clips: int) -> VideoMemory:
        """Keep ``clips`` clips, evenly spread: a smaller budget without watching again."""
        if clips >= len(self):
            return self
        kept = np.unique(np.linspace(0, len(self) - 1, clips).round().astype(int))
        plan = replace(self.plan, times=self.plan.times[kept])
        return replace(self, plan=plan, tokens=self.tokens[kept], times=self.times[kept])

    def describe(self) -> dict[str, Any]:
        """For ``--json``: what was looked at and what was not."""
        info = self.info
        return {
            "path": str(info.path),
            "kind": info.kind,
            "duration_seconds": round(info.duration_seconds, 3),
            "window_seconds": [round(self.plan.start_seconds, 3), round(self.plan.end_seconds, 3)],
            "clips": len(self),
            "clips_for_everything": self.plan.wanted_clips,
            "frames_per_clip": self.times.shape[1],
            "clip_seconds": self.clip_seconds,
            "coverage": round(self.plan.coverage, 4),
            "coverage_text": self.plan.describe(),
            "clip_times": [[round(float(t), 3) for t in clip] for clip in self.times],
            "warnings": [*info.warnings, *self.notes],
        }


def fit_memories(
    memories: list[VideoMemory],
    prompts: PromptBuilder,
    context: int,
    needed: int,
    notes: list[str],
) -> list[VideoMemory]:
    """Thin clips out when a question turns out longer than what was kept free for it.

    Args:
        memories: what was watched; may be empty for text alone.
        context: tokens that the model holds.
        needed: tokens of question, history and answer.
        notes: gets a sentence when clips were left out.

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
    fitting = largest_fitting(sum(clips), tokens_of, context, len(clips))
    if fitting < sum(clips):
        notes.append(f"{fitting} of {sum(clips)} clips fit beside this question")
    return thinned(fitting)
