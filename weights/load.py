"""Streamed loading: tensor by tensor from safetensors to the device, in the wanted dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from apollo_cli.errors import WeightsError
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.weights.checkpoint import Checkpoint, TensorInfo, encoder_part, read_checkpoint
from apollo_cli.weights.network import build_network_config
from apollo_cli.weights.shards import name_some

TIED_HEAD = "lm_head.weight"


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
    path: Path | str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    kernel: str = "sdpa",
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[ApolloModel, Checkpoint]:
    """Load a checkpoint in the released layout.

    Args:
        path: the folder.
        device: where the weights go, each as it is read.
        dtype: floating-point type of all weights.
        kernel: attention kernel, as ``hardware.choose_device`` decided.
        on_progress: called with bytes read so far and bytes in all.

    Returns:
        The model in evaluation mode, and the checkpoint it came from.

    Raises:
        WeightsError: parts are missing, damaged, misshapen or unknown; all are listed.
    """
    checkpoint = read_checkpoint(Path(path))
    config = build_network_config(checkpoint)
    with parameters_on_meta():
        model = ApolloModel(config, kernel=kernel)
    parts = ["llm", "mm_connector", *(encoder_part(e.name) for e in config.encoders)]
    wanted = {part: _wanted(model.part(part), checkpoint.tensors[part]) for part in parts}
    _check_shapes(model, checkpoint, wanted)
    places = [
        (checkpoint.tensors[part][key], key, model.part(part))
        for part, parameters in wanted.items()
        for key in parameters
    ]
    _fill(places, torch.device(device), dtype, on_progress)
    model.llm.tie_weights()
    model.to(device)
    model.eval().requires_grad_(False)
    return model, checkpoint


def _wanted(module: nn.Module, stored: dict[str, TensorInfo]) -> dict[str, nn.Parameter]:
    """Parameters to fill; a tied head is one with the embedding and not read."""
    wanted = dict(module.named_parameters(remove_duplicate=False))
    embedding = wanted.get("model.embed_tokens.weight")
    config = getattr(module, "config", None)
    if embedding is not None and getattr(config, "tie_word_embeddings", False):
        wanted.pop(TIED_HEAD, None)
    return wanted


def _check_shapes(
    model: ApolloModel, checkpoint: Checkpoint, wanted: dict[str, dict[str, nn.Parameter]]
) -> None:
    faults: list[str] = []
    for part, parameters in wanted.items():
        stored = checkpoint.tensors[part]
        missing = [key for key in parameters if key not in stored]
        if missing:
            faults.append(f"{part} lacks {len(missing)} tensors ({name_some(missing)})")
        misshapen = [
            f"{key} is {list(stored[key].shape)}, needed is {list(parameter.shape)}"
            for key, parameter in parameters.items()
            if key in stored and stored[key].shape != tuple(parameter.shape)
        ]
        if misshapen:
            faults.append(f"{part}: {name_some(misshapen)}")
        # Encoders carry pretraining heads that are never used; elsewhere a surprise is a fault.
        if not part.startswith("vision_tower/"):
            known = {*parameters, TIED_HEAD}
            unknown = [key for key in stored if key not in known and ".rotary_emb." not in key]
            if unknown:
                faults.append(f"{part} has {len(unknown)} unknown tensors ({name_some(unknown)})")
    if faults:
        raise WeightsError(
            f"checkpoint {checkpoint.root} does not fit the network: {'; '.join(faults)}",
            next_step="check that all files come from the same release",
        )


def _fill(
    places: list[tuple[TensorInfo, str, nn.Module]],
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    # In the order of the files, so that each is opened once and read forward.
    places.sort(key=lambda place: (str(place[0].file), place[0].start))
    total = sum(info.size_bytes for info, _, _ in places)
    done, current, handle = 0, None, None
    try:
        for info, key, module in places:
            if info.file != current:
                current, handle = info.file, safe_open(info.file, framework="pt")
            assert handle is not None
            _assign(module, key, handle.get_tensor(key).to(device, dtype, copy=True))
            done += info.size_bytes
            if on_progress is not None:
                on_progress(done, total)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{current} cannot be read ({error})", next_step="fetch the checkpoint again"
        ) from error


def _assign(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    owner, _, name = key.rpartition(".")
    setattr(module.get_submodule(owner), name, nn.Parameter(tensor, requires_grad=False))
