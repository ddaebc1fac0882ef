"""``apollo plan``: what a question about a video takes, before anything is fetched or loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.commands.options import complete_file, complete_model, flags_of, read_options
from apollo_cli.commands.output import format_bytes, say_note, write_json, write_table
from apollo_cli.config import GenerationOptions, SamplingOptions
from apollo_cli.errors import FitError, WeightsError
from apollo_cli.text import count

if TYPE_CHECKING:
    from apollo_cli.memory_plan import Demand, Run
    from apollo_cli.planner import Planner
    from apollo_cli.video.info import VideoInfo
    from apollo_cli.weights.checkpoint import QuantKind

CARDS_GB = (8, 12, 16, 24)
# Cards are sold in GiB, and a driver and a desktop keep a part.
CARD_SHARE = 0.95


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
    from apollo_cli.video.guard import GuardedReader
    from apollo_cli.weights.registry import known_models

    sampling = read_options(SamplingOptions, flags)
    answer = GenerationOptions(max_new_tokens=max_new_tokens).max_new_tokens
    with GuardedReader() as reader:
        infos = [reader.probe(video) for video in videos]
    machine = _find_machine(dtype)
    found = []
    for name in models or known_models():
        try:
            found.append(_plan_model(name, infos, sampling, answer, machine))
        except WeightsError as error:
            if models:
                raise
            say_note(f"{name} is left out: {error.message}")
    if as_json:
        facts = [
            {
                "path": str(info.path),
                "kind": info.kind,
                "duration_seconds": info.duration_seconds,
                "frames": info.frame_count,
            }
            for info in infos
        ]
        write_json({"videos": facts, "machine": machine, "models": found})
        return
    for text in _notes(infos, found, machine):
        say_note(text)
    rows = [
        [
            model["name"],
            row["precision"],
            str(model["clips"]),
            format_bytes(row["peak_bytes"]),
            f"{_cell(row['here']['fit'])}, {format_bytes(row['here']['peak_bytes'])}",
            *map(_cell, row["cards"].values()),
        ]
        for model in found
        for row in model["precisions"]
    ]
    cards = [f"{size} GB" for size in CARDS_GB]
    write_table(["MODEL", "BITS", "CLIPS", "PEAK", "HERE", *cards], rows)


def _find_machine(dtype: str | None) -> dict[str, Any]:
    """The device that a run would use here, found without loading torch."""
    from apollo_cli.hardware import driver_gpus, dtype_name, host_memory_bytes

    gpus, wanted = driver_gpus(), dtype_name(dtype) if dtype else None
    free = gpus[0].free_bytes if gpus else host_memory_bytes()[1]
    return {
        "device": "cuda" if gpus else "cpu",
        "name": gpus[0].name if gpus else "this CPU",
        "free_bytes": free,
        "dtype": wanted or ("bfloat16" if gpus else "float32"),
    }


def _find_planner(
    name: str,
) -> tuple[str, Planner, tuple[QuantKind | None, ...], bool, tuple[str, ...]]:
    """A model's name, planner, precisions, whether it is here, and what is assumed of its shape.

    Raises:
        WeightsError: the model is unknown, broken, or of a shape that is not known.
    """
    from apollo_cli.memory_plan import precisions
    from apollo_cli.planner import assumed_planner, load_planner
    from apollo_cli.weights.checkpoint import read_checkpoint, stored_kind
    from apollo_cli.weights.registry import resolve
    from apollo_cli.weights.store import find_local

    source = resolve(name)
    if folder := find_local(source):
        checkpoint = read_checkpoint(folder)
        planner, stored = load_planner(checkpoint), stored_kind(checkpoint)
        # A checkpoint that is stored quantised has its own precision only.
        kinds = precisions() if stored is None else (stored,)
        return source.name, planner, kinds, True, planner.config.notes
    if source.entry is None:
        raise WeightsError(
            f"the shape of {source.name} is not known",
            next_step=f"fetch it first: apollo models pull {source.name}",
        )
    released = assumed_planner(source.entry)
    return source.name, released.planner, precisions(), False, released.assumed


def _plan_model(
    name: str,
    infos: list[VideoInfo],
    sampling: SamplingOptions,
    answer: int,
    machine: dict[str, Any],
) -> dict[str, Any]:
    """Clips, tokens and memory of one model, at each of its precisions."""
    from apollo_cli.memory_plan import Run, measure_demand

    name, planner, kinds, is_local, assumed = _find_planner(name)
    question = planner.question_tokens
    planned = planner.plan(infos, sampling, answer, spare_tokens=question)
    demand = measure_demand(planner, planned, question_tokens=question, answer_tokens=answer)
    card = Run(planner.config, "cuda", "bfloat16")
    here = Run(planner.config, machine["device"], machine["dtype"])
    sizes = {str(size): int(size * 2**30 * CARD_SHARE) for size in CARDS_GB}
    return {
        "name": name,
        "local": is_local,
        "assumed": list(assumed),
        "clips": demand.clips,
        "tokens": {
            "visual": demand.visual,
            "text": demand.text,
            "question": question,
            "answer": answer,
            "context": planner.config.context,
            "exact": is_local,
        },
        "videos": [
            {
                "path": str(file.info.path),
                "clips": len(file.plan),
                "coverage": file.plan.coverage,
                "words": file.plan.describe(),
            }
            for file in planned
        ],
        "precisions": [
            {
                **_peak(card, kind, demand),
                "here": {
                    **_peak(here, kind, demand),
                    "fit": _fit(here, machine["free_bytes"], kind, demand),
                },
                "cards": {size: _fit(card, free, kind, demand) for size, free in sizes.items()},
            }
            for kind in kinds
        ],
    }


def _peak(run: Run, kind: QuantKind | None, demand: Demand) -> dict[str, Any]:
    from apollo_cli.memory_plan import estimate_memory, precision_name

    tokens = demand.tokens_of(demand.clips)
    estimate = estimate_memory(run, run.settings(demand.clips, kind), tokens)
    return {
        "precision": precision_name(kind, run.dtype),
        "peak_bytes": estimate.peak,
        "memory": asdict(estimate),
    }


def _fit(
    run: Run, free_bytes: int | None, kind: QuantKind | None, demand: Demand
) -> dict[str, Any] | None:
    """What fits at one precision; None where the memory is not known."""
    from apollo_cli.memory_plan import fit_settings

    if free_bytes is None:
        return None
    wanted, fewest = run.settings(demand.clips, kind), demand.videos
    try:
        fitted = fit_settings(
            run, wanted, free_bytes, demand.tokens_of, kinds=(kind,), fewest_clips=fewest
        )
    except FitError:
        return {"clips": 0, "all": False, "given_up": [], "peak_bytes": None}
    return {
        "clips": fitted.settings.clips,
        "all": fitted.settings.clips == demand.clips,
        "given_up": list(fitted.given_up),
        "peak_bytes": fitted.estimate.peak,
    }


def _cell(fit: dict[str, Any] | None) -> str:
    if fit is None:
        return "unknown"
    return "yes" if fit["all"] else str(fit["clips"] or "no")


def _notes(
    infos: list[VideoInfo], models: list[dict[str, Any]], machine: dict[str, Any]
) -> Iterator[str]:
    """The videos, what is seen of each, and all that the table takes for granted."""
    from apollo_cli.answer import clock

    for info in infos:
        seconds = info.duration_seconds
        length = f"{seconds:.1f} s" if seconds < 60 else clock(seconds)
        about = f"{length}, {count(info.frame_count, 'picture')}"
        yield f"{info.path.name}: {'an image' if info.kind == 'image' else about}"
    free = format_bytes(machine["free_bytes"])
    where = f"{machine['name']} with {free} free, in {machine['dtype']}"
    yield f"here is {where}; cards run in bfloat16"
    # What holds for several models is said once, with their names in the middle.
    names: dict[tuple[str, str], list[str]] = {}
    for model in models:
        tokens, videos = model["tokens"], model["videos"]
        said = [(f"{Path(video['path']).name}: {video['words']} (", ")") for video in videos]
        room = f"a question of up to {tokens['question']} tokens and an answer of up to"
        said.append(("assumed of ", f": {room} {tokens['answer']}"))
        if model["assumed"]:
            pull = "; apollo models pull NAME makes the plan exact"
            said.append(("not on this machine, so that some sizes are assumed: ", pull))
        for words in said:
            names.setdefault(words, []).append(model["name"])
    for (before, after), found in names.items():
        yield f"{before}{', '.join(found)}{after}"
    yield (
        f"assumed of a card: {CARD_SHARE:.0%} of its memory are free, and CUDA itself takes 0.6 "
        "GB; a number below it is how many clips fit"
    )
