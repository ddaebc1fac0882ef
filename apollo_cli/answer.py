"""Times that an answer names, tied to the clips that the model really saw."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from apollo_cli.video_memory import VideoMemory

# A number begins where no other one does, and is short: each digit is looked at a few times only,
# however many there are, and every moment fits a clock.
_NUMBER = r"(?<![\d.])(\d{1,6}(?:\.\d+)?)"
_UNIT = r"\s*(?:seconds?|secs?|s)\b"
_CLOCK = r"(?<![\d:.])(?:(\d{1,2}):)?(\d{1,3}):([0-5]\d(?:\.\d+)?)(?![\d:])"
_TIMES = re.compile(
    rf"{_NUMBER}\s*(?:-|–|to|and)\s*{_NUMBER}{_UNIT}|{_NUMBER}{_UNIT}|{_CLOCK}", re.IGNORECASE
)


@dataclass(frozen=True)
class Citation:
    """One moment that an answer names.

    Attributes:
        text: as the answer has it. seconds: what that means.
        clip_seconds: start and end of the nearest clip that was seen.
        seen: whether the moment lies inside that clip.
    """

    text: str
    seconds: float
    clip_seconds: tuple[float, float]
    seen: bool

    def describe(self) -> str:
        """One line for a person."""
        clip = "-".join(clock(edge) for edge in self.clip_seconds)
        where = f"inside the clip {clip}" if self.seen else f"not seen; the nearest clip is {clip}"
        return f"{self.text!r} is {clock(self.seconds)}, {where}"

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def clock(seconds: float) -> str:
    """A time as people write it: 1:05 or 1:02:03."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    head = f"{hours}:{minutes:02}" if hours else f"{minutes}"
    return f"{head}:{whole % 60:02}"


def cited_times(text: str, memory: VideoMemory) -> list[Citation]:
    """The moments that an answer names, each snapped to a clip of the video.

    Times behind the end of the video are left out: they cannot be a place in it.
    """
    starts = memory.times[:, 0]
    lengths = memory.times[:, -1] - starts + memory.plan.clip_seconds / memory.times.shape[1]
    found = []
    for start, end, moments in times_in(text):
        for seconds in moments:
            if seconds > memory.duration_seconds:
                continue
            ends = np.minimum(starts + lengths, memory.duration_seconds)
            away = np.maximum(starts - seconds, seconds - ends).clip(min=0)
            nearest = int(away.argmin())
            edges = (round(float(starts[nearest]), 3), round(float(ends[nearest]), 3))
            found.append(Citation(text[start:end], seconds, edges, bool(away[nearest] == 0)))
    return found


def times_in(text: str) -> Iterator[tuple[int, int, list[float]]]:
    """Where a text names moments: its first and last character, and the seconds that are meant."""
    for match in _TIMES.finditer(text):
        yield match.start(), match.end(), _seconds(match)


def _seconds(match: re.Match[str]) -> list[float]:
    first, last, single, hours, minutes, seconds = match.groups()
    if seconds is not None:
        return [int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)]
    return [float(value) for value in (first, last, single) if value is not None]


@dataclass(frozen=True)
class TokenCount:
    """Tokens of one question.

    Attributes:
        visual: tokens of the clips. text: header, labels and turns around them.
        answer: most tokens that may be generated. context: what the model holds.
    """

    visual: int
    text: int
    answer: int
    context: int

    @property
    def total(self) -> int:
        """Everything that has to fit."""
        return self.visual + self.text + self.answer


@dataclass(frozen=True)
class Answer:
    """An answer and how it came about. ``str()`` is the text alone.

    Attributes:
        text: the answer. question: what was asked.
        stop: ``end`` when the model ended it, ``length`` when ``max_new_tokens`` did,
            ``repetition`` when it began to repeat itself.
        generated: number of tokens written.
        tokens: what the prompt took of the context.
        seconds: time of each stage. videos: what was looked at. model: which model, and where.
        notes: what a user should know, a sentence each.
        citations: moments that the text names, tied to clips of the one video.
    """

    text: str
    question: str
    stop: str
    generated: int
    tokens: TokenCount
    seconds: dict[str, float]
    videos: tuple[dict[str, Any], ...]
    model: dict[str, Any]
    notes: tuple[str, ...] = ()
    citations: tuple[Citation, ...] = ()

    def __str__(self) -> str:
        return self.text

    @property
    def remarks(self) -> list[str]:
        """The notes and the cited times, a sentence each."""
        return [*self.notes, *(citation.describe() for citation in self.citations)]

    def to_dict(self) -> dict[str, Any]:
        """The stable schema of ``--json``."""
        return {
            "question": self.question,
            "answer": self.text,
            "stop": self.stop,
            "model": self.model,
            "videos": list(self.videos),
            "tokens": {
                "visual": self.tokens.visual,
                "text": self.tokens.text,
                "answer_limit": self.tokens.answer,
                "generated": self.generated,
                "context": self.tokens.context,
            },
            "seconds": {stage: round(value, 3) for stage, value in self.seconds.items()},
            "cited": [citation.to_dict() for citation in self.citations],
            "notes": list(self.notes),
        }


@dataclass
class AnswerStream:
    """Text as it is written; ``answer`` is there once the iteration has ended."""

    pieces: Iterator[str]
    answer: Answer | None = field(default=None)

    def __iter__(self) -> Iterator[str]:
        return self.pieces

    def finish(self) -> Answer:
        """Write whatever is still to be written and return the whole."""
        for _ in self.pieces:
            pass
        assert self.answer is not None
        return self.answer
