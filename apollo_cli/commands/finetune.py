"""``apollo finetune``: recipes written, checked and run, and results merged."""

from __future__ import annotations

import importlib.util
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from apollo_cli.commands.options import FILE, complete_model
from apollo_cli.commands.output import progress, say, say_note, write_json
from apollo_cli.errors import DataError
from apollo_cli.finetune.recipe import MOST_STEPS
from apollo_cli.finetune.stages import METHODS, SCHEDULES


@click.group()
def finetune() -> None:
    """Train a model on your own videos."""


@finetune.command("new")
@click.argument("folder", type=FILE)
@click.option(
    "--data", required=True, multiple=True, type=FILE, help="File of samples; may be repeated."
)
@click.option(
    "--model",
    default="apollo-3b",
    shell_complete=complete_model,
    help="What training starts from.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="qlora",
    help="All weights, small matrices beside them, or those beside weights in 4 bit.",
)
@click.option(
    "--schedule",
    type=click.Choice(list(SCHEDULES)),
    default="three",
    help="Stages to write: the paper's best three, or one of its comparisons.",
)
def new_command(folder: Path, data: tuple[Path, ...], **flags: Any) -> None:
    """Write commented recipes to own and edit: sft.toml, and one for each stage."""
    from apollo_cli.finetune.new import write_project

    files = write_project(folder, data, **flags)
    for path in files:
        click.echo(path)
    say(f"note: next: apollo finetune check {shlex.quote(str(folder / files[0].name))}")


@finetune.command("check")
@click.argument("recipe", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Write JSON, with every fault.")
def check_command(recipe: Path, as_json: bool) -> None:
    """Name every fault of a recipe and its data, and tell what a run takes and learns.

    Nothing is decoded, loaded or changed. The exit code is 7 if there are faults.
    """
    from apollo_cli.finetune.check import check_file

    with progress() as report:
        found = check_file(recipe, on_progress=report)
    if as_json:
        write_json(found.to_dict())
    else:
        click.echo(found.describe())
    error = found.error()
    if error is not None:
        raise error


@finetune.command("run")
@click.argument("recipes", nargs=-1, required=True, type=FILE, metavar="RECIPE...")
@click.option("--fresh", is_flag=True, help="Start over instead of resuming a stopped run.")
@click.option(
    "--steps",
    type=click.IntRange(1, MOST_STEPS),
    show_default="the recipe's",
    help="Length of a run.",
)
def run_command(recipes: tuple[Path, ...], fresh: bool, steps: int | None) -> None:
    """Train as a recipe says; running the same command again resumes a stopped run.

    Several recipes are run one after the other, such as the stages of a project. The folder of each
    result goes to stdout, for ask --adapter; everything else to stderr. On several GPUs or
    machines: accelerate launch -m apollo_cli finetune run RECIPE.
    """
    from apollo_cli.finetune.data.dataset import load_dataset
    from apollo_cli.finetune.recipe import load_recipe
    from apollo_cli.weights.store import locate_model

    # What is wrong with a later one is told before the first begins; it may stand on the results
    # of earlier ones.
    writers: dict[Path, Path] = {}
    for path in recipes:
        loaded = load_recipe(path, coming=writers)
        if loaded.output in writers:
            words = f"{path} writes to {loaded.output}, as {writers[loaded.output]} does"
            raise DataError(words, next_step="give each recipe an output of its own")
        writers[loaded.output] = path
        if len(recipes) > 1:
            load_dataset(loaded).check_runnable()
            locate_model(loaded.model)
    # Looked up before anything heavy is imported, so that a lack is told at once.
    missing = [name for name in ("accelerate", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        next_step = 'pip install "apollo-video-cli[finetune]"'
        raise DataError(f"{' and '.join(missing)} not installed", next_step=next_step)
    from apollo_cli.finetune.training.loop import run_recipe

    for path in recipes:
        loaded = load_recipe(path)
        if len(recipes) > 1:
            say_note(f"{path}: stage {loaded.stage}")
        loaded = loaded if steps is None else replace(loaded, steps=steps)
        with progress() as report:
            folder = run_recipe(loaded, fresh=fresh, say=say, on_progress=report)
        # A launcher numbers the processes that it starts: the first one answers for all.
        if os.environ.get("RANK", "0") == "0":
            click.echo(folder)


@finetune.command("merge")
@click.argument("adapter", type=FILE)
@click.option("-o", "--output", type=FILE, required=True, help="Folder to make.")
@click.option(
    "--model",
    shell_complete=complete_model,
    show_default="the one that the result was trained from",
    help="Model to merge the result with.",
)
def merge_command(adapter: Path, output: Path, model: str | None) -> None:
    """Make one plain checkpoint of a result and its model, in the released layout.

    What the result stands on is merged too. The checkpoint is used with --model FOLDER.
    """
    from apollo_cli.finetune.merge import merge_result

    with progress() as report:
        target = merge_result(
            adapter,
            output,
            base=model,
            on_progress=lambda done, total: report("merge", done, total),
        )
    click.echo(target)
