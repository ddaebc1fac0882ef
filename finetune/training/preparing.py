"""Before the first step: data read and measured, the model loaded, and what the run is known by."""

from __future__ import annotations

import hashlib
import logging
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from apollo_cli.errors import DataError
from apollo_cli.finetune.adapters import EXTRA, Trained, load_base, prepare_network
from apollo_cli.finetune.data.dataset import Dataset, Mixture, label_files
from apollo_cli.finetune.data.samples import Fault, Sample, count_lost
from apollo_cli.finetune.data.survey import measure_samples, probe_files
from apollo_cli.finetune.needs import choose_hardware
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.training.checkpoints import FEATURES_NAME, clear_torn
from apollo_cli.finetune.training.examples import ExampleBuilder
from apollo_cli.finetune.training.features import FeatureStore
from apollo_cli.finetune.training.feed import Quarantine, stamp_of
from apollo_cli.finetune.training.stopping import together
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.hardware import import_fault, package_version
from apollo_cli.loaded_model import FoundModel, LoadedModel
from apollo_cli.planner import Planner
from apollo_cli.text import count
from apollo_cli.video.container import shown
from apollo_cli.watcher import Progress
from apollo_cli.weights.files import hash_file
from apollo_cli.weights.store import LocatedModel

if TYPE_CHECKING:
    from accelerate import Accelerator

LOCK_NAME = ".lock"
# Keys of a recipe that may change while a run is gone on with: they change nothing that is
# learned, or no more than the order of a sum.
_FREE_KEYS = frozenset(
    [
        *("path", "model", "adapters", "output", "data", "validation", "device"),
        *("micro_batch_size", "gradient_checkpointing", "cache_features", "readers"),
        *("read_seconds", "save_every", "keep_checkpoints", "validate_every", "tensorboard"),
    ]
)
_PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "safetensors", "av")


@dataclass(frozen=True)
class Survey:
    """What a look at all samples found.

    Attributes:
        data: of the run. model: of the recipe, before its weights are read.
        tokens: of each sample that can be learned from, by its name.
        faults: of the files that were looked at.
        stamp: of all videos and images: it is another one when any of them was written anew.
    """

    data: Dataset
    model: FoundModel
    tokens: dict[str, int]
    faults: tuple[Fault, ...]
    stamp: str


@dataclass(frozen=True)
class Prepared:
    """All that a loop needs.

    Attributes:
        recipe: of the run. base: the loaded model. trained: what of it is trained.
        trainee: computes the loss. planner: of the model.
        mixture: of the samples to train on. samples: these, and those that cannot be read.
        held_out: those to measure with.
        lengths: tokens of each sample, by its identity.
        steps: of the whole run.
    """

    recipe: Recipe
    base: LoadedModel
    trained: Trained
    trainee: Trainee
    planner: Planner
    mixture: Mixture
    samples: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    lengths: dict[int, int]
    steps: int

    def length_of(self, slot: int) -> int:
        """Tokens of the sample of a slot; 0 for one that cannot be read."""
        return self.lengths.get(id(self.mixture.sample_at(slot)), 0)


def start_team(recipe: Recipe) -> tuple[Accelerator, str]:
    """This process among those of the run, and the device that it trains on.

    Raises:
        DataError: a package is missing. DeviceError: the device is not there.
    """
    # It complains on import of kernels that are a choice.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for package in ("accelerate", "matplotlib"):
        fault = import_fault(package, package)
        if fault is not None:
            raise DataError(f"training: {fault}", "", EXTRA)
    from accelerate import Accelerator

    device = choose_hardware(recipe).device
    team = Accelerator(cpu=device == "cpu")
    if team.num_processes > 1 and device != "cpu":
        device = f"cuda:{team.local_process_index}"
    return team, device


@contextmanager
def claim(output: Path, team: Accelerator) -> Iterator[None]:
    """Make the output folder, hold it against other runs, and clear what a killed one left.

    Raises:
        DataError: another run writes to it, or it cannot be written.
    """
    lock = FileLock(output / LOCK_NAME)
    try:
        with together(team):
            if team.is_main_process:
                _take(lock, output)
        yield
    finally:
        lock.release()


def _take(lock: FileLock, output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        clear_torn(output)
    except Timeout:
        raise DataError(
            f"another run is writing to {output}", next_step="wait for it, or stop it"
        ) from None
    except OSError as error:
        raise DataError(
            f"{output} cannot be written ({error.strerror or error})",
            next_step="choose another output in the recipe",
        ) from error


def survey(
    recipe: Recipe, data: Dataset, model: FoundModel, team: Accelerator, on_progress: Progress
) -> Survey:
    """Look at all files and measure all samples."""
    found: list[Any] = [None]
    with together(team):
        if team.is_main_process:
            found = [_look(recipe, data, model.planner, on_progress)]
    if team.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        # What can be read decides the order of all samples, so that one process finds it out.
        broadcast_object_list(found)
    tokens, faults, stamp = found[0]
    return Survey(data, model, tokens, faults, stamp)


def _look(
    recipe: Recipe, data: Dataset, planner: Planner, on_progress: Progress
) -> tuple[dict[str, int], tuple[Fault, ...], str]:
    samples = [*data.samples, *data.held_out]
    files = probe_files(samples, readers=recipe.readers, on_progress=on_progress)
    lengths, faults = measure_samples(
        samples,
        files,
        planner=planner,
        sampling=recipe.sampling,
        max_tokens=recipe.max_tokens,
        on_progress=on_progress,
    )
    tokens = {name: length.tokens for name, length in lengths.items()}
    stamps = [(path.name, stamp_of(path)) for path in files]
    return tokens, tuple(faults), _join(sorted(stamps, key=str))


def identify_run(recipe: Recipe, data: Dataset, model: LocatedModel) -> dict[str, Any]:
    """What must stay the same while a run is gone on with, as words and JSON values."""
    # What is dropped for a sample depends on those beside it.
    free = _FREE_KEYS - {"micro_batch_size"} if recipe.lora_dropout else _FREE_KEYS
    names = [item.name for item in fields(Recipe) if item.name not in free]
    values = {name: getattr(recipe, name) for name in names}
    identity: dict[str, Any] = {**values, "the base model": _join(sorted(model.identity.items()))}
    for number, adapter in enumerate(model.chain, start=1):
        identity[f"adapter {number}"] = adapter.digest
    labels = label_files([source.path for source in (*recipe.data, *recipe.validation)])
    for source in recipe.data:
        identity[f"data {labels[source.path]}"] = hash_file(source.path).sha256
        identity[f"the share of {labels[source.path]}"] = source.share
    # A media file that is gone takes its samples with it, without a change of the data file.
    usable = [(s.name, [v.path.name for v in s.visuals]) for s in data.samples]
    return identity | {"the list of samples that can be used": _join(usable)}


def describe_packages() -> dict[str, str]:
    """Versions of the packages that matter for a result."""
    found = {name: package_version(name) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version is not None}


def prepare(
    recipe: Recipe,
    found: Survey,
    team: Accelerator,
    quarantine: Quarantine,
    *,
    say: Callable[[str], None],
    on_progress: Progress,
) -> Prepared:
    """Leave out what cannot be read, load the model, and open what is trained.

    Samples whose files cannot be read go to the quarantine, which is told, and out of the mixture.

    Raises:
        DataError: most samples cannot be read, or are too long.
        WeightsError, DeviceError: as ``adapters.load_base``.
    """
    data, tokens = found.data, found.tokens
    stopping = [fault.message for fault in found.faults if fault.cost == "run"]
    if stopping:
        raise DataError("the data cannot be trained on", faults=stopping)
    broken = {fault.where: fault for fault in found.faults if fault.cost == "sample"}
    # A sample that is too long is measured anew by each run: no file is to blame.
    long = {where for where, fault in broken.items() if fault.kind == "too_long"}
    samples = [sample for sample in data.samples if sample.name not in long]
    # The first process writes them down, and the others read that.
    for is_turn in (team.is_main_process, not team.is_main_process):
        with together(team):
            if is_turn:
                quarantine.load()
            for sample in samples if is_turn else ():
                if sample.name not in tokens:
                    quarantine.exclude(sample, broken[sample.name].message)
    readable = data.without_broken(tokens)
    tell_faults((*readable.faults, *found.faults), say)
    for fault in readable.faults:
        if fault.kind == "nothing_held_out":
            say(fault.message)
    _check_enough(recipe, samples, quarantine)
    with together(team):
        base = load_base(recipe, found.model, on_progress=on_progress)
        trained = prepare_network(base.network, recipe)
    return Prepared(
        recipe=recipe,
        base=base,
        trained=trained,
        trainee=Trainee(base.network, recipe.gradient_checkpointing),
        planner=found.model.planner,
        mixture=readable.build_mixture(recipe.seed),
        samples=tuple(samples),
        held_out=readable.held_out,
        lengths={id(s): tokens[s.name] for s in samples if s.name in tokens},
        steps=recipe.total_steps(len(readable.samples)),
    )


def build_builder(prepared: Prepared) -> ExampleBuilder:
    """What reads the samples of a run."""
    recipe = prepared.recipe
    return ExampleBuilder(
        prepared.planner,
        recipe.sampling,
        max_tokens=recipe.max_tokens,
        read_seconds=recipe.read_seconds,
    )


def watch_ahead(
    prepared: Prepared,
    builder: ExampleBuilder,
    team: Accelerator,
    quarantine: Quarantine,
    on_progress: Progress,
) -> None:
    """Where encoders and connector are frozen, watch every video once, and read its tokens later.

    Args:
        builder: is told where the tokens are.
        quarantine: gets what cannot be read, which is said.

    Raises:
        DataError: most samples cannot be read, or the folder cannot be written.
    """
    recipe = prepared.recipe
    if set(recipe.train) != {"llm"} or not recipe.cache_features:
        return
    base = prepared.base
    store = FeatureStore(
        recipe.output / FEATURES_NAME,
        builder,
        base.network,
        model_name=base.located.name,
        fingerprint=base.fingerprint,
    )
    with together(team):
        store.fill(
            [s for s in (*prepared.samples, *prepared.held_out) if s not in quarantine],
            process=team.process_index,
            processes=team.num_processes,
            on_broken=lambda sample, error: quarantine.exclude(sample, error.message, is_said=True),
            on_progress=on_progress,
        )
    store.load()
    quarantine.load()
    _check_enough(recipe, prepared.samples, quarantine)
    builder.remembered = store.find
    if base.network.device.type != "cpu":
        prepared.trainee.set_aside()


def tell_faults(faults: tuple[Fault, ...], say: Callable[[str], None]) -> None:
    """Tell how many samples are left out, with a line for each kind of fault."""
    costly = [fault for fault in faults if fault.cost == "sample"]
    if costly:
        lost = count_lost(costly)
        are = "is" if lost == 1 else "are"
        say(f"{count(lost, 'sample')} {are} left out; apollo finetune check names each")
    counts = Counter(fault.kind for fault in costly)
    for kind, number in counts.most_common():
        first = next(fault for fault in costly if fault.kind == kind)
        say(f"  {number} x {kind.replace('_', ' ')}, such as {first.message}")


def _check_enough(recipe: Recipe, samples: Sequence[Sample], quarantine: Quarantine) -> None:
    broken = [sample for sample in samples if sample in quarantine]
    if len(broken) > len(samples) / 2:
        files = list(dict.fromkeys(v.path.name for sample in broken for v in sample.visuals))
        more = f" and {count(len(files) - 3, 'other')}" if len(files) > 3 else ""
        mend = f"mend {', '.join(map(shown, files[:3]))}{more}, which the next run takes up; "
        raise DataError(
            f"{len(broken)} of {count(len(samples), 'sample')} cannot be read",
            "at least half of the data is needed",
            f"{mend if files else ''}apollo finetune check {shlex.quote(str(recipe.path))} names "
            "all faults",
        )


def _join(values: Any) -> str:
    return hashlib.sha256(repr(values).encode("utf-8", "backslashreplace")).hexdigest()
