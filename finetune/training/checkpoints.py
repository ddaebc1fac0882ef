"""Checkpoints of a training run: never half written, and the newest sound one is always found.

One is a folder ``step-000100`` of safetensors files and a ``state.json`` with the digest of each.
It is written under another name and renamed when all of it has reached the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from apollo_cli.errors import ApolloError, DataError, WeightsError
from apollo_cli.finetune.adapters import UNFINISHED
from apollo_cli.finetune.training.feed import QUARANTINE_NAME
from apollo_cli.finetune.training.records import LOG_NAME
from apollo_cli.values import Values, any_text, number, one_of, table, table_of, whole
from apollo_cli.weights.adapter import read_adapter
from apollo_cli.weights.files import read_json

FORMAT = 1
_MOST = sys.float_info.max
_STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})", re.ASCII)


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk whose files are sound.

    Attributes:
        step: optimiser steps that were done. folder: where it lies.
        facts: what was saved beside the tensors.
    """

    step: int
    folder: Path
    facts: dict[str, Any]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """One of its groups of tensors, on the CPU."""
        return load_file(self.folder / f"{name}.safetensors")


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    facts: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint, then delete the oldest ones.

    Args:
        root: folder of all checkpoints.
        step: optimiser steps that were done.
        tensors: groups of tensors, by name; each becomes a file.
        facts: plain data, as JSON holds it.
        keep: how many stay.

    Returns:
        Its folder.

    Raises:
        DataError: it cannot be written. The earlier ones are untouched, and nothing half is left.
    """
    target = root / f"step-{step:06d}"
    part = root / f".{target.name}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if part.exists():
            shutil.rmtree(part)
        part.mkdir()
        digests = {name: _write_tensors(part, name, group) for name, group in tensors.items()}
        state = {"format": FORMAT, "step": step, "files": digests, "facts": dict(facts)}
        (part / _STATE).write_text(json.dumps(state))
        _sync(part / _STATE)
        _sync(part)
        if target.exists():
            # Only a damaged one can be here: a sound one would have been gone on from.
            shutil.rmtree(target)
        part.replace(target)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        last = next((folder for _, folder in _list(root)), None)
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"the checkpoint of step {step} cannot be written to {root} ({reason})",
            f"the last good one is {last.name}" if last else "there is no earlier one",
            "make room, then run the same command again" + (" to go on from there" if last else ""),
        ) from error
    _prune(root, step, keep)
    return target


def find_newest(root: Path, say: Callable[[str], None]) -> Saved | None:
    """The newest checkpoint that is whole; damaged ones are passed over with a sentence."""
    for step, folder in _list(root):
        try:
            return _open(step, folder)
        except (ApolloError, OSError, SafetensorError) as error:
            say(f"checkpoint {folder.name} is damaged and not used ({error})")
    return None


def remove_checkpoints(root: Path) -> None:
    """Delete all checkpoints, torn ones too.

    Raises:
        DataError: something there cannot be deleted.
    """
    torn = root.glob(".step-*.part") if root.is_dir() else ()
    try:
        for folder in [*(folder for _, folder in _list(root)), *torn]:
            shutil.rmtree(folder)
    except OSError as error:
        raise DataError(
            f"the checkpoints in {root} cannot be deleted ({error.strerror or error})",
            next_step="delete that folder by hand",
        ) from error


def list_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two runs' facts, one phrase each, such as ``seed was 0 and is 1``.

    Both are compared as JSON holds them. Values that are digests are not spelled out.
    """
    now = json.loads(json.dumps(dict(now)))
    changes = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if key not in before or key not in now:
            changes.append(f"{key} is {'new' if key in now else 'gone'}")
        elif _is_digest(old) or _is_digest(new):
            changes.append(f"{key} has changed")
        else:
            changes.append(f"{key} was {_spell(old)} and is {_spell(new)}")
    return changes


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write one group; its digest."""
    path = folder / f"{name}.safetensors"
    seen: set[int] = set()
    ready = {}
    for key, tensor in tensors.items():
        # The format has no shared memory: tables of 8-bit optimisers are one tensor for all.
        shared = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        ready[key] = tensor.detach().clone() if shared else tensor.detach().contiguous()
    save_file(ready, path)
    _sync(path)
    return _digest(path)


def _open(step: int, folder: Path) -> Saved:
    faults: list[str] = []
    state = Values(read_json(folder / _STATE, label=_STATE), _STATE, faults)
    state.get("format", one_of(FORMAT))
    state.get("step", one_of(step))
    files = state.get("files", table_of(any_text))
    state.get("facts", table)
    facts = state.inside("facts")
    facts.get("identity", table, None)
    facts.get("steps", whole(step), None)
    facts.get("numbers", table_of(number(-_MOST, _MOST)), None)
    facts.get("schedule", table, None)
    if faults:
        raise DataError("; ".join(faults))
    for name, digest in files.items():
        if not re.fullmatch(r"[a-z_]+", name) or _digest(folder / f"{name}.safetensors") != digest:
            raise DataError(f"{name}.safetensors is not as it was written")
    return Saved(step, folder, dict(facts.values))


def _list(root: Path) -> Iterator[tuple[int, Path]]:
    """All finished checkpoints, the newest first, without a look inside."""
    folders = root.iterdir() if root.is_dir() else ()
    found = [(match, path) for path in folders if (match := _NAME.fullmatch(path.name))]
    yield from sorted(((int(m[1]), path) for m, path in found if path.is_dir()), reverse=True)


def _prune(root: Path, step: int, keep: int) -> None:
    """Keep the newest ones up to a step. Those of later steps were passed over: they are damaged.

    A checkpoint that cannot be deleted is no reason to end a run.
    """
    good = [folder for number, folder in _list(root) if number <= step][:keep]
    for folder in [*(folder for _, folder in _list(root)), *root.glob(".step-*.part")]:
        if folder not in good:
            shutil.rmtree(folder, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40,}", value) is not None


def _spell(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)[:80]


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
