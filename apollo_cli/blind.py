"""Did the answer need the video? The same question without it, and with its clips shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apollo_cli.answer import Answer
from apollo_cli.config import GenerationOptions
from apollo_cli.engine import Apollo
from apollo_cli.model.prompt import Turn
from apollo_cli.video_memory import VideoMemory

_SHUFFLE_SEED = 0


@dataclass(frozen=True)
class BlindCheck:
    """Three answers to one question.

    Attributes:
        seen: with the video. blind: without it.
        shuffled: with the clips in another order under the old labels; None for one clip.
    """

    seen: Answer
    blind: Answer
    shuffled: Answer | None

    @property
    def verdict(self) -> str:
        """One sentence; what it says holds for these answers, not for the model as a whole."""
        seen, blind = _plain(self.seen.text), _plain(self.blind.text)
        if seen == blind:
            return "the same answer comes without the video: it may not rest on what was seen"
        if self.shuffled is None:
            return "without the video the answer is another one"
        if _plain(self.shuffled.text) == seen:
            return "the answer needs the video, and stays the same when its clips are shuffled"
        return "the answer needs the video and the order of its clips"

    def describe(self) -> list[str]:
        """The other answers and the verdict, a sentence each."""
        told = [f"without the video: {self.blind.text or 'nothing'}"]
        if self.shuffled is not None:
            told.append(f"with the clips shuffled: {self.shuffled.text or 'nothing'}")
        return [*told, self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "without_video": self.blind.text,
            "shuffled_clips": None if self.shuffled is None else self.shuffled.text,
            "verdict": self.verdict,
        }


def blind_check(
    apollo: Apollo,
    memories: list[VideoMemory],
    seen: Answer,
    options: GenerationOptions,
    history: Sequence[Turn] = (),
) -> BlindCheck:
    """Ask an answered question again without the video, and with its clips shuffled.

    Args:
        history: the turns before it, which all three answers are given.
    """
    blind = apollo.ask(None, seen.question, options, history)
    shuffled = None
    if any(len(memory) > 1 for memory in memories):
        mixed = [shuffle(memory) for memory in memories]
        shuffled = apollo.ask(mixed, seen.question, options, history)
    return BlindCheck(seen, blind, shuffled)


def shuffle(memory: VideoMemory) -> VideoMemory:
    """Put the clips' tokens into another order, each clip under another one's times."""
    count = len(memory)
    generator = torch.Generator().manual_seed(_SHUFFLE_SEED)
    order = torch.randperm(count, generator=generator)
    if count > 1 and torch.equal(order, torch.arange(count)):
        order = order.flip(0)
    return replace(memory, tokens=memory.tokens[order.to(memory.tokens.device)])


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")
