"""New recipes: flat, commented TOML files for a person to own and edit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from apollo_cli.atomic import write_whole
from apollo_cli.errors import DataError, WeightsError
from apollo_cli.finetune.data.formats import is_text
from apollo_cli.finetune.places import describe_place, spell, tidy
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.stages import (
    METHODS,
    RATE_KEYS,
    SCHEDULES,
    STAGES,
    Method,
    Part,
    StageName,
    learning_rates,
)
from apollo_cli.model.sizes import llm_sizes
from apollo_cli.weights.checkpoint import read_checkpoint
from apollo_cli.weights.network import build_network_config, released_network
from apollo_cli.weights.registry import resolve
from apollo_cli.weights.store import TOY, find_local

_COLUMN = 36


@dataclass(frozen=True)
class Plan:
    """What one of the recipes of a project is for.

    Attributes:
        file: its name. title: what it does. stage: its stage. train: parts that learn.
        output: folder of its result. after: folder of the result that it starts from.
        notes: lines about its data.
    """

    file: str
    title: str
    stage: StageName
    train: tuple[Part, ...]
    output: str
    after: str = ""
    notes: tuple[str, ...] = ()


SFT = Plan(
    "sft.toml",
    "Tune the language model on your own videos. This is the one to start with.",
    3,
    ("llm",),
    "out",
    notes=(
        "Without 10-14 % of text alone, a long training makes the language model forget how",
        "to talk: add a file of chats without pictures, and give each [[data]] a share.",
    ),
)
_NOTES: dict[StageName, tuple[str, ...]] = {
    1: ("Videos only: samples of other kinds are left out here.",),
    2: ("Videos only: the paper found that images harm the encoders here.",),
    3: (
        "The paper's best mixture: 10-14 % text, the rest images and slightly more video.",
        "Add a [[data]] for each file, and give each a share.",
    ),
    "custom": ("All kinds of samples.",),
}


def plans_of(schedule: str) -> tuple[Plan, ...]:
    """The recipes of a project: the one to start with, and the stages of a schedule in a row."""
    steps = SCHEDULES[schedule]
    plans = [SFT]
    for number, (stage, train) in enumerate(steps, start=1):
        plans.append(
            Plan(
                file=f"stage{number}.toml",
                title=f"Stage {number} of {len(steps)}: {STAGES[stage].summary}.",
                stage=stage,
                train=train,
                output=f"stage{number}",
                after=f"stage{number - 1}" if number > 1 else "",
                notes=_NOTES[stage],
            )
        )
    return tuple(plans)


def write_project(
    folder: Path | str,
    data: Sequence[Path | str],
    model: str,
    method: Method,
    schedule: str = "three",
) -> list[Path]:
    """Write the recipes of a project.

    Args:
        folder: where to; made if it is missing.
        data: files of samples. model: what is trained. method: how.
        schedule: a name in ``stages.SCHEDULES``.

    Returns:
        The files, the first one to start with.

    Raises:
        DataError: a file of data is missing, a recipe is there already, or the folder cannot be
            written.
        WeightsError: the model is not known.
    """
    folder = tidy(folder)
    if method not in METHODS:
        raise DataError(f"--method {method}", f"allowed are {', '.join(METHODS)}")
    sources = [tidy(path) for path in data]
    for source in sources:
        _check_data(source)
    values, name = _llm_values(model), _model_name(model)
    plans = plans_of(schedule)
    files = [folder / plan.file for plan in plans]
    taken = [path for path in files if path.exists()]
    if taken:
        raise DataError(
            f"{taken[0]} exists",
            "a folder without recipes is needed",
            "name another folder, or go on with the recipe that is there",
        )
    if folder.exists() and not folder.is_dir():
        raise DataError(
            f"{folder} {describe_place(folder)}", "a folder is needed", "name another one"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plan, path in zip(plans, files, strict=True):
            text = render(plan, [_near(source, folder) for source in sources], name, method, values)
            write_whole(path, text)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror or error})") from None
    return files


def _check_data(source: Path) -> None:
    if not source.is_file():
        raise DataError(f"--data {source} {describe_place(source)}", "a file of samples is needed")
    try:
        text = is_text(source)
    except OSError as error:
        raise DataError(f"--data {source} cannot be read ({error.strerror or error})") from None
    if not text:
        raise DataError(
            f"--data {source} is no text",
            "JSON lines, a JSON list or CSV, which name the videos",
            "docs/finetuning.md shows how such a file is written",
        )


def render(
    plan: Plan, data: Sequence[str], model: str, method: Method, llm_values: int | None
) -> str:
    """The text of one recipe.

    Args:
        plan: which one. data: files of samples, as they are to be written.
        model: name of the model. method: how it is trained.
        llm_values: size of its language model, for the learning rates; None leaves them out.
    """
    lines = [f"# {plan.title}", f"# Check it first: apollo finetune check {plan.file}", ""]
    comments = {f.name: f.metadata.get("comment", "") for f in fields(Recipe)}
    for key, value in _rows(plan, model, method, llm_values).items():
        entry = f"{key} = {value if key.endswith('learning_rate') else spell(value)}"
        gap = " " * max(2, _COLUMN - len(entry))
        lines.append(f"{entry}{gap}# {comments[key]}")
    lines += ["", "# What it learns from: our JSONL, LLaVA or LLaMA-Factory JSON, or CSV."]
    lines += [f"# {note}" for note in plan.notes]
    for path in data:
        lines += ["[[data]]", f"path = {spell(path)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _rows(plan: Plan, model: str, method: Method, llm_values: int | None) -> dict[str, Any]:
    """The keys of one recipe with their values, in the order of the fields of ``Recipe``."""
    toy, heavy = model == TOY, method == "full" and model != TOY
    low_rank: list[Part] = [p for p in ("llm", "encoders") if p in plan.train and method != "full"]
    rows: dict[str, Any] = {
        "model": model,
        "stage": plan.stage,
        "method": method,
        "train": plan.train,
        "output": plan.output,
        "optimizer": "adamw8bit" if heavy else "adamw",
        "epochs": 3.0 if plan.file == SFT.file else 1.0,
    }
    if plan.after:
        rows["adapters"] = (plan.after,)
    if llm_values is not None:
        rates = learning_rates(plan.stage, llm_values, low_rank)
        rows |= {RATE_KEYS[part]: f"{rates[part]:.1e}" for part in plan.train}
    if toy:
        rows |= {"lora_rank": 8, "lora_alpha": 16.0, "micro_batch_size": 8, "device": "cpu"}
        rows |= {"gradient_checkpointing": False, "dtype": "float32"}
    else:
        rows["max_tokens"] = 4096
    hidden = {"images_in_stage_2"}
    if plan.train != ("llm",):
        hidden.add("cache_features")
    if not low_rank:
        hidden |= {"lora_rank", "lora_alpha", "lora_dropout"}
    if "encoders" in low_rank:
        rows["lora_encoders"] = True
    else:
        hidden.add("lora_encoders")
    keys = {f.name: rows.get(f.name, f.default) for f in fields(Recipe) if f.metadata}
    return {k: v for k, v in keys.items() if k not in hidden and v not in (None, ())}


def _near(source: Path, folder: Path) -> str:
    """A path from the recipe's folder where that is short, so that both can be moved together."""
    relative = os.path.relpath(source, folder) if source.anchor == folder.anchor else str(source)
    return str(source) if relative.count("..") > 1 else Path(relative).as_posix()


def _model_name(model: str) -> str:
    source = resolve(model)
    return str(source.folder) if source.kind == "folder" else model


def _llm_values(model: str) -> int | None:
    """Number of values of the language model; None when it is neither here nor known."""
    source = resolve(model)
    local = find_local(source)
    if local is not None:
        return llm_sizes(build_network_config(read_checkpoint(local)).llm).values
    if source.entry is None:
        return None
    try:
        return llm_sizes(released_network(source.entry).config.llm).values
    except WeightsError:
        return None
