"""Streamed loading: tensor by tensor from safetensors to the device, in the wanted dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from apollo_cli.errors import WeightsError
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.config import NetworkConfig
from apollo_cli.text import count
from apollo_cli.weights.checkpoint import (
    Checkpoint,
    QuantKind,
    TensorInfo,
    read_checkpoint,
    stored_kind,
)
from apollo_cli.weights.network import build_network_config
from apollo_cli.weights.quantize import (
    QuantReport,
    agree_on_kind,
    check_stored_layers,
    fill_layer,
    fill_stored_layer,
    is_quantised,
    place_layers,
    stored_parts,
)
from apollo_cli.weights.shards import name_some

TIED_HEAD = "lm_head.weight"
# What older versions of the libraries stored beside the weights.
_BUFFERS = ("position_ids", ".rotary_emb.inv_freq")
_FLOATS = {"F16", "BF16", "F32", "F64"}
# How far a tensor's name tells what runs it: a numbered layer, or an embedding.
_OWNER = re.compile(r"(.*?\.\d+\.|(?:vision_model\.)?\w+\.)")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules without memory for their parameters, while buffers stay real.

    Rotary frequencies and position ids are buffers that no checkpoint holds: under
    ``torch.device("meta")`` they would be lost too.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = meta

    nn.Module.register_parameter = register_on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def load_model(
    source: Path | str | Checkpoint,
    *,
    config: NetworkConfig | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    kernel: str = "sdpa",
    quant: QuantKind | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[ApolloModel, Checkpoint]:
    """Load a checkpoint in the released layout.

    Args:
        source: the folder, or what ``read_checkpoint`` found in it.
        config: of the checkpoint, where it is known already.
        device: where the weights go, each as it is read.
        dtype: floating-point type of all weights that are not quantised.
        kernel: attention kernel, as ``hardware.choose_device`` decided.
        quant: ``4bit`` or ``8bit`` for the linear layers of the language model. A checkpoint that
            is stored quantised is loaded so without being asked.
        on_progress: called with bytes read so far and bytes in all.

    Returns:
        The model in evaluation mode, and the checkpoint it came from.

    Raises:
        WeightsError: parts are missing, damaged, misshapen or unknown; all are listed.
        DeviceError: bitsandbytes is needed and missing, or cannot run on the device.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(Path(source))
    quant = agree_on_kind(checkpoint, quant)
    config = config or build_network_config(checkpoint)
    with parameters_on_meta():
        model = ApolloModel(config, kernel=kernel)
    stored = checkpoint.tensors["llm"] if stored_kind(checkpoint) else None
    report = place_layers(model.llm, quant, dtype, device=device, stored=stored) if quant else None
    is_packed = report is not None and stored is not None
    places = _list_places(model, checkpoint, report if is_packed else None)
    _fill(places, torch.device(device), dtype, on_progress)
    model.llm.tie_weights()
    model.to(device)
    model.eval().requires_grad_(False)
    return model, checkpoint


@dataclass(frozen=True)
class _Place:
    """Where something that is read goes.

    Attributes:
        owner: the module. name: of its parameter; None for a whole stored quantised layer.
        tensors: what is read for it, by key in the released layout.
    """

    owner: nn.Module
    name: str | None
    tensors: dict[str, TensorInfo]

    @property
    def position(self) -> tuple[str, int]:
        """Where its first tensor lies: file and byte."""
        return min((str(info.file), info.start) for info in self.tensors.values())


def _list_places(
    model: ApolloModel, checkpoint: Checkpoint, report: QuantReport | None
) -> list[_Place]:
    """All places in the order of the files, so that each file is read forward.

    Args:
        report: of a checkpoint that is stored quantised; None of any other.

    Raises:
        WeightsError: tensors are missing, misshapen or unknown; all are listed.
    """
    places, faults, packed = list[_Place](), list[str](), set[str]()
    for name in report.layers if report else ():
        parts = stored_parts(name, checkpoint.tensors["llm"])
        tensors = {f"{name}.{part}": info for part, info in parts.items()}
        places.append(_Place(model.llm.get_submodule(name), None, tensors))
        packed |= {*tensors, f"{name}.weight"}
    if report is not None:
        faults += check_stored_layers(model.llm, report, checkpoint.tensors["llm"])
    for part, stored in checkpoint.tensors.items():
        module = model.part(part)
        wanted = dict(module.named_parameters(remove_duplicate=False))
        if part == "llm":
            # A tied head is one with the embedding and not read.
            is_tied = model.config.llm["tie_word_embeddings"]
            left_out = {*packed, TIED_HEAD} if is_tied else packed
            wanted = {key: value for key, value in wanted.items() if key not in left_out}
        faults += _part_faults(part, stored, wanted, packed)
        for key in wanted.keys() & stored.keys():
            owner, _, name = key.rpartition(".")
            places.append(_Place(module.get_submodule(owner), name, {key: stored[key]}))
    if faults:
        raise WeightsError(
            f"checkpoint {checkpoint.root} does not fit the network: {'; '.join(faults)}",
            next_step="check that all files come from the same release",
        )
    return sorted(places, key=lambda place: place.position)


def _part_faults(
    part: str, stored: dict[str, TensorInfo], wanted: dict[str, nn.Parameter], packed: set[str]
) -> Iterator[str]:
    missing = [key for key in wanted if key not in stored]
    if missing:
        yield f"{part} lacks {count(len(missing), 'tensor')} ({name_some(missing)})"
    pairs = {key: (stored[key], value.shape) for key, value in wanted.items() if key in stored}
    misshapen = [
        f"{key} is {list(info.shape)}, needed is {list(shape)}"
        for key, (info, shape) in pairs.items()
        if info.shape != tuple(shape)
    ]
    if misshapen:
        yield f"{part}: {name_some(misshapen)}"
    odd = [
        f"{key} is {info.dtype}" for key, (info, _) in pairs.items() if info.dtype not in _FLOATS
    ]
    if odd:
        yield f"{part} holds whole numbers without their scales ({name_some(odd)})"
    unknown = _surprises(part, stored, wanted, packed)
    if unknown:
        yield f"{part} has {count(len(unknown), 'unknown tensor')} ({name_some(unknown)})"


def _surprises(
    part: str,
    stored: dict[str, TensorInfo],
    parameters: dict[str, nn.Parameter],
    in_layers: set[str],
) -> list[str]:
    """Tensors that nothing takes and that would have changed the numbers.

    Encoders carry pretraining heads, and layers behind the selected one, that are never run; but
    a bias that we do not know in a layer that is run is one too many.
    """
    run = tuple({match[0] for name in parameters if (match := _OWNER.match(name))})
    return [
        key
        for key in stored
        if key not in parameters
        and not key.endswith(_BUFFERS)
        and (
            key.startswith(run)
            if part.startswith("vision_tower/")
            else key != TIED_HEAD and key not in in_layers
        )
    ]


def _fill(
    places: list[_Place],
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(info.size_bytes for place in places for info in place.tensors.values())
    done, current = 0, None
    handles: dict[Path, Any] = {}
    try:
        for place in places:
            tensors = {}
            for key, info in place.tensors.items():
                current = info.file
                if current not in handles:
                    handles[current] = safe_open(current, framework="pt")
                tensors[key] = handles[current].get_tensor(info.key)
                check_finite({key: tensors[key]}, current)
                done += info.size_bytes
            _assign(place, tensors, device, dtype)
            if on_progress is not None:
                on_progress(done, total)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{current} cannot be read ({error})", next_step="fetch the checkpoint again"
        ) from error


def _assign(
    place: _Place, tensors: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    if place.name is None:
        fill_stored_layer(place.owner, tensors, device)
    elif place.name == "weight" and is_quantised(place.owner):
        fill_layer(place.owner, next(iter(tensors.values())), device)
    else:
        tensor = next(iter(tensors.values())).to(device, dtype, copy=True)
        setattr(place.owner, place.name, nn.Parameter(tensor, requires_grad=False))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; looked at in place, without a copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:
        # The 8-bit types have no comparison of their own.
        tensor = tensor.float()
    return all(bool(edge.isfinite()) for edge in torch.aminmax(tensor))


def check_finite(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Refuse tensors that were read from a file and hold NaN or infinity.

    Raises:
        WeightsError: names the file and the first such tensor.
    """
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise WeightsError(
                f"{file}: tensor {name} holds NaN or infinite values",
                "weights are finite numbers",
                "run apollo models verify and fetch it again, or train with a lower learning_rate",
            )
