"""The token budget: how many clips a context holds when everything in the prompt is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apollo_cli.errors import FitError


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


def share_clips(wanted: Sequence[int], total: int) -> list[int]:
    """Give each video its share of ``total`` clips: in proportion, at least one each."""
    if sum(wanted) <= total:
        return list(wanted)
    scale = total / sum(wanted)
    shares = [max(1, int(clips * scale)) for clips in wanted]
    order = sorted(range(len(wanted)), key=lambda i: shares[i] - wanted[i] * scale)
    for index in order:
        if sum(shares) < total:
            shares[index] += 1
    return shares


def largest_fitting(
    wanted: int, tokens_of: Callable[[int], int], available: int, fewest: int = 1, spare: int = 0
) -> int:
    """The largest number of clips, up to ``wanted``, whose prompt fits.

    Args:
        wanted: clips that would show everything.
        tokens_of: tokens of the whole prompt for a number of clips, answer included.
        available: tokens that the context holds.
        fewest: clips that are needed at least, one for each video.
        spare: tokens left free as well, where ``fewest`` clips fit beside them.

    Raises:
        FitError: not even ``fewest`` clips fit.
    """
    if spare:
        available = max(available - spare, min(available, tokens_of(fewest)))
    if tokens_of(wanted) <= available:
        return wanted
    fits, too_many = fewest - 1, wanted
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if tokens_of(middle) <= available:
            fits = middle
        else:
            too_many = middle
    if fits < fewest:
        clips = "one clip" if fewest == 1 else f"{fewest} clips"
        raise FitError(
            f"{clips}, the question and the answer need {tokens_of(fewest)} tokens",
            f"the context of the model holds {available}",
            "shorten the question or lower --max-new-tokens",
        )
    return fits
