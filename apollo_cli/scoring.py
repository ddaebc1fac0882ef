"""Options that are scored instead of written, and whether an answer needs the video at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apollo_cli.answer import Answer
from apollo_cli.config import GenerationOptions
from apollo_cli.engine import Apollo
from apollo_cli.errors import UsageError
from apollo_cli.model.prompt import Turn
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
