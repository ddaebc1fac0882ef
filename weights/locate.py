"""Find the checkpoint that a name stands for on this machine; pick one when no name is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.model.config import NetworkConfig
from apollo_cli.weights.adapter import Adapter, base_identity, check_base, resolve_chain
from apollo_cli.weights.checkpoint import Checkpoint, read_checkpoint
from apollo_cli.weights.network import build_network_config, released_network
from apollo_cli.weights.registry import known_models, resolve
from apollo_cli.weights.store import find_local, find_manifest, require_local

AUTO = "auto"
TOY = "apollo-nano"
Fits = Callable[[NetworkConfig], bool]


@dataclass(frozen=True)
class LocatedModel:
    """A checkpoint on disk, with its configs and tensor headers read; no weight has been read.

    Attributes:
        name: what to call it. checkpoint: what its folder holds.
        revision: resolved commit, or None for a folder of the user.
        chosen: whether the user named no model, so that one was chosen.
        chain: adapters to apply, the lowest first.
    """

    name: str
    checkpoint: Checkpoint
    revision: str | None
    chosen: bool = False
    chain: tuple[Adapter, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return self.checkpoint.root

    @cached_property
    def config(self) -> NetworkConfig:
        """Shape of the network.

        Raises:
            WeightsError: values are missing, wrong or unsupported; all of them are listed.
        """
        return build_network_config(self.checkpoint)

    @cached_property
    def identity(self) -> dict[str, str]:
        """Digests of the weights by part, as adapters store them."""
        return base_identity(self.checkpoint)

    @property
    def adapter(self) -> dict[str, Any] | None:
        """What an answer says of the last adapter; None without one."""
        return self.chain[-1].describe() if self.chain else None

    @property
    def is_toy(self) -> bool:
        """Whether it is the embedded toy."""
        return self.name == TOY


def locate_model(
    name: str | Path, fits: Fits | None = None, adapters: Sequence[str | Path] = ()
) -> LocatedModel:
    """Find a model that can be loaded now, and read its headers; nothing is downloaded.

    Args:
        name: a known name, a folder, ``owner/repository[@revision]``, or ``auto``.
        fits: whether a network fits the device, for ``auto``; None takes any.
        adapters: folders of training results; ``auto`` then stands for the model that the last
            one was trained from.

    Raises:
        WeightsError: the name is unknown, the model has not been downloaded or is damaged, or an
            adapter is missing, damaged, or was trained from another model.
    """
    if adapters:
        chain = resolve_chain(adapters)
        located = _base_of(chain[-1]) if str(name) == AUTO else locate_model(name)
        check_base(chain, located.identity, located.folder)
        return replace(located, chain=chain)
    chosen = str(name) == AUTO
    source = resolve(_best_local(fits) if chosen else name)
    manifest = find_manifest(source) if source.kind == "hub" else None
    folder = manifest.folder if manifest else require_local(source)
    revision = manifest.commit if manifest else None
    return LocatedModel(source.name, read_checkpoint(folder), revision, chosen)


def _base_of(adapter: Adapter) -> LocatedModel:
    try:
        return locate_model(adapter.base_name)
    except WeightsError as error:
        raise WeightsError(
            f"adapter {adapter.folder} was trained from {adapter.base_name}: {error.received}",
            "that model is needed, under any name",
            f"say with --model where it is; {error.next_step}".rstrip("; "),
        ) from None


def _best_local(fits: Fits | None) -> str:
    """The name of the largest downloaded model that fits; the embedded toy when there is none."""
    for entry in reversed(known_models().values()):
        if (
            entry.repository is not None
            and find_local(resolve(entry.name)) is not None
            and (fits is None or fits(released_network(entry).config))
        ):
            return entry.name
    return TOY
