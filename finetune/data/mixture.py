"""The mixture: which sample is learned at which place, the same for every process and every run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from apollo_cli.errors import DataError
from apollo_cli.finetune.data.sample import KINDS, Kind, Sample

_FINEST_SHARE = 1_000_000


def resolve_shares(counts: Sequence[int], shares: Sequence[float | None]) -> list[float]:
    """The share of each source, so that they sum to 1.

    Args:
        counts: samples in each source.
        shares: as the recipe has them; None everywhere leaves them to the counts.
    """
    weights = [n if share is None else share for n, share in zip(counts, shares, strict=True)]
    return [weight / sum(weights) for weight in weights]


class Mixture:
    """Samples of several sources in a fixed order without an end.

    Every stretch from the start keeps the shares of the sources as closely as whole samples
    allow (Webster's method). In a source every sample comes once before any comes twice.

    Args:
        sources: samples and weight of each; weights need not sum to 1.
        seed: of the order inside the sources.

    Raises:
        DataError: a source is empty, or a weight is not above 0.
    """

    def __init__(self, sources: Sequence[tuple[Sequence[Sample], float]], seed: int) -> None:
        if not sources or any(not samples or weight <= 0 for samples, weight in sources):
            raise DataError(
                "the mixture has an empty source",
                "every source has samples and a share above 0",
                "leave it out of the recipe",
            )
        total = sum(weight for _, weight in sources)
        fine = [round(_FINEST_SHARE * weight / total) or 1 for _, weight in sources]
        self._samples = [samples for samples, _ in sources]
        self._shares = [Fraction(share, sum(fine)) for share in fine]
        self._seed = seed
        # Two epochs of each are at hand, since length grouping looks ahead.
        self._order = lru_cache(maxsize=2 * len(sources))(self._shuffled)

    def sample_at(self, slot: int, attempt: int = 0) -> Sample:
        """The sample of a slot.

        Args:
            slot: 0 or more. attempt: above 0 takes another sample of the same source, a new one
                each time until all were tried, for one that could not be read.
        """
        source, number = self._draw(slot)
        samples = self._samples[source]
        epoch, place = divmod(number, len(samples))
        if attempt and len(samples) > 1:
            others = len(samples) - 1
            jump = _mixed(np.uint64(slot), self._seed, source) % np.uint64(others)
            place = (place + 1 + (int(jump) + attempt - 1) % others) % len(samples)
        return samples[int(self._order(source, epoch)[place])]

    def shares(self) -> dict[Kind, float]:
        """How often each kind of sample is learned from, in the long run."""
        found = dict.fromkeys(KINDS, 0.0)
        for samples, share in zip(self._samples, self._shares, strict=True):
            for sample in samples:
                found[sample.kind] += float(share) / len(samples)
        return found

    def _draw(self, slot: int) -> tuple[int, int]:
        """Source of a slot, and how often that source was drawn before.

        The j-th draw of a source with share w is due at (j + 1/2) / w; slots follow these times.
        So many draws are due before time t that each source is within half a draw of w * t, and
        only draws within a few times of the slot need to be looked at.
        """
        margin = len(self._shares)
        early, late = Fraction(max(0, slot - margin)), Fraction(slot + margin + 1)
        due: list[tuple[Fraction, int, int]] = []
        passed = 0
        for source, share in enumerate(self._shares):
            first = max(0, math.ceil(early * share - Fraction(1, 2)))
            passed += first
            for number in range(first, math.floor(late * share + Fraction(1, 2)) + 1):
                due.append((Fraction(2 * number + 1, 2) / share, source, number))
        due.sort()
        _, source, number = due[slot - passed]
        return source, number

    def _shuffled(self, source: int, epoch: int) -> np.ndarray:
        """The order of a source in an epoch; (samples,) indices."""
        numbers = np.arange(len(self._samples[source]), dtype=np.uint64)
        return np.argsort(_mixed(numbers, self._seed, source, epoch), kind="stable")


def _mixed(numbers: np.ndarray | np.uint64, *seeds: int) -> np.ndarray:
    """Numbers scattered by the SplitMix64 function: the same in every version of every library."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(numbers, dtype=np.uint64)
        for seed in seeds:
            mixed = mixed + np.uint64((seed * 2 + 1) * 0x9E3779B97F4A7C15 % 2**64)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed
