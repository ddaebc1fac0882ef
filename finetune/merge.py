"""A training result and its model as one plain checkpoint in the released layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from apollo_cli.atomic import workshop
from apollo_cli.errors import UsageError, WeightsError
from apollo_cli.finetune.places import tidy
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.weights.adapter import Adapter
from apollo_cli.weights.checkpoint import HEAD, LLM, Checkpoint, stored_kind
from apollo_cli.weights.load import parameters_on_meta
from apollo_cli.weights.overlay import Change, Key, changes_of
from apollo_cli.weights.repack import ShardWriter, copy_rest
from apollo_cli.weights.store import AUTO, locate_model

RECORD = "apollo_merge.json"


def merge_result(
    adapter: Path | str,
    output: Path | str,
    *,
    base: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a checkpoint that answers as the model with its adapter does.

    Tensor by tensor in float32, rounded once to the dtype of the model's file: the model is never
    in memory as a whole. What was trained on a model in fewer bits goes into the full one.

    Args:
        adapter: folder of the result; all that it stands on is merged too.
        output: a folder that does not exist yet.
        base: the model; None is the one that the result was trained from.
        on_progress: called with bytes read and bytes in all, of the parts that change.

    Returns:
        The new folder.

    Raises:
        UsageError: the output exists.
        WeightsError: result or model is missing, damaged, or they do not belong together.
    """
    target = tidy(output)
    if target.exists():
        raise UsageError(f"{target} exists", "a new folder is needed", "choose another with -o")
    located = locate_model(base or AUTO, adapters=[adapter])
    checkpoint = located.checkpoint
    stored = stored_kind(checkpoint)
    if stored is not None:
        raise WeightsError(
            f"{checkpoint.root} stores its language model in {stored}",
            "a merge goes into full weights, since those would be rounded again",
            "name the model that it was made from with --model",
        )
    with parameters_on_meta():
        network = ApolloModel(located.config)
    network.llm.tie_weights()
    changes: dict[Key, list[Change]] = {}
    for result in located.chain:
        for key, change in changes_of(result, network).items():
            changes.setdefault(key, []).append(change)
    try:
        with workshop(target) as unfinished:
            _write(checkpoint, changes, unfinished, on_progress)
            record = _record(located.name, located.revision, located.chain)
            (unfinished / RECORD).write_text(json.dumps(record, indent=1), "utf-8")
            unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{target} cannot be written ({getattr(error, 'strerror', None) or error})",
            next_step="make room or choose another place with -o",
        ) from None
    return target


def _write(
    checkpoint: Checkpoint,
    changes: dict[Key, list[Change]],
    target: Path,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    parts = sorted({part for part, _ in changes})
    copy_rest(checkpoint, target, parts)
    total = sum(info.size_bytes for part in parts for info in checkpoint.tensors[part].values())
    done = 0
    for part in parts:
        writer = ShardWriter(target / part)
        for key, tensor in _stored(checkpoint, part):
            done += tensor.nbytes
            writer.add({key: _changed(tensor, changes.get((part, key), []))})
            if on_progress is not None:
                on_progress(done, total)
        writer.finish()


def _changed(tensor: torch.Tensor, changes: list[Change]) -> torch.Tensor:
    changed = tensor.float() if changes else tensor
    for change in changes:
        changed = change.on(changed)
    return changed.to(tensor.dtype)


def _stored(checkpoint: Checkpoint, part: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a part in the order of its files; a tied head would only repeat itself."""
    tensors = dict(checkpoint.tensors[part])
    if part == LLM and checkpoint.tied_head:
        tensors.pop(HEAD, None)
    handles: dict[Path, Any] = {}
    for key, info in sorted(tensors.items(), key=lambda item: (str(item[1].file), item[1].start)):
        try:
            if info.file not in handles:
                handles[info.file] = safe_open(info.file, framework="pt")
            tensor = handles[info.file].get_tensor(info.key)
        except SafetensorError as error:
            raise WeightsError(f"{info.file} cannot be read ({error})") from None
        yield key, tensor.clone()


def _record(name: str, revision: str | None, chain: tuple[Adapter, ...]) -> dict[str, Any]:
    return {
        "base": {"name": name, "revision": revision},
        "adapters": [
            result.describe() | {"folder": str(result.folder), "digest": result.digest}
            for result in chain
        ],
    }
