"""The language model in 8 or 4 bits, layer by layer as its tensors are read.

Only its linear layers are quantised, by bitsandbytes (8-bit, or 4-bit nf4 with quantised scales).
Output head, embeddings, norms, encoders and connector keep the dtype of the model.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from apollo_cli.errors import DeviceError, WeightsError
from apollo_cli.hardware import import_fault
from apollo_cli.text import count
from apollo_cli.weights.checkpoint import (
    BLOCK,
    DEVICES,
    OUTLIER_THRESHOLD,
    SKIPPED,
    Checkpoint,
    QuantKind,
    TensorInfo,
    fits_quantisation,
    stored_kind,
)
from apollo_cli.weights.shards import name_some

_COMPANIONS = {
    "4bit": ("weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "8bit": ("SCB",),
}
_MARKS = {"weight.absmax": "4bit", "SCB": "8bit"}


@dataclass(frozen=True)
class QuantReport:
    """What a model holds in fewer bits.

    Attributes:
        kind: ``4bit`` or ``8bit``.
        layers: names of the quantised layers, inside the language model.
        whole: names of linear layers whose shape cannot be quantised and that keep their dtype.
    """

    kind: QuantKind
    layers: tuple[str, ...]
    whole: tuple[str, ...]


def bitsandbytes(device: str | torch.device = "cpu") -> ModuleType:
    """Import bitsandbytes, quietly.

    Raises:
        DeviceError: it is not installed, broken, or cannot run on the device.
    """
    kind = torch.device(device).type
    if kind not in DEVICES:
        raise DeviceError(
            f"quantised weights on {kind}",
            "bitsandbytes runs here on cpu and cuda",
            "leave --quant out, or add --device cpu",
        )
    # It warns once for each layer and call, of casts that are meant.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    fault = import_fault("bitsandbytes", "bitsandbytes")
    if fault is not None:
        raise DeviceError(
            f"quantised weights: {fault}",
            "",
            'pip install "apollo-video-cli[quant]", or leave --quant out',
        )
    return importlib.import_module("bitsandbytes")


def agree_on_kind(checkpoint: Checkpoint, wanted: QuantKind | None) -> QuantKind | None:
    """The quantisation to load with: what is stored, or else what is wanted.

    Raises:
        WeightsError: the checkpoint is stored in another quantisation than is wanted.
    """
    stored = stored_kind(checkpoint)
    if stored and wanted and stored != wanted:
        raise WeightsError(
            f"--quant {wanted}: {checkpoint.root} is stored in {stored}",
            f"allowed is {stored}",
            "leave --quant out, or take the checkpoint that it was made from",
        )
    return stored or wanted


def place_layers(
    llm: nn.Module,
    kind: QuantKind,
    dtype: torch.dtype,
    *,
    device: str | torch.device = "cpu",
    stored: Mapping[str, TensorInfo] | None = None,
) -> QuantReport:
    """Put quantised layers, still without memory, in the place of linear ones.

    Args:
        llm: the language model, whose parameters have no memory yet.
        kind: ``4bit`` or ``8bit``.
        dtype: of activations and of the result of a layer.
        device: where it will run; checked here, before anything is read.
        stored: tensors of a checkpoint that is quantised already; it decides then which layers.

    Raises:
        DeviceError: bitsandbytes is missing or cannot run on the device.
    """
    library = bitsandbytes(device)
    layers, whole = [], []
    # Exactly this class: subclasses are read by their owners in ways that a packed weight breaks.
    linears = [name for name, module in llm.named_modules() if type(module) is nn.Linear]
    for name in linears:
        if name.rpartition(".")[2] in SKIPPED:
            continue
        linear = llm.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if stored is None:
            fits = fits_quantisation(kind, linear.in_features)
        else:
            fits = any(f"{name}.{mark}" in stored for mark in _MARKS)
        if fits:
            llm.set_submodule(name, _empty_layer(library, kind, linear, dtype))
        (layers if fits else whole).append(name)
    return QuantReport(kind, tuple(layers), tuple(whole))


def _empty_layer(
    library: ModuleType, kind: QuantKind, linear: nn.Linear, dtype: torch.dtype
) -> nn.Module:
    bias = linear.bias is not None
    if kind == "8bit":
        return library.nn.Linear8bitLt(
            linear.in_features,
            linear.out_features,
            bias=bias,
            has_fp16_weights=False,
            threshold=OUTLIER_THRESHOLD,
            device="meta",
        )
    layer = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=bias,
        compute_dtype=dtype,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    # Its packed CPU path rewrites the weight at the first answer: training, merging and saving
    # afterwards read garbage.
    if hasattr(layer, "support_avx512bf16_for_cpu"):
        layer.support_avx512bf16_for_cpu = False
    return layer


def is_quantised(module: nn.Module) -> bool:
    """Whether a module is a layer in fewer bits."""
    return type(module).__name__ in ("Linear4bit", "Linear8bitLt")


def fill_layer(layer: Any, weight: torch.Tensor, device: torch.device) -> None:
    """Quantise one weight (out, in) into its layer, from the dtype that it is stored in."""
    library = importlib.import_module("bitsandbytes")
    if hasattr(layer, "compute_dtype"):
        parameter = library.nn.Params4bit(
            weight,
            requires_grad=False,
            blocksize=BLOCK,
            compress_statistics=True,
            quant_type="nf4",
            module=layer,
        ).to(device)
        # Results come in this dtype, whichever one the weight was stored in.
        parameter.quant_state.dtype = layer.compute_dtype
    else:
        parameter = library.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(
            device
        )
    layer.weight = parameter
    if device.type == "cpu":
        _return_free_memory()


def _return_free_memory() -> None:
    """Hand freed blocks back to the system, which glibc alone keeps between those in use.

    Without it, quantising on a CPU leaves several times the size of the result behind.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def fill_stored_layer(layer: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """Fill a layer from what ``packed_tensors`` gave.

    Raises:
        WeightsError: the description of a weight cannot be read.
    """
    library = importlib.import_module("bitsandbytes")
    weight = next(tensor for key, tensor in tensors.items() if key.endswith(".weight"))
    if hasattr(layer, "compute_dtype"):
        # Cloned, since what is read lies in the file and not in memory of ours.
        state = {
            key.partition(".weight.")[2]: tensor.clone()
            for key, tensor in tensors.items()
            if ".weight." in key
        }
        try:
            parameter = library.nn.Params4bit.from_prequantized(
                weight.clone(), state, device=device, module=layer
            )
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise WeightsError(
                f"quantised weight {next(iter(tensors))} cannot be read ({error})",
                next_step="make the quantised checkpoint again",
            ) from error
        parameter.quant_state.dtype = layer.compute_dtype
    else:
        values = weight.to(device, copy=True)
        scales = next(tensor for key, tensor in tensors.items() if key.endswith(".SCB"))
        parameter = library.nn.Int8Params(
            values,
            requires_grad=False,
            has_fp16_weights=False,
            CB=values,
            SCB=scales.to(device, copy=True),
        )
    layer.weight = parameter


def packed_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """The weight of a filled layer as it is stored, names relative to the layer."""
    weight = layer.weight
    if not hasattr(layer, "compute_dtype"):
        scales = layer.state.SCB if weight.SCB is None else weight.SCB
        row_format = torch.tensor(0, dtype=torch.uint8)
        return {"weight": weight.data, "SCB": scales, "weight_format": row_format}
    state = weight.quant_state.as_dict(packed=True)
    return {"weight": weight.data, **{f"weight.{name}": part for name, part in state.items()}}


def check_stored_layers(
    llm: nn.Module, report: QuantReport, stored: Mapping[str, TensorInfo]
) -> Iterator[str]:
    """What is missing or misshapen in the quantised layers of a checkpoint."""
    missing, misshapen = [], []
    for name in report.layers:
        layer: Any = llm.get_submodule(name)
        wanted = ["weight", *_COMPANIONS[report.kind]]
        missing += [f"{name}.{part}" for part in wanted if f"{name}.{part}" not in stored]
        weight = stored.get(f"{name}.weight")
        values = layer.out_features * layer.in_features
        expected = values if report.kind == "8bit" else (values + 1) // 2
        if weight is not None and (weight.elements != expected or weight.dtype not in ("U8", "I8")):
            misshapen.append(f"{name}.weight holds {weight.elements} values, needed {expected}")
    if missing:
        yield f"llm lacks {count(len(missing), 'tensor')} ({name_some(missing)})"
    if misshapen:
        yield f"llm: {name_some(misshapen)}"


def stored_parts(name: str, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The stored tensors of one quantised layer, its bias left out, by name inside the layer."""
    prefix = f"{name}."
    inside = {
        key.removeprefix(prefix): info for key, info in stored.items() if key.startswith(prefix)
    }
    inside.pop("bias", None)
    return inside


def report_of(llm: nn.Module) -> QuantReport | None:
    """What a loaded language model holds in fewer bits; None when nothing."""
    layers = {name: module for name, module in llm.named_modules() if is_quantised(module)}
    if not layers:
        return None
    four = any(type(module).__name__ == "Linear4bit" for module in layers.values())
    whole = [
        name
        for name, module in llm.named_modules()
        if type(module) is nn.Linear and name.rpartition(".")[2] not in SKIPPED
    ]
    return QuantReport("4bit" if four else "8bit", tuple(layers), tuple(whole))
