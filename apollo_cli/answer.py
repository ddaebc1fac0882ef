"""Answers: the text, and the record of how it came about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from apollo_cli.citations import Citation
from apollo_cli.video.budget import TokenCount


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
