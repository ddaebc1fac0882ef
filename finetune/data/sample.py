"""One thing to learn from: what is seen, what is asked, and what is answered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from apollo_cli.model.prompt import Turn

Kind = Literal["text", "image", "multi-image", "video"]
KINDS: tuple[Kind, ...] = ("text", "image", "multi-image", "video")

# An answer of at most so many words is compared as a whole when accuracy is measured.
_SHORT_WORDS = 3


@dataclass(frozen=True)
class Visual:
    """A video or image that a sample shows.

    Attributes:
        path: absolute, with links resolved.
        start_seconds, end_seconds: the part of a video that is looked at; None is its end.
    """

    path: Path
    kind: Literal["video", "image"]
    start_seconds: float = 0.0
    end_seconds: float | None = None


@dataclass(frozen=True)
class Sample:
    """A talk about videos and images, or about text alone.

    Attributes:
        name: the sample's own id, else its file and line or entry, such as ``bees.jsonl:12``.
        turns: at least one; every answer is trained on.
        visuals: in the order of the prompt, all of them in front of the first question.
        choices: the answers to choose from, where the data names them.
    """

    name: str
    turns: tuple[Turn, ...]
    visuals: tuple[Visual, ...] = ()
    choices: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """Which part of the mixture this is; one video is enough to be a video sample."""
        if any(visual.kind == "video" for visual in self.visuals):
            return "video"
        if len(self.visuals) > 1:
            return "multi-image"
        return "image" if self.visuals else "text"

    @property
    def is_short_answer(self) -> bool:
        """Whether the last answer can be judged by comparing it."""
        return bool(self.choices) or len(self.turns[-1].answer.split()) <= _SHORT_WORDS
