"""The mixture: which sample is learned at which place, the same for every process and every run."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from apollo_cli.errors import DataError
from apollo_cli.finetune.data.formats import load_samples
from apollo_cli.finetune.data.samples import KINDS, Fault, Kind, Sample
from apollo_cli.finetune.stages import STAGES
from apollo_cli.text import count
from apollo_cli.video.container import shown

if TYPE_CHECKING:
    from apollo_cli.finetune.recipe import Recipe

_FINEST_SHARE = 1_000_000


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


# Where whole videos have many samples each, holding one out must not take the data away.
_MOST_HELD = 0.2


@dataclass(frozen=True)
class LoadedSource:
    """One file of a recipe.

    Attributes:
        path: the file. samples: those that are trained on. share: that the recipe gives it.
    """

    path: Path
    samples: tuple[Sample, ...]
    share: float | None

    @property
    def weight(self) -> float:
        """Its weight in the mixture; without a share, its number of samples."""
        return len(self.samples) if self.share is None else self.share


@dataclass(frozen=True)
class Dataset:
    """The data of a run.

    Attributes:
        sources: files to train on, without those that have nothing.
        held_out: samples to measure with, never trained on.
        faults: of all files, and of what the stage makes of them.
    """

    sources: tuple[LoadedSource, ...]
    held_out: tuple[Sample, ...]
    faults: tuple[Fault, ...]

    @property
    def samples(self) -> list[Sample]:
        """All samples that are trained on."""
        return [sample for source in self.sources for sample in source.samples]

    def build_mixture(self, seed: int) -> Mixture:
        """The order of training.

        Raises:
            DataError: there is nothing to train on.
        """
        return Mixture([(source.samples, source.weight) for source in self.sources], seed)

    def without_broken(self, good: Container[str]) -> Dataset:
        """The dataset with the samples that can be read; weights without a share follow these.

        Args:
            good: names of the samples that can be learned from.
        """
        sources = [
            replace(source, samples=tuple(s for s in source.samples if s.name in good))
            for source in self.sources
        ]
        held_out = tuple(sample for sample in self.held_out if sample.name in good)
        faults = self.faults
        if self.held_out and not held_out:
            words = "all samples held out are broken"
            faults += (Fault("nothing_held_out", self.held_out[0].name, words),)
        return Dataset(tuple(s for s in sources if s.samples), held_out, faults)

    def check_runnable(self) -> None:
        """Refuse data with a fault that costs the run; one that costs a sample is no obstacle.

        Raises:
            DataError: with all such faults.
        """
        stopping = [fault.message for fault in self.faults if fault.cost == "run"]
        if stopping:
            raise DataError("the data cannot be trained on", faults=stopping)


def load_dataset(recipe: Recipe) -> Dataset:
    """Read all files of a recipe.

    Without files of validation, ``validation_share`` of each file is held out: whole videos with
    all of their samples, the same ones in every run.

    Args:
        recipe: names the files, the stage and the seed.
    """
    faults: list[Fault] = []
    held: list[Sample] = []
    sources: list[LoadedSource] = []
    labels = label_files([source.path for source in (*recipe.data, *recipe.validation)])
    kinds = set(STAGES[recipe.stage].kinds)
    if recipe.stage == 2 and recipe.images_in_stage_2:
        kinds |= {"image", "multi-image"}
    for number, source in enumerate((*recipe.data, *recipe.validation)):
        samples, found = load_samples(source, labels[source.path])
        faults += found
        for kind in KINDS:
            left_out = [s for s in samples if s.kind == kind and kind not in kinds]
            if left_out:
                is_error = recipe.stage == 2 and kind != "text"
                words = f"{count(len(left_out), f'{kind} sample')} in stage {recipe.stage}"
                faults.append(
                    Fault(
                        "images_in_stage_2" if is_error else "kind_not_in_stage",
                        labels[source.path],
                        f"{words}, such as {left_out[0].name}",
                    )
                )
        if number >= len(recipe.data):
            held += [sample for sample in samples if sample.kind in kinds]
            continue
        # All stages hold out the same videos, whatever kinds they take.
        share = 0.0 if recipe.validation else recipe.validation_share
        samples, aside = hold_out(samples, share, recipe.seed)
        if share and not aside:
            faults.append(Fault("nothing_held_out", labels[source.path], "its files are too few"))
        kept = tuple(sample for sample in samples if sample.kind in kinds)
        sources.append(LoadedSource(source.path, kept, source.share))
        held += [sample for sample in aside if sample.kind in kinds]
    known = {(s.turns, s.visuals): s.name for source in sources for s in source.samples}
    for sample in held:
        twin = known.get((sample.turns, sample.visuals))
        if twin is not None:
            faults.append(Fault("held_out_twice", sample.name, f"{twin} is the same"))
    sources = [source for source in sources if source.samples]
    if not sources and not any(fault.cost == "run" for fault in faults):
        faults.append(Fault("no_samples", shown(recipe.path.name), "nothing is left for the stage"))
    return Dataset(tuple(sources), tuple(held), tuple(faults))


def hold_out(
    samples: Sequence[Sample], share: float, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Part samples in those to train on and those to measure with.

    Args:
        share: of the samples that are held out, at least one where it is above 0. Samples that
            share a video or image stay together, so it may become up to twice as many.
        seed: which ones. Names of files decide, not their folders.

    Returns:
        Both parts in their old order. The second is empty where every file has too many samples.
    """
    groups = _group(samples)
    if share <= 0 or len(groups) < 2:
        return list(samples), []

    def lot(seen: object) -> bytes:
        told = seen.name if isinstance(seen, Path) else repr(seen)
        return hashlib.blake2b(f"{seed}/{told}".encode("utf-8", "backslashreplace")).digest()

    wanted = max(1, round(share * len(samples)))
    smallest = min(map(len, groups.values()))
    most = max(2 * wanted, min(smallest, round(_MOST_HELD * len(samples))))
    aside: set[int] = set()
    for seen in sorted(groups, key=lot):
        if len(aside) < wanted and len(aside) + len(groups[seen]) <= most:
            aside.update(groups[seen])
    kept = [sample for index, sample in enumerate(samples) if index not in aside]
    return kept, [samples[index] for index in sorted(aside)]


def _group(samples: Sequence[Sample]) -> dict[object, list[int]]:
    """Places of the samples that share a video or image, directly or through others.

    Text alone is a group by its turns. A group is known by the first of its files by name.
    """
    leaders: dict[Path, Path] = {}

    def leader_of(path: Path) -> Path:
        while leaders.setdefault(path, path) != path:
            leaders[path] = path = leaders[leaders[path]]
        return path

    for sample in samples:
        for visual in sample.visuals:
            ends = leader_of(sample.visuals[0].path), leader_of(visual.path)
            first, other = sorted(ends, key=lambda path: (path.name, path))
            leaders[other] = first
    groups: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        seen = leader_of(sample.visuals[0].path) if sample.visuals else sample.turns
        groups.setdefault(seen, []).append(index)
    return groups


def label_files(paths: Sequence[Path]) -> dict[Path, str]:
    """What each file is called: its name, or its whole path where two have the same name."""
    names = Counter(path.name for path in set(paths))
    return {path: shown(path.name if names[path.name] == 1 else path) for path in paths}
