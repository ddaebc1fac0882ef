"""Save a checkpoint with its language model quantised, in the same layout, for quicker loading."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from apollo_cli.atomic import workshop
from apollo_cli.errors import UsageError, WeightsError
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.weights.checkpoint import (
    HEAD,
    LLM,
    OUTLIER_THRESHOLD,
    SKIPPED,
    Checkpoint,
    QuantKind,
    read_checkpoint,
    stored_kind,
)
from apollo_cli.weights.load import parameters_on_meta
from apollo_cli.weights.network import build_network_config
from apollo_cli.weights.quantize import (
    QuantReport,
    fill_layer,
    packed_tensors,
    place_layers,
)
from apollo_cli.weights.shards import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 1_000_000_000
_COPIED = {".json", ".txt", ".md", ".safetensors"}
_COPIED_NAMES = ("LICENSE", "LICENCE", "NOTICE")


@dataclass(frozen=True)
class SavedQuantised:
    """Result of a save.

    Attributes:
        folder: the new checkpoint.
        report: which layers are quantised, and which are not.
        source_bytes: tensors of the original. saved_bytes: tensors of the new one.
    """

    folder: Path
    report: QuantReport
    source_bytes: int
    saved_bytes: int


def save_quantized(
    source: Path | str,
    target: Path | str,
    kind: QuantKind,
    *,
    device: str | torch.device = "cpu",
    on_progress: Callable[[int, int], None] | None = None,
) -> SavedQuantised:
    """Write a copy of a checkpoint whose language model is quantised.

    Loading the copy gives the same values, bit for bit, as quantising while the original is
    loaded, in any dtype. The model is never in memory as a whole.

    Args:
        source: a checkpoint in the released layout.
        target: a folder that does not exist yet.
        kind: ``4bit`` or ``8bit``.
        device: where weights are quantised.
        on_progress: called with bytes read and bytes in all, of the language model.

    Raises:
        UsageError: the target exists.
        WeightsError: the source is damaged, or quantised already.
        DeviceError: bitsandbytes is missing.
    """
    target = Path(target).absolute()
    if target.exists():
        raise UsageError(f"{target} exists", "a new folder is needed")
    checkpoint = read_checkpoint(Path(source))
    stored = stored_kind(checkpoint)
    if stored is not None:
        raise WeightsError(
            f"{checkpoint.root} is stored in {stored} already",
            next_step="take the checkpoint that it was made from",
        )
    with parameters_on_meta():
        llm = ApolloModel(build_network_config(checkpoint)).llm
    report = place_layers(llm, kind, torch.float32, device=device)
    try:
        with workshop(target) as unfinished:
            copy_rest(checkpoint, unfinished, (LLM,))
            writer = ShardWriter(unfinished / LLM)
            for tensors in _packed(checkpoint, llm, report, torch.device(device), on_progress):
                writer.add(tensors)
            writer.finish()
            config = checkpoint.llm_config | {"quantization_config": _describe(report)}
            (unfinished / LLM / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
            unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(
            f"{target} cannot be written ({reason})", next_step="make room or choose another place"
        ) from error
    return SavedQuantised(target, report, checkpoint.size_bytes, read_checkpoint(target).size_bytes)


def copy_rest(checkpoint: Checkpoint, target: Path, rewritten: Collection[str]) -> None:
    """Copy tokenizer, configs, licences, and weights as they are, but for those of some parts.

    Args:
        checkpoint: what is copied. target: a folder that is made.
        rewritten: parts whose weights are left out.
    """
    target.mkdir(parents=True)
    for path in sorted(checkpoint.root.rglob("*")):
        relative = path.relative_to(checkpoint.root)
        known = path.suffix in _COPIED or path.stem in _COPIED_NAMES
        is_weight = path.suffix == ".safetensors" or path.name == INDEX_FILE
        part = relative.parent.as_posix()
        if not path.is_file() or not known or (is_weight and part in rewritten):
            continue
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / relative)


def _packed(
    checkpoint: Checkpoint,
    llm: nn.Module,
    report: QuantReport,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of the language model, each with what belongs to it, as they are stored."""
    layers = {f"{name}.weight": name for name in report.layers}
    tensors = dict(checkpoint.tensors[LLM])
    if checkpoint.tied_head:
        tensors.pop(HEAD, None)
    total, done = sum(info.size_bytes for info in tensors.values()), 0
    handles: dict[Path, Any] = {}
    for key, info in sorted(tensors.items(), key=lambda item: (str(item[1].file), item[1].start)):
        if info.file not in handles:
            handles[info.file] = safe_open(info.file, framework="pt")
        tensor = handles[info.file].get_tensor(info.key)
        if key in layers:
            layer = llm.get_submodule(layers[key])
            fill_layer(layer, tensor, device)
            parts = packed_tensors(layer)
            yield {f"{layers[key]}.{n}": part.contiguous().cpu() for n, part in parts.items()}
            layer.weight = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
        else:
            yield {key: tensor.clone()}
        done += info.size_bytes
        if on_progress is not None:
            on_progress(done, total)


class ShardWriter:
    """Writes tensors to files of about one size, and the index of several, into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: dict[str, torch.Tensor] = {}
        self.held_bytes = 0
        self.written: list[tuple[Path, list[str]]] = []
        self.total_bytes = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take tensors that stay together in one file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.held and self.held_bytes + size > SHARD_BYTES:
            self._flush()
        self.held |= tensors
        self.held_bytes += size
        self.total_bytes += size

    def finish(self) -> None:
        """Write what is left, and give the files their names."""
        self._flush()
        count = len(self.written)
        weight_map: dict[str, str] = {}
        for number, (path, keys) in enumerate(self.written, start=1):
            name = SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            path.rename(self.folder / name)
            weight_map |= dict.fromkeys(keys, name)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2), "utf-8")

    def _flush(self) -> None:
        path = self.folder / f"shard{len(self.written)}.safetensors"
        save_file(self.held, path, metadata={"format": "pt"})
        # The library makes files for their owner alone; a model may be shared like any other file.
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)
        self.written.append((path, list(self.held)))
        self.held, self.held_bytes = {}, 0


def _describe(report: QuantReport) -> dict[str, Any]:
    """The entry of ``config.json`` by which transformers reads the same files."""
    four = report.kind == "4bit"
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four,
        "load_in_8bit": not four,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_threshold": OUTLIER_THRESHOLD,
        "llm_int8_skip_modules": [*SKIPPED, *report.whole],
    }
