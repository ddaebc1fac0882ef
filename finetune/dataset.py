"""All samples of a recipe: what is trained on, what is held out, and how sources are mixed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from apollo_cli.errors import DataError
from apollo_cli.finetune.faults import Fault
from apollo_cli.finetune.mixture import Mixture, resolve_shares
from apollo_cli.finetune.readers import load_samples
from apollo_cli.finetune.sample import Kind, Sample
from apollo_cli.finetune.stages import STAGES
from apollo_cli.video.opening import shown

if TYPE_CHECKING:
    from apollo_cli.finetune.recipe import DataSource, Recipe


# Where whole videos have many samples each, holding one out must not take the data away.
_MOST_HELD = 0.2


@dataclass(frozen=True)
class LoadedSource:
    """One file of a recipe: the samples that are trained on, and their share of the mixture."""

    path: Path
    samples: tuple[Sample, ...]
    weight: float


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

    @property
    def left_out(self) -> int:
        """Number of samples that a fault costs."""
        return sum(fault.cost == "sample" for fault in self.faults)

    def build_mixture(self, seed: int) -> Mixture:
        """The order of training.

        Raises:
            DataError: there is nothing to train on.
        """
        return Mixture([(source.samples, source.weight) for source in self.sources], seed)

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
    kept: list[tuple[DataSource, list[Sample]]] = []
    labels = _labels([source.path for source in (*recipe.data, *recipe.validation)])
    for source in recipe.data:
        samples, found = load_samples(source, labels[source.path])
        faults += found + _stage_faults(recipe, source, samples)
        # Before the stage has its say, so that all stages hold out the same videos.
        share = 0.0 if recipe.validation else recipe.validation_share
        samples, aside = hold_out(samples, share, recipe.seed)
        if share and not aside:
            faults.append(Fault("nothing_held_out", labels[source.path], "its files are too few"))
        kept.append((source, _of_stage(recipe, samples)))
        held += _of_stage(recipe, aside)
    for source in recipe.validation:
        samples, found = load_samples(source, labels[source.path])
        faults += found + _stage_faults(recipe, source, samples)
        held += _of_stage(recipe, samples)
    faults += _repeated(held, [sample for _, samples in kept for sample in samples])
    kept = [(source, samples) for source, samples in kept if samples]
    counts = [len(samples) for _, samples in kept]
    weights = resolve_shares(counts, [source.share for source, _ in kept]) if kept else []
    sources = tuple(
        LoadedSource(source.path, tuple(samples), weight)
        for (source, samples), weight in zip(kept, weights, strict=True)
    )
    if not sources and not any(fault.cost == "run" for fault in faults):
        faults.append(Fault("no_samples", shown(recipe.path.name), "nothing is left for the stage"))
    return Dataset(sources, tuple(held), tuple(faults))


def hold_out(
    samples: Sequence[Sample], share: float, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Part samples in those to train on and those to measure with.

    Args:
        share: of the samples that are held out, at least one where it is above 0. All samples of
            a video or image stay together, so it may become up to twice as many.
        seed: which ones. Names of files decide, not their folders.

    Returns:
        Both parts in their old order. The second is empty where every file has too many samples.
    """
    groups: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        seen = sample.visuals[0].path if sample.visuals else sample.turns
        groups.setdefault(seen, []).append(index)
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


def _labels(paths: Sequence[Path]) -> dict[Path, str]:
    """What each file is called: its name, or its whole path where two have the same name."""
    names = Counter(path.name for path in set(paths))
    return {path: shown(path.name if names[path.name] == 1 else path) for path in paths}


def _of_stage(recipe: Recipe, samples: Sequence[Sample]) -> list[Sample]:
    """The samples that the stage takes."""
    allowed: set[Kind] = set(STAGES[recipe.stage].kinds)
    if recipe.stage == 2 and recipe.images_in_stage_2:
        allowed |= {"image", "multi-image"}
    return [sample for sample in samples if sample.kind in allowed]


def _stage_faults(recipe: Recipe, source: DataSource, samples: Sequence[Sample]) -> list[Fault]:
    """What the stage does not take, a fault for each kind."""
    taken = {id(sample) for sample in _of_stage(recipe, samples)}
    refused: dict[Kind, list[Sample]] = {}
    for sample in samples:
        if id(sample) not in taken:
            refused.setdefault(sample.kind, []).append(sample)
    faults: list[Fault] = []
    for kind, found in refused.items():
        name = "images_in_stage_2" if recipe.stage == 2 and kind != "text" else "kind_not_in_stage"
        words = f"{len(found)} {kind} samples in stage {recipe.stage}, such as {found[0].name}"
        faults.append(Fault(name, shown(source.path.name), words))
    return faults


def _repeated(held: Sequence[Sample], trained: Sequence[Sample]) -> list[Fault]:
    """Samples to measure with that are trained on too."""
    known = {(sample.turns, sample.visuals): sample.name for sample in trained} if held else {}
    return [
        Fault("held_out_twice", sample.name, f"{known[sample.turns, sample.visuals]} is the same")
        for sample in held
        if (sample.turns, sample.visuals) in known
    ]
