"""The tensors of a training result, put on a network, or on tensors as they stream by.

Low-rank factors are merged in float32: W + scale x up x down, rounded once. On a layer in fewer
bits they stay beside it, since merging would round the weight to those bits again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from apollo_cli.errors import WeightsError
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.text import count
from apollo_cli.weights.adapter import (
    ENCODERS_FOLDER,
    LORA_FILE,
    LORA_PREFIX,
    Adapter,
    LoraSettings,
)
from apollo_cli.weights.checkpoint import CONNECTOR, LLM, encoder_part
from apollo_cli.weights.load import check_finite
from apollo_cli.weights.quantize import fill_layer, is_quantised
from apollo_cli.weights.shards import name_some, read_header

# A tensor of a checkpoint: its part, and its name there.
Key = tuple[str, str]


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor.

    Attributes:
        file: of the new values.
        whole: name of the tensor that takes its place, or empty.
        down, up: names of low-rank factors that are added, or empty.
        scale: of their product.
    """

    file: Path
    whole: str = ""
    down: str = ""
    up: str = ""
    scale: float = 1.0

    def read(self, name: str) -> torch.Tensor:
        """One tensor of the file.

        Raises:
            WeightsError: it cannot be read, or holds NaN or infinity.
        """
        try:
            with safe_open(self.file, framework="pt") as handle:
                tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.file} cannot be read ({error})") from None
        check_finite({name: tensor}, self.file)
        return tensor

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """The changed tensor, in the dtype and on the device of the given one."""
        if self.whole:
            return self.read(self.whole).to(tensor)
        down, up = (self.read(n).to(tensor.device, torch.float32) for n in (self.down, self.up))
        return (tensor.float() + self.scale * (up @ down)).to(tensor.dtype)


def changes_of(adapter: Adapter, network: ApolloModel) -> dict[Key, Change]:
    """What a result changes in a network.

    Args:
        adapter: the result.
        network: filled or not; only its names and shapes are looked at.

    Raises:
        WeightsError: a tensor is missing, unknown or misshapen; all are named.
    """
    changes: dict[Key, Change] = {}
    faults: list[str] = []
    for part, file in adapter.whole.items():
        wanted = {key: parameter_shape(network, key) for key in parameter_keys(network, part)}
        names = {_file_name(part, key): key for key in wanted}
        _compare(file, {name: wanted[key] for name, key in names.items()}, faults)
        changes |= {key: Change(file, whole=name) for name, key in names.items()}
    for part, settings in adapter.lora.items():
        changes |= _low_rank(network, part, settings, faults)
    if faults:
        raise WeightsError(
            f"adapter {adapter.folder} does not fit the network: {'; '.join(faults)}",
            next_step="run the training again",
        )
    return changes


def parameter_keys(network: ApolloModel, part: str) -> list[Key]:
    """All tensors of a trained part, as a checkpoint names them; a tied head comes once."""
    places = {"llm": [LLM], "connector": [CONNECTOR]}.get(part) or encoder_parts(network)
    return [(place, name) for place in places for name, _ in network.part(place).named_parameters()]


def encoder_parts(network: ApolloModel) -> list[str]:
    """The parts of a checkpoint that hold the vision encoders, in order."""
    return [encoder_part(encoder.name) for encoder in network.config.encoders]


def parameter_shape(network: ApolloModel, key: Key) -> tuple[int, ...]:
    """Shape of a tensor before any quantisation."""
    part, name = key
    owner, _, own_name = name.rpartition(".")
    module: Any = network.part(part).get_submodule(owner)
    if own_name == "weight" and is_quantised(module):
        return module.out_features, module.in_features
    return tuple(network.part(part).get_parameter(name).shape)


def _file_name(part: str, key: Key) -> str:
    """How a whole tensor is called in the file of its part."""
    return f"{key[0].partition('/')[2]}/{key[1]}" if part == "encoders" else key[1]


def whole_tensors(network: ApolloModel, part: str) -> dict[str, torch.Tensor]:
    """The tensors of a part by their names in the file of a result."""
    keys = parameter_keys(network, part)
    return {_file_name(part, key): network.part(key[0]).get_parameter(key[1]) for key in keys}


def _low_rank(
    network: ApolloModel, part: str, settings: LoraSettings, faults: list[str]
) -> dict[Key, Change]:
    root: nn.Module = network.llm if part == "llm" else network.encoders
    ends = tuple(f".{target}" for target in settings.targets)
    changes: dict[Key, Change] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    for name, module in root.named_modules():
        if not f".{name}".endswith(ends):
            continue
        layer: Any = module
        if not (isinstance(module, nn.Linear) or is_quantised(module)):
            faults.append(f"{part}: {name} is not a linear layer")
            continue
        down, up = (f"{LORA_PREFIX}{name}.lora_{side}.weight" for side in "AB")
        wanted[down] = (settings.rank, layer.in_features)
        wanted[up] = (layer.out_features, settings.rank)
        key = (LLM, f"{name}.weight")
        if part == "encoders":
            index, _, inside = name.partition(".")
            key = (encoder_parts(network)[int(index)], f"{inside}.weight")
        changes[key] = Change(settings.file, down=down, up=up, scale=settings.scale)
    _compare(settings.file, wanted, faults)
    return changes


def _compare(file: Path, wanted: Mapping[str, tuple[int, ...]], faults: list[str]) -> None:
    found = read_header(file)
    label = f"{ENCODERS_FOLDER}/{LORA_FILE}" if file.parent.name == ENCODERS_FOLDER else file.name
    missing = sorted(wanted.keys() - found.keys())
    extra = sorted(found.keys() - wanted.keys())
    misshapen = [
        f"{name} is {list(found[name].shape)}, needed is {list(wanted[name])}"
        for name in sorted(wanted.keys() & found.keys())
        if found[name].shape != tuple(wanted[name])
    ]
    if missing:
        faults.append(f"{label} lacks {count(len(missing), 'tensor')} ({name_some(missing)})")
    if extra:
        faults.append(f"{label} has {count(len(extra), 'unknown tensor')} ({name_some(extra)})")
    if misshapen:
        faults.append(f"{label}: {name_some(misshapen)}")


def apply_adapter(
    network: ApolloModel,
    chain: tuple[Adapter, ...],
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put results on a loaded network, in place.

    Everything is checked before anything is changed.

    Args:
        network: as loaded.
        chain: from ``resolve_chain``, and found by ``check_base`` to belong to its checkpoint.
        on_progress: called with tensors done and tensors in all.

    Raises:
        WeightsError: a result does not fit the network, or cannot be read.
    """
    steps = [step for adapter in chain for step in changes_of(adapter, network).items()]
    with torch.no_grad():
        for done, (key, change) in enumerate(steps, start=1):
            _apply(network, key, change)
            if on_progress is not None:
                on_progress(done, len(steps))


def _apply(network: ApolloModel, key: Key, change: Change) -> None:
    part, name = key
    owner, _, own_name = name.rpartition(".")
    module = network.part(part).get_submodule(owner)
    if own_name == "weight" and is_quantised(module):
        if change.whole:
            fill_layer(module, change.read(change.whole), network.device)
        else:
            _stay_beside(module, change, network.device, network.dtype)
        return
    parameter = network.part(part).get_parameter(name)
    parameter.copy_(change.on(parameter))


def _stay_beside(
    module: nn.Module, change: Change, device: torch.device, dtype: torch.dtype
) -> None:
    """Add the product of low-rank factors to what a layer gives, each time it is called."""
    number = sum(name.endswith("_down") for name, _ in module.named_buffers())
    down, up = f"beside_{number}_down", f"beside_{number}_up"
    module.register_buffer(down, change.read(change.down).to(device, dtype), persistent=False)
    scaled = change.scale * change.read(change.up).float()
    module.register_buffer(up, scaled.to(device, dtype), persistent=False)

    def add(layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        factors = layer.get_buffer(down), layer.get_buffer(up)
        hidden = inputs[0].to(factors[0].dtype) @ factors[0].T
        return output + (hidden @ factors[1].T).to(output.dtype)

    module.register_forward_hook(add)
