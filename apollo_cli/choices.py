"""Multiple choice by probability: every option is scored, and the order of options cancels out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apollo_cli.engine import Apollo
from apollo_cli.errors import UsageError
from apollo_cli.video_memory import VideoMemory, fit_memories

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Choice:
    """The option that the model finds most likely.

    Attributes:
        question: what was asked. options: what could be chosen.
        probabilities: of each option, summing to 1 over the options.
    """

    question: str
    options: tuple[str, ...]
    probabilities: tuple[float, ...]

    @property
    def index(self) -> int:
        """Which option."""
        return max(range(len(self.options)), key=lambda i: self.probabilities[i])

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "question": self.question,
            "answer": self.options[self.index],
            "letter": LETTERS[self.index],
            "probabilities": dict(zip(self.options, self.probabilities, strict=True)),
        }


def choose(
    apollo: Apollo, memories: list[VideoMemory], question: str, options: Sequence[str]
) -> Choice:
    """Score the options of a question.

    A model of a release is shown the options under letters, once in each rotation, so that every
    option stands behind every letter; the log-probabilities of its letters are averaged. The toy
    was not trained on that and has its own form: each option is scored as an answer.

    Raises:
        UsageError: fewer than two options, more than ten, or two that are the same.
    """
    told = {option.strip() for option in options} - {""}
    if not 2 <= len(told) <= len(LETTERS) or len(told) < len(options):
        raise UsageError(
            f"{len(options)} given as --choice, {len(told)} of them different and not empty",
            f"allowed are 2 to {len(LETTERS)} different ones",
        )
    if apollo.located.is_toy:
        scores = _score_texts(apollo, memories, question, options)
    else:
        scores = _score_letters(apollo, memories, question, options)
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    shares = tuple(weight / sum(weights) for weight in weights)
    return Choice(question, tuple(options), shares)


def lettered(question: str, options: Sequence[str]) -> str:
    """A question with its options under letters, as the benchmarks write it."""
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
    ending = "Answer with the option's letter from the given choices directly."
    return "\n".join([question, *lines, ending])


def _score_letters(
    apollo: Apollo, memories: list[VideoMemory], question: str, options: Sequence[str]
) -> list[float]:
    session, count = apollo.session, len(options)
    # Fitted once for all rotations, which are equally long, so that they share one prefix.
    suffix = apollo.suffix_ids(memories, lettered(question, options))
    fitted = _fit(apollo, memories, len(suffix) + count)
    scores = [0.0] * count
    for shift in range(count):
        order = [(number + shift) % count for number in range(count)]
        text = lettered(question, [options[i] for i in order])
        suffix = apollo.suffix_ids(memories, text)
        logits = session.read(fitted, suffix).log_softmax(-1)
        for place, option in enumerate(order):
            token = session.prompts.answer_ids(LETTERS[place])[0]
            scores[option] += float(logits[token]) / count
    return scores


def _score_texts(
    apollo: Apollo, memories: list[VideoMemory], question: str, options: Sequence[str]
) -> list[float]:
    session = apollo.session
    suffix = apollo.suffix_ids(memories, question)
    answers = [session.prompts.answer_ids(option) for option in options]
    fitted = _fit(apollo, memories, len(suffix) + max(map(len, answers)))
    return [session.score(fitted, suffix, answer) for answer in answers]


def _fit(apollo: Apollo, memories: list[VideoMemory], needed: int) -> list[VideoMemory]:
    notes: list[str] = []
    context = apollo.network.config.context
    return fit_memories(memories, apollo.prompts, context, needed, notes)
