"""One model: found once, then loaded; everything that looks at it takes it from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from apollo_cli.hardware import HardwareChoice, choose_device, free_bytes
from apollo_cli.memory_cache import fingerprint
from apollo_cli.memory_plan import room_for
from apollo_cli.model.config import NetworkConfig
from apollo_cli.planner import Planner, load_planner
from apollo_cli.weights.checkpoint import QuantKind
from apollo_cli.weights.store import AUTO, LocatedModel, locate_model

if TYPE_CHECKING:
    from apollo_cli.model.apollo import ApolloModel


@dataclass(frozen=True)
class FoundModel:
    """A model on this machine before its weights are read.

    Attributes:
        located: checkpoint and adapters. hardware: where it runs. planner: plans its prompts.
        quant: quantisation to load with; None keeps the checkpoint's.
    """

    located: LocatedModel
    hardware: HardwareChoice
    planner: Planner
    quant: QuantKind | None

    @property
    def config(self) -> NetworkConfig:
        """Shape of the network."""
        return self.planner.config

    @cached_property
    def fingerprint(self) -> str:
        """Identity of what makes visual tokens, as video memories carry it."""
        return fingerprint(self.located.checkpoint, self.hardware.dtype, self.located.chain)


@dataclass(frozen=True)
class LoadedModel(FoundModel):
    """A found model with its weights in memory.

    Attributes:
        network: the network, with all adapters applied.
    """

    network: ApolloModel


def find_model(
    model: str | Path = AUTO,
    *,
    device: str | None = None,
    dtype: str | None = None,
    template: str | None = None,
    quant: QuantKind | None = None,
    adapter: str | Path | None = None,
) -> FoundModel:
    """Find a model and read its configs, headers and tokenizer, but no weights.

    Args:
        model: known name, folder, ``owner/repository[@revision]``; ``auto``: the best that fits.
        device, dtype: ``cpu``, ``cuda:1``, ``mps`` ...; ``bfloat16`` ...; None chooses.
        template: chat template; None keeps the checkpoint's.
        quant: ``4bit`` or ``8bit``; None keeps the checkpoint's precision.
        adapter: result of a training run; with ``auto`` it names its model itself.

    Raises:
        WeightsError: model or adapter is unknown, missing or damaged, or they do not fit.
        DeviceError: the device or dtype is not there.
    """
    hardware = choose_device(device, dtype)
    room = room_for(hardware, quant, free_bytes(hardware.device)) if str(model) == AUTO else None
    located = locate_model(model, room, [] if adapter is None else [adapter])
    return FoundModel(
        located, hardware, load_planner(located.checkpoint, template, located.config), quant
    )


def load_weights(
    found: FoundModel, on_progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Read the weights of a found model and apply its adapters.

    Args:
        on_progress: called with bytes read and bytes in all.

    Raises:
        WeightsError: weights or an adapter are damaged.
        DeviceError: bitsandbytes is needed and missing, or cannot run on the device.
    """
    import torch

    from apollo_cli.weights.load import load_model
    from apollo_cli.weights.overlay import apply_adapter

    network, _ = load_model(
        found.located.checkpoint,
        config=found.config,
        device=found.hardware.device,
        dtype=getattr(torch, found.hardware.dtype),
        kernel=found.hardware.attention,
        quant=found.quant,
        on_progress=on_progress,
    )
    apply_adapter(network, found.located.chain)
    return LoadedModel(found.located, found.hardware, found.planner, found.quant, network)
