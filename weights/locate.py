"""Which checkpoint a name means on this machine, and which one to take when none is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.model.config import NetworkConfig
from apollo_cli.weights.adapter import Adapter, check_base, resolve_chain
from apollo_cli.weights.checkpoint import read_checkpoint
from apollo_cli.weights.registry import ModelSource, known_models, resolve
from apollo_cli.weights.shapes import released_network
from apollo_cli.weights.store import find_local, find_manifest, require_local

AUTO = "auto"
TOY = "apollo-nano"
Fits = Callable[[NetworkConfig], bool]


@dataclass(frozen=True)
class LocatedModel:
    """A checkpoint on disk.

    Attributes:
        name: what to call it. folder: where it lies.
        revision: resolved commit, or None for a folder of the user.
        chosen: whether it was chosen for the user, who named none.
        chain: results of training that are put on it, the lowest first.
    """

    name: str
    folder: Path
    revision: str | None
    chosen: bool = False
    chain: tuple[Adapter, ...] = ()

    @property
    def adapter(self) -> dict[str, Any] | None:
        """What an answer tells of the last result of training on it; None without one."""
        return self.chain[-1].describe() if self.chain else None

    @property
    def is_toy(self) -> bool:
        """Whether it is the embedded toy."""
        return self.name == TOY


def locate_model(
    name: str | Path, fits: Fits | None = None, adapter: str | Path | None = None
) -> LocatedModel:
    """Find a model that can be loaded now; nothing is downloaded.

    Args:
        name: a known name, a folder, ``owner/repository[@revision]``, or ``auto``.
        fits: whether a network fits the device, for ``auto``; None takes any.
        adapter: result of a training run; ``auto`` is then the model that it was trained from.

    Raises:
        WeightsError: the name is unknown, the model has not been downloaded, or the adapter or
            what it stands on is missing, damaged, or was trained from another model.
    """
    if adapter is not None:
        chain = resolve_chain([adapter])
        located = _base_of(chain[-1]) if str(name) == AUTO else locate_model(name)
        check_base(chain, read_checkpoint(located.folder))
        return replace(located, chain=chain)
    chosen = str(name) == AUTO
    source = _best_local(fits) if chosen else resolve(name)
    manifest = find_manifest(source) if source.kind == "hub" else None
    revision = manifest.commit if manifest else None
    return LocatedModel(source.name, require_local(source), revision, chosen)


def _base_of(adapter: Adapter) -> LocatedModel:
    try:
        return locate_model(adapter.base_name)
    except WeightsError as error:
        raise WeightsError(
            f"adapter {adapter.folder} was trained from {adapter.base_name}: {error.received}",
            "that model is needed, under any name",
            f"say with --model where it is; {error.next_step}".rstrip("; "),
        ) from None


def _best_local(fits: Fits | None) -> ModelSource:
    """The largest downloaded model that fits; the embedded toy when there is none."""
    for entry in reversed(known_models().values()):
        source = resolve(entry.name)
        if (
            entry.repository is not None
            and find_local(source) is not None
            and (fits is None or fits(released_network(entry).config))
        ):
            return source
    return resolve(TOY)
