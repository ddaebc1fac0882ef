"""What an earlier run left in a folder: a result that is done, a run to go on with, or neither."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apollo_cli.errors import DataError, WeightsError
from apollo_cli.finetune.adapters import UNFINISHED
from apollo_cli.finetune.training.checkpoints import Saved, list_changes, remove_checkpoints
from apollo_cli.finetune.training.quarantine import QUARANTINE_NAME
from apollo_cli.finetune.training.records import LOG_NAME
from apollo_cli.weights.adapter import read_adapter
from apollo_cli.weights.files import read_json

RUN_NAME, CHECKPOINTS_NAME, FEATURES_NAME = "run.json", "checkpoints", "features"


def is_done(
    output: Path, identity: dict[str, Any], saved: Saved | None, say: Callable[[str], None]
) -> bool:
    """Whether the run is done and its result whole, so that nothing is left to do.

    Args:
        identity: of the run that is to be. saved: the newest checkpoint.
        say: is told why a result is written again.

    Raises:
        DataError: it holds a run of another recipe or other data, with all that has changed; or
            its result is damaged, and no checkpoint is left to write it from.
    """
    done = _read_done(output)
    known = saved.facts.get("identity") if saved else done
    if known is None:
        return False
    changes = list_changes(known, identity)
    if changes:
        raise DataError(
            f"{output} holds a run that was made otherwise",
            "a run is gone on with as it was begun",
            "change it back, choose another output, or start anew with --fresh",
            faults=changes,
        )
    if done is None or list_changes(done, identity):
        return False
    return _is_whole(output, saved, say)


def _is_whole(output: Path, saved: Saved | None, say: Callable[[str], None]) -> bool:
    """Whether a result can be used; without a checkpoint to write it from again, it must be.

    Raises:
        DataError: it cannot, and is lost.
    """
    try:
        read_adapter(output)
    except WeightsError as error:
        if saved is None:
            raise DataError(
                f"the result of this run is not whole: {error.received}",
                "its last checkpoint is gone too",
                "put the file back, or train it again with --fresh",
            ) from None
        say(f"the result of this run is not whole ({error.received}): it is written again")
        return False
    return True


def _read_done(output: Path) -> dict[str, Any] | None:
    """What the finished run in a folder is known by; None without one."""
    if not (output / RUN_NAME).is_file():
        return None
    found = read_json(output / RUN_NAME).get("run")
    return found if isinstance(found, dict) else None


def clear_torn(output: Path) -> None:
    """Delete what a killed run was writing; whoever calls this holds the folder's lock."""
    torn = [output / UNFINISHED, *output.glob(f"{CHECKPOINTS_NAME}/.step-*.part")]
    # What is written whole has the number of its process in its name until it is.
    for place in (output, output / FEATURES_NAME):
        torn += place.glob(".*.*.new")
    for path in torn:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def forget(output: Path) -> None:
    """Delete what a run is gone on from. Its result stays until the new one is there."""
    remove_checkpoints(output / CHECKPOINTS_NAME)
    for name in (RUN_NAME, QUARANTINE_NAME, LOG_NAME):
        (output / name).unlink(missing_ok=True)
