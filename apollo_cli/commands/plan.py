"""``apollo plan``: what a question about a video takes, before anything is fetched or loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.commands.options import complete_file, complete_model, flags_of, read_options
from apollo_cli.commands.output import format_bytes, say_note, write_json, write_table
from apollo_cli.config import GenerationOptions, SamplingOptions
from apollo_cli.errors import ApolloError, FitError, WeightsError
from apollo_cli.words import count

if TYPE_CHECKING:
    from apollo_cli.fit import Run
    from apollo_cli.fitting import Demand
    from apollo_cli.model.config import NetworkConfig
    from apollo_cli.planning import Planner
    from apollo_cli.video.info import VideoInfo
    from apollo_cli.video.sampler import ClipPlan
    from apollo_cli.weights.bits import QuantKind

CARDS_GB = (8, 12, 16, 24)
# Cards are sold in GiB, and a driver and a desktop keep a part.
CARD_SHARE = 0.95


@dataclass(frozen=True)
class Subject:
    """A model that is planned for.

    Attributes:
        name: of the model. planner: counts its clips and tokens.
        kinds: precisions to show; a checkpoint that is stored quantised has its own only.
        local: whether its files are here, so that nothing is assumed.
        assumed: what is not known of its shape, in words.
    """

    name: str
    planner: Planner
    kinds: tuple[QuantKind | None, ...]
    local: bool
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """Where a model would run here.

    Attributes:
        device: ``cuda`` or ``cpu``. name: of the product. free_bytes: None when not known.
        dtype: that a run would have.
    """

    device: str
    name: str
    free_bytes: int | None
    dtype: str


@click.command()
@click.argument("videos", nargs=-1, required=True, metavar="VIDEO...", shell_complete=complete_file)
@click.option(
    "--model",
    "models",
    multiple=True,
    shell_complete=complete_model,
    show_default="all known ones",
    help="Plan for this model; may be repeated.",
)
@click.option("--dtype", show_default="the machine's best", help="bfloat16, float16 or float32.")
@click.option("--max-new-tokens", type=int, default=256, help="Longest answer, in tokens.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@flags_of(SamplingOptions)
def plan(
    videos: tuple[str, ...],
    models: tuple[str, ...],
    *,
    dtype: str | None,
    max_new_tokens: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what a video takes, before anything is fetched or loaded.

    For each model and each number of bits: how many clips are seen, the peak of memory on a card,
    and whether it fits this machine, with the peak there, and cards of 8, 12, 16 and 24 GB. A
    number instead of "yes" says how many clips fit.

    All of it is arithmetic on the headers of files. What is assumed is said; --json tells more.
    """
    sampling = read_options(SamplingOptions, flags)
    answer = GenerationOptions(max_new_tokens=max_new_tokens).max_new_tokens
    from apollo_cli.video.guard import GuardedReader

    with GuardedReader() as reader:
        infos = [reader.probe(video) for video in videos]
    machine = find_machine(dtype)
    found = [_examine(s, infos, sampling, answer, machine) for s in find_subjects(models)]
    if as_json:
        write_json(
            {"videos": list(map(_video, infos)), "machine": asdict(machine), "models": found}
        )
        return
    for info in infos:
        say_note(f"{info.path.name}: {_length(info)}")
    for text in _remarks(found, machine):
        say_note(text)
    headings = ["MODEL", "BITS", "CLIPS", "PEAK", "HERE"]
    headings += [f"{size} GB" for size in CARDS_GB]
    write_table(headings, [row for model in found for row in _rows(model)])


def find_subjects(names: tuple[str, ...]) -> Iterator[Subject]:
    """The named models, or all that are known; one whose files are broken is left out and said.

    Raises:
        WeightsError: a named model is unknown, broken, or of a shape that is not known.
    """
    from apollo_cli.weights.registry import known_models

    for name in names or known_models():
        try:
            yield _subject(name)
        except ApolloError as error:
            if names:
                raise
            say_note(f"{name} is left out: {error.message}")


def _subject(name: str) -> Subject:
    from apollo_cli.fit import precisions
    from apollo_cli.planning import assumed_planner, load_planner
    from apollo_cli.weights.bits import stored_kind
    from apollo_cli.weights.checkpoint import read_checkpoint
    from apollo_cli.weights.registry import resolve
    from apollo_cli.weights.store import find_local

    source = resolve(name)
    folder = find_local(source)
    if folder is not None:
        checkpoint = read_checkpoint(folder)
        stored = stored_kind(checkpoint)
        kinds = precisions() if stored is None else (stored,)
        planner = load_planner(checkpoint)
        return Subject(source.name, planner, kinds, local=True, assumed=planner.config.notes)
    if source.entry is None:
        raise WeightsError(
            f"the shape of {source.name} is not known",
            next_step=f"fetch it first: apollo models pull {source.name}",
        )
    found = assumed_planner(source.entry)
    return Subject(source.name, found.planner, precisions(), False, found.assumed)


def find_machine(dtype: str | None) -> Machine:
    """What a run would use here, without loading torch.

    Raises:
        DeviceError: the dtype is unknown.
    """
    from apollo_cli.hardware import driver_gpus, dtype_name, host_memory_bytes

    gpus = driver_gpus()
    wanted = dtype_name(dtype) if dtype else None
    if gpus:
        return Machine("cuda", gpus[0].name, gpus[0].free_bytes, wanted or "bfloat16")
    return Machine("cpu", "this CPU", host_memory_bytes()[1], wanted or "float32")


def _examine(
    subject: Subject,
    infos: list[VideoInfo],
    sampling: SamplingOptions,
    answer: int,
    machine: Machine,
) -> dict[str, Any]:
    from apollo_cli.fitting import measure_demand

    planner = subject.planner
    question = planner.question_tokens
    plans = planner.plan(infos, sampling, answer, spare_tokens=question)
    demand = measure_demand(planner, infos, plans, question_tokens=question, answer_tokens=answer)
    return {
        "name": subject.name,
        "local": subject.local,
        "assumed": list(subject.assumed),
        "clips": demand.clips,
        "tokens": {
            "visual": demand.visual,
            "text": demand.text,
            "question": question,
            "answer": answer,
            "context": planner.config.context,
            "exact": subject.local,
        },
        "videos": [_seen(info, plan) for info, plan in zip(infos, plans, strict=True)],
        "precisions": [
            _precision(machine, planner.config, quant, demand) for quant in subject.kinds
        ],
    }


def _precision(
    machine: Machine, config: NetworkConfig, quant: QuantKind | None, demand: Demand
) -> dict[str, Any]:
    from apollo_cli.fit import Run, estimate_memory, precision_name

    tokens = demand.tokens_of(demand.clips)
    card = Run(config, "cuda", "bfloat16")
    here = Run(config, machine.device, machine.dtype)
    on_card = estimate_memory(card, card.settings(demand.clips, quant), tokens)
    at_home = estimate_memory(here, here.settings(demand.clips, quant), tokens)
    sizes = {str(size): int(size * 2**30 * CARD_SHARE) for size in CARDS_GB}
    return {
        "precision": precision_name(quant, card.dtype),
        "peak_bytes": on_card.peak,
        "memory": asdict(on_card),
        "here": {
            "precision": precision_name(quant, here.dtype),
            "peak_bytes": at_home.peak,
            "memory": asdict(at_home),
            "fit": _fit(here, machine.free_bytes, quant, demand),
        },
        "cards": {size: _fit(card, free, quant, demand) for size, free in sizes.items()},
    }


def _fit(
    run: Run, free_bytes: int | None, quant: QuantKind | None, demand: Demand
) -> dict[str, Any] | None:
    """What fits at one precision; None where the memory is not known."""
    from apollo_cli.fit import ladder

    if free_bytes is None:
        return None
    wanted = run.settings(demand.clips, quant)
    try:
        fitted = ladder(
            run,
            wanted,
            free_bytes,
            demand.tokens_of,
            kinds=(quant,),
            fewest_clips=demand.fewest,
        )
    except FitError:
        return {"clips": 0, "all": False, "given_up": [], "peak_bytes": None}
    return {
        "clips": fitted.settings.clips,
        "all": fitted.settings.clips == demand.clips,
        "given_up": list(fitted.given_up),
        "peak_bytes": fitted.estimate.peak,
    }


def _video(info: VideoInfo) -> dict[str, Any]:
    return {
        "path": str(info.path),
        "kind": info.kind,
        "duration_seconds": info.duration_seconds,
        "frames": info.frame_count,
    }


def _seen(info: VideoInfo, plan: ClipPlan) -> dict[str, Any]:
    return {
        "path": str(info.path),
        "clips": len(plan),
        "coverage": plan.coverage,
        "words": plan.describe(),
    }


def _length(info: VideoInfo) -> str:
    from apollo_cli.citations import clock

    if info.kind == "image":
        return "an image"
    seconds = info.duration_seconds
    length = f"{seconds:.1f} s" if seconds < 60 else clock(seconds)
    return f"{length}, {count(info.frame_count, 'picture')}"


def _rows(model: dict[str, Any]) -> Iterator[list[str]]:
    for row in model["precisions"]:
        here = row["here"]
        yield [
            model["name"],
            row["precision"],
            str(model["clips"]),
            format_bytes(row["peak_bytes"]),
            f"{_cell(here['fit'])}, {format_bytes(here['peak_bytes'])}",
            *(_cell(fit) for fit in row["cards"].values()),
        ]


def _cell(fit: dict[str, Any] | None) -> str:
    if fit is None:
        return "unknown"
    if fit["all"]:
        return "yes"
    return str(fit["clips"] or "no")


def _remarks(models: list[dict[str, Any]], machine: Machine) -> Iterator[str]:
    free = format_bytes(machine.free_bytes)
    yield f"here is {machine.name} with {free} free, in {machine.dtype}; cards run in bfloat16"
    seen: dict[str, list[str]] = {}
    for model in models:
        for video in model["videos"]:
            seen.setdefault(f"{Path(video['path']).name}: {video['words']}", []).append(
                model["name"]
            )
    for words, names in seen.items():
        yield f"{words} ({', '.join(names)})"
    answer = models[0]["tokens"]["answer"]
    for tokens in dict.fromkeys(model["tokens"]["question"] for model in models):
        names = [model["name"] for model in models if model["tokens"]["question"] == tokens]
        yield (
            f"assumed of {', '.join(names)}: a question of up to {tokens} tokens and an answer "
            f"of up to {answer}"
        )
    assumed = [model["name"] for model in models if model["assumed"]]
    if assumed:
        yield (
            f"not on this machine, so that some sizes are assumed: {', '.join(assumed)}; "
            "apollo models pull NAME makes the plan exact"
        )
    yield (
        f"assumed of a card: {CARD_SHARE:.0%} of its memory are free, and CUDA itself takes 0.6 "
        "GB; a number below it is how many clips fit"
    )
