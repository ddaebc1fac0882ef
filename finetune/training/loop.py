"""A training run from its recipe to its result, gone on with after any stop."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from apollo_cli.atomic import write_whole
from apollo_cli.errors import DataError
from apollo_cli.finetune.adapters import find_base, save_result
from apollo_cli.finetune.data.dataset import load_dataset
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.training.checkpoints import (
    CHECKPOINTS_NAME,
    RUN_NAME,
    Saved,
    find_newest,
    forget,
    is_done,
)
from apollo_cli.finetune.training.examples import ExampleBuilder
from apollo_cli.finetune.training.feed import QUARANTINE_NAME, Feed, Quarantine, SlotOrder
from apollo_cli.finetune.training.preparing import (
    Prepared,
    build_builder,
    claim,
    describe_packages,
    identify_run,
    prepare,
    start_team,
    survey,
    tell_faults,
    watch_ahead,
)
from apollo_cli.finetune.training.records import (
    CURVE_NAME,
    LOG_NAME,
    RunLog,
    draw_loss,
    read_log,
    spell_seconds,
)
from apollo_cli.finetune.training.steps import SAVE_SECONDS, Loop
from apollo_cli.finetune.training.stopping import Interrupts, together
from apollo_cli.finetune.training.trainee import Optimiser
from apollo_cli.finetune.training.validation import Score, validate
from apollo_cli.text import count
from apollo_cli.watcher import Progress, no_progress

if TYPE_CHECKING:
    from accelerate import Accelerator

_BATCHES_AHEAD = 3

Say = Callable[[str], None]


def run_recipe(
    recipe: Recipe,
    *,
    fresh: bool = False,
    say: Say,
    on_progress: Progress = no_progress,
    save_seconds: float = SAVE_SECONDS,
) -> Path:
    """Train as a recipe says, or go on with a run that was stopped.

    Args:
        recipe: of the run. fresh: forget an earlier run in the same output.
        say: tells the user, a sentence or a line of progress at a time.
        on_progress: called with ``check``, ``load``, ``watch`` or ``validate``, amount done, and
            amount in all.
        save_seconds: a checkpoint is written when the last one is older than that, too.

    Returns:
        The folder of the result, for ``--adapter``.

    Raises:
        KeyboardInterrupt: the user stopped it; the next run goes on from there.
        DataError: the data, the recipe or the training has a fault, or a package is missing.
        WeightsError, DeviceError, FitError: as when a model is loaded.
    """
    team, device = start_team(recipe)
    tell: Say = say if team.is_main_process else _say_nothing
    on_progress = on_progress if team.is_main_process else no_progress
    data = load_dataset(recipe)
    if any(fault.cost == "run" for fault in data.faults):
        tell_faults(data.faults, tell)
    data.check_runnable()
    with claim(recipe.output, team):
        with together(team):
            if fresh and team.is_main_process:
                forget(recipe.output)
        model = find_base(recipe, device)
        found = survey(recipe, data, model, team, on_progress)
        identity = identify_run(recipe, found.data, model.located)
        saved = find_newest(recipe.output / CHECKPOINTS_NAME, tell)
        if is_done(recipe.output, identity, saved, tell):
            tell(f"this run is done: {recipe.output} holds its result; --fresh trains it again")
            return recipe.output
        if saved is not None and saved.facts.get("stamp") != found.stamp:
            written = f"videos or images were written anew since step {saved.step}"
            tell(f"{written}; they are learned from as they are now")
        quarantine = Quarantine(recipe.output / QUARANTINE_NAME, say, prune=team.is_main_process)
        prepared = prepare(recipe, found, team, quarantine, say=tell, on_progress=on_progress)
        _run(
            _as_begun(prepared, saved),
            team,
            quarantine,
            identity=identity,
            stamp=found.stamp,
            saved=saved,
            say=tell,
            on_progress=on_progress,
            save_seconds=save_seconds,
        )
    if team.num_processes > 1:
        team.end_training()
    return recipe.output


def _as_begun(prepared: Prepared, saved: Saved | None) -> Prepared:
    """A run with as many steps as it began with, however many samples can be read by now."""
    steps = saved.facts.get("steps") if saved else None
    return prepared if steps is None else replace(prepared, steps=int(steps))


def _run(
    prepared: Prepared,
    team: Accelerator,
    quarantine: Quarantine,
    *,
    identity: dict[str, Any],
    stamp: str,
    saved: Saved | None,
    say: Say,
    on_progress: Progress,
    save_seconds: float,
) -> None:
    recipe, steps = prepared.recipe, prepared.steps
    started = time.monotonic()
    last = saved.step if saved else 0
    if saved is not None:
        say(f"going on behind step {last} of {steps}")
    past = [row for row in read_log(recipe.output / LOG_NAME) if row["step"] <= last]
    team.wait_for_everyone()
    with ExitStack() as stack:
        builder = stack.enter_context(build_builder(prepared))
        watch_ahead(prepared, builder, team, quarantine, on_progress)
        # Behind the watching, so that its states and the encoders are not held together.
        optimiser = Optimiser(prepared.trained, recipe, steps)
        _restore(optimiser, saved)
        log = None
        with together(team):
            if team.is_main_process:
                log = RunLog(recipe.output, last, tensorboard=recipe.tensorboard)
                stack.callback(log.close)
        grouped = prepared.length_of if recipe.length_grouped else None
        order = SlotOrder(recipe.batch_size, steps, recipe.seed, grouped)
        feed = Feed(
            prepared.mixture,
            builder,
            _slots(order, team, last),
            quarantine,
            readers=recipe.readers,
            ahead=_BATCHES_AHEAD * -(-recipe.batch_size // team.num_processes),
            length_of=prepared.length_of,
            say=say,
        )
        loop = Loop(
            prepared,
            team,
            stack.enter_context(feed),
            order,
            optimiser,
            interrupts=stack.enter_context(Interrupts(say, has_launcher=team.num_processes > 1)),
            known_by={"identity": identity, "stamp": stamp, "steps": steps},
            log=log,
            say=say,
            last=last,
            past=past,
            save_seconds=save_seconds,
        )
        examiner = _Examiner(prepared, builder, team, quarantine, log, say, on_progress)
        loop.run(examiner.look)
        with together(team):
            if team.is_main_process:
                _finish(prepared, identity, examiner.score, time.monotonic() - started, say)


@dataclass
class _Examiner:
    """Measures the held-out samples, which the processes share; the last score is kept."""

    prepared: Prepared
    builder: ExampleBuilder
    team: Accelerator
    quarantine: Quarantine
    log: RunLog | None
    say: Say
    on_progress: Progress
    score: Score = field(default_factory=Score)

    def look(self, step: int) -> None:
        """Measure behind a step."""
        mine = self.prepared.held_out[self.team.process_index :: self.team.num_processes]
        good = [sample for sample in mine if sample not in self.quarantine]
        with together(self.team):
            self.score = Score(broken=len(mine) - len(good)) + validate(
                self.prepared.trainee,
                self.builder,
                good,
                lambda done, total: self.on_progress("validate", done, total),
                lambda sample, error: self.quarantine.exclude(sample, error.message, is_said=True),
            )
        if self.team.num_processes > 1:
            from accelerate.utils import gather_object

            scores = [Score(*numbers) for numbers in gather_object([astuple(self.score)])]
            self.score = sum(scores, Score())
        if self.log is not None and self.score.answered:
            self.log.add_validation(step, _spell_score(self.score))
            self.say(f"step {step}: {_describe_score(self.score)}")


def _slots(order: SlotOrder, team: Accelerator, first: int) -> Iterator[int]:
    """The slots of this process in all steps that are left."""
    for step in range(first, order.steps):
        yield from order.slots(step, team.process_index, team.num_processes)


def _restore(optimiser: Optimiser, saved: Saved | None) -> None:
    if saved is None:
        return
    found = saved.tensors("trained")
    try:
        with torch.no_grad():
            for name, parameter in optimiser.parameters.items():
                parameter.copy_(found[name])
        optimiser.restore(saved.tensors("optimizer"), saved.facts)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(
            f"{saved.folder / 'state.json'} does not fit this run ({error!r})",
            next_step=f"delete {saved.folder}, or train again with --fresh",
        ) from error


def _finish(
    prepared: Prepared, identity: dict[str, Any], score: Score, seconds: float, say: Say
) -> None:
    """Save the result, draw the loss, and say what can be done now."""
    recipe, output = prepared.recipe, prepared.recipe.output
    losses = [row["loss"] for row in read_log(output / LOG_NAME) if "loss" in row]
    facts = {
        "steps": prepared.steps,
        "loss": losses[-1] if losses else None,
        "validation": _spell_score(score),
        "packages": describe_packages(),
        "run": identity,
    }
    save_result(prepared.base, prepared.trained, recipe, output, facts)
    draw_loss(output / LOG_NAME, output / CURVE_NAME)
    _write_json(output / RUN_NAME, facts)
    told = f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last" if losses else ""
    place = shlex.quote(str(_shorten(output)))
    model = shlex.quote(recipe.model)
    say(f"done: {count(prepared.steps, 'step')}, {spell_seconds(seconds)} in this run; {told}")
    if score.answered:
        say(_describe_score(score))
    say(f"the result is in {place}, the loss as a picture in {place}/{CURVE_NAME}")
    say(f'ask it:    apollo ask VIDEO "QUESTION" --model {model} --adapter {place}')
    say(f"merge it:  apollo finetune merge {place} -o FOLDER")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(values, indent=1))
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error})",
            next_step="make room, then run the same command again",
        ) from error


def _spell_score(score: Score) -> dict[str, float]:
    values = {"loss": score.loss, "accuracy": score.accuracy, **asdict(score)}
    kept = ("loss", "accuracy", "answered", "judged", "broken")
    return {key: values[key] for key in kept if values[key] is not None}


def _describe_score(score: Score) -> str:
    told = f"held out: {count(score.answered, 'sample')}, loss {score.loss:.3f}"
    if score.accuracy is not None:
        told += f", {score.right} of {score.judged} answers right ({score.accuracy:.0%})"
    return told + (f", {score.broken} not readable" if score.broken else "")


def _shorten(path: Path) -> Path:
    """A path as the user would type it here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _say_nothing(_: str) -> None:
    """The other processes of a run leave the talking to the first."""
