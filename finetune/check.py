"""Everything that can be known of a training run before it starts, and every fault at once."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from apollo_cli.errors import DataError, DeviceError, WeightsError
from apollo_cli.finetune.data.dataset import Dataset, load_dataset
from apollo_cli.finetune.data.samples import KINDS, Fault, Kind, Sample
from apollo_cli.finetune.data.survey import (
    Files,
    file_faults,
    infos_of,
    measure_samples,
    probe_files,
)
from apollo_cli.finetune.needs import (
    check_method,
    choose_hardware,
    describe_needs,
    list_lacking,
)
from apollo_cli.finetune.places import TABLES, list_absent, tidy, write_obstacle
from apollo_cli.finetune.recipe import Recipe, load_recipe, read_recipe
from apollo_cli.finetune.report import CheckReport, LengthFacts, Preview, SourceFacts, build_preview
from apollo_cli.finetune.stages import STAGES, TEXT_FINDING
from apollo_cli.hardware import HardwareChoice
from apollo_cli.planner import Planner, assumed_planner, load_planner
from apollo_cli.text import count
from apollo_cli.video.container import shown
from apollo_cli.watcher import Progress, no_progress
from apollo_cli.weights.adapter import base_identity, check_base, resolve_chain
from apollo_cli.weights.checkpoint import Checkpoint, read_checkpoint
from apollo_cli.weights.registry import resolve
from apollo_cli.weights.store import find_local

_PREVIEWS = 3
# Kinds that a recipe with faults is not told of: they hang on what it should have said.
_OF_RECIPES = ("unknown_model", "text_share", "text_teaches_nothing", "output_not_writable")


@dataclass(frozen=True)
class _Model:
    """What plans for the model of a recipe. checkpoint: its own files, which count tokens too."""

    planner: Planner
    checkpoint: Checkpoint | None
    assumed: tuple[str, ...]


def check_file(path: Path, on_progress: Progress = no_progress) -> CheckReport:
    """Check a recipe file; where it has faults, its data is looked at all the same.

    The arguments are those of ``check_recipe``.

    Raises:
        DataError: the recipe has faults, and names no data that could be read.
    """
    values, words = read_recipe(path, coming=None)
    readable = {
        name: tuple(
            source
            for source in values.get(name, ())
            if source.path.is_file() and (source.media is None or source.media.is_dir())
        )
        for name in TABLES
    }
    if not words or not readable["data"]:
        return check_recipe(load_recipe(path, coming=None), on_progress)
    path = tidy(path)
    # What it does not say, or says wrongly, is left to chance: only its data is told of.
    guessed = {"model": "", "stage": "custom", "method": "lora", "output": path.parent / "out"}
    known = {**guessed, **values, **readable, "train": values.get("train") or ("llm",)}
    found = check_recipe(Recipe(path=path, **known), on_progress)
    of_data = [f for f in found.faults if f.kind not in _OF_RECIPES]
    told = [Fault("recipe", shown(path.name), word) for word in words]
    return replace(found, faults=(*told, *of_data), steps=0, lengths=None, estimate=(), previews=())


def check_recipe(recipe: Recipe, on_progress: Progress = no_progress) -> CheckReport:
    """Find out what a run would learn from, what it would take, and all that is wrong.

    Nothing is decoded, loaded or fetched; of each file its packets are looked at.

    Args:
        recipe: that was loaded. on_progress: called with ``check`` and ``measure``, amount done,
            and amount in all.
    """
    dataset = load_dataset(recipe)
    samples = [*dataset.samples, *dataset.held_out]
    files = probe_files(samples, readers=recipe.readers, on_progress=on_progress)
    hardware, machine = _look_at_machine(recipe)
    try:
        model = _find_model(recipe)
    except WeightsError as error:
        unknown = Fault("unknown_model", shown(recipe.path.name), error.message)
        broken = [fault for sample in samples for fault in file_faults(sample, files)]
        return _report(recipe, dataset, [*dataset.faults, *broken, unknown, *machine])
    measured, found = measure_samples(
        samples,
        files,
        planner=model.planner,
        sampling=recipe.sampling,
        max_tokens=recipe.max_tokens,
        on_progress=on_progress,
    )
    dataset = dataset.without_broken(measured)
    faults = [*dataset.faults, *found, *machine, *_start_faults(recipe, model.checkpoint)]
    if not dataset.sources and not any(fault.cost == "run" for fault in faults):
        faults.append(Fault("no_samples", shown(recipe.path.name), "no sample can be trained on"))
    faults += _text_share(recipe, dataset)
    report = _report(recipe, dataset, faults)
    kept = [measured[sample.name] for sample in dataset.samples]
    if not kept:
        return report
    context = model.planner.config.context
    allowed = min(context, recipe.max_tokens or context)
    return replace(
        report,
        lengths=LengthFacts.of(kept, allowed),
        estimate=tuple(describe_needs(recipe, model.planner.config, kept, hardware))
        if hardware
        else (),
        lacking=tuple(
            list_lacking(recipe, model.planner.config, report.steps, model.checkpoint is not None)
        ),
        assumed=model.assumed,
        previews=_previews(dataset.samples, files, model.planner, recipe)
        if model.checkpoint
        else (),
    )


def _look_at_machine(recipe: Recipe) -> tuple[HardwareChoice | None, list[Fault]]:
    """What the run would train on, and what of device, output and adapters is not there."""
    faults = [
        Fault("result_not_there", shown(recipe.path.name), f"{shown(adapter)} holds none yet")
        for adapter in list_absent(recipe.adapters)
    ]
    reason = write_obstacle(recipe.output)
    if reason:
        words = f"output {shown(recipe.output)} cannot be written ({reason})"
        faults.append(Fault("output_not_writable", shown(recipe.path.name), words))
    try:
        return choose_hardware(recipe), faults
    except DeviceError as error:
        fault = Fault(
            "device_not_there",
            shown(recipe.path.name),
            error.received,
            error.allowed,
            error.next_step,
        )
        return None, [*faults, fault]


def _start_faults(recipe: Recipe, checkpoint: Checkpoint | None) -> list[Fault]:
    """Why the run could not start from its model and its adapters, as far as these are here."""
    if checkpoint is None:
        return []
    try:
        check_method(recipe, checkpoint)
        if not list_absent(recipe.adapters):
            chain = resolve_chain(recipe.adapters)
            check_base(chain, base_identity(checkpoint), checkpoint.root)
    except (DataError, WeightsError) as error:
        return [Fault("unfit_start", shown(recipe.path.name), error.message)]
    return []


def _find_model(recipe: Recipe) -> _Model:
    """The planner of the recipe's model, from its files or from what is public of its shape.

    Raises:
        WeightsError: its files are damaged, or neither they nor its shape are known.
    """
    if not recipe.model:
        raise WeightsError("no model is named")
    source = resolve(recipe.model)
    folder = find_local(source)
    if folder is not None:
        checkpoint = read_checkpoint(folder)
        return _Model(load_planner(checkpoint, recipe.template), checkpoint, ())
    if source.entry is None:
        raise WeightsError(
            f"the shape of {source.name} is not known",
            next_step=f"fetch it first: apollo models pull {shlex.quote(source.name)}",
        )
    found = assumed_planner(source.entry, recipe.template)
    note = f"{source.name} is not on this machine, so tokens are estimates"
    return _Model(found.planner, None, (note, *found.assumed))


def _report(recipe: Recipe, dataset: Dataset, faults: Sequence[Fault]) -> CheckReport:
    """The report as far as it needs no lengths."""
    total = sum(source.weight for source in dataset.sources)
    return CheckReport(
        recipe=recipe,
        sources=tuple(
            SourceFacts(shown(source.path.name), len(source.samples), source.weight / total)
            for source in dataset.sources
        ),
        held_out=len(dataset.held_out),
        shares=_shares(recipe, dataset),
        steps=recipe.total_steps(len(dataset.samples)) if dataset.sources else 0,
        lengths=None,
        estimate=(),
        assumed=(),
        faults=tuple(faults),
        previews=(),
    )


def _shares(recipe: Recipe, dataset: Dataset) -> dict[Kind, float]:
    if not dataset.sources:
        return dict.fromkeys(KINDS, 0.0)
    return dataset.build_mixture(recipe.seed).shares()


def _text_share(recipe: Recipe, dataset: Dataset) -> list[Fault]:
    """What the paper found about text in the mixture, where it is off, or why none helps."""
    texts = sum(sample.kind == "text" for sample in dataset.samples)
    if "llm" not in recipe.train:
        received = f"{count(texts, 'sample')} of text; trained: {' and '.join(recipe.train)}"
        return [Fault("text_teaches_nothing", shown(recipe.path.name), received)] if texts else []
    wanted = STAGES[recipe.stage].text_share
    share = _shares(recipe, dataset)["text"]
    # Rounded as it is shown: 14.4 % is what the paper's own final models had.
    if wanted is None or not dataset.sources or wanted[0] <= round(share, 2) <= wanted[1]:
        return []
    received = f"{share:.0%} of the mixture is text; {TEXT_FINDING}"
    return [Fault("text_share", shown(recipe.path.name), received)]


def _previews(
    samples: Sequence[Sample], files: Files, planner: Planner, recipe: Recipe
) -> tuple[Preview, ...]:
    """The first sample of each kind."""
    first: dict[Kind, Sample] = {}
    for sample in samples:
        first.setdefault(sample.kind, sample)
    shown_samples = list(first.values())[:_PREVIEWS]
    return tuple(build_preview(s, infos_of(s, files), planner, recipe) for s in shown_samples)
