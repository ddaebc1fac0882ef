"""What is trained: parts frozen or opened, low-rank adapters put in place, and the result saved."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from apollo_cli.errors import DataError
from apollo_cli.finetune.needs import check_method
from apollo_cli.finetune.recipe import Recipe, to_toml
from apollo_cli.finetune.stages import PARTS, Part, learning_rates
from apollo_cli.hardware import choose_device, import_fault
from apollo_cli.loaded_model import FoundModel, LoadedModel, load_weights
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.sizes import llm_sizes
from apollo_cli.planner import load_planner
from apollo_cli.watcher import Progress, no_progress
from apollo_cli.weights.adapter import (
    FORMAT,
    LORA_CONFIG,
    LORA_FILE,
    LORA_PLACES,
    LORA_PREFIX,
    MANIFEST,
    RECIPE_FILE,
    VERSION,
    WHOLE_FILES,
)
from apollo_cli.weights.checkpoint import stored_kind
from apollo_cli.weights.files import hash_file
from apollo_cli.weights.load import is_finite
from apollo_cli.weights.overlay import whole_tensors
from apollo_cli.weights.quantize import is_quantised
from apollo_cli.weights.store import LocatedModel, locate_model

LLM_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXTRA = 'pip install "apollo-video-cli[finetune]"'
_ADAPTER_NAME = "default"
UNFINISHED = ".result.unfinished"


def find_base(recipe: Recipe, device: str | None = None) -> FoundModel:
    """Find the model of a recipe with its earlier results, and check that its method can train it.

    Args:
        device: wins over the recipe's; for one process of several.

    Raises:
        WeightsError: the model or an earlier result is missing, damaged or of another model.
        DeviceError: device or dtype are not there.
        DataError: the method cannot train this checkpoint.
    """
    hardware = choose_device(device or recipe.device, recipe.dtype)
    if hardware.dtype == "float16":
        # Gradients in this type vanish or overflow without a scaler.
        hardware = replace(hardware, dtype="float32")
    located = locate_model(recipe.model, adapters=recipe.adapters)
    check_method(recipe, located.checkpoint)
    planner = load_planner(located.checkpoint, recipe.template, located.config)
    is_whole = stored_kind(located.checkpoint) is None
    quant = "4bit" if recipe.method == "qlora" and is_whole else None
    return FoundModel(located, hardware, planner, quant)


def load_base(
    recipe: Recipe, found: FoundModel | None = None, *, on_progress: Progress = no_progress
) -> LoadedModel:
    """Load the model of a recipe as its method needs it, and apply earlier results.

    Args:
        found: from ``find_base``; None finds it.
        on_progress: called with stage, amount done and amount in all.

    Raises:
        WeightsError: the model or an earlier result is damaged.
        DeviceError: bitsandbytes is needed and not there.
    """
    return load_weights(
        found or find_base(recipe), lambda done, total: on_progress("load", done, total)
    )


class Trained:
    """What of a network is trained.

    Attributes:
        network: the whole network.
        parts: those that are trained. rates: their learning rates.
        parameters: everything that is trained, by a name that stays the same from run to run.
        lora: settings of low-rank factors, by part.
    """

    def __init__(self, network: ApolloModel, recipe: Recipe, lora: dict[Part, Any]) -> None:
        self.network = network
        self.parts = recipe.train
        self.lora = lora
        self.weight_decay = recipe.weight_decay
        values = llm_sizes(network.config.llm).values
        self.rates = learning_rates(recipe.stage, values, lora) | recipe.own_rates
        named = network.named_parameters()
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in named if p.requires_grad}

    def groups(self) -> list[dict[str, Any]]:
        """Groups for an optimiser: ``params``, ``lr``, ``name``, ``weight_decay``.

        Vectors, such as norms and biases, are in groups of their own and do not decay.
        """
        groups = []
        for part in self.parts:
            mine = [p for name, p in self.parameters.items() if name.partition(".")[0] == part]
            matrices = [parameter for parameter in mine if parameter.ndim > 1]
            vectors = [parameter for parameter in mine if parameter.ndim <= 1]
            for name, params in ((part, matrices), (f"{part}, vectors", vectors)):
                decay = self.weight_decay if params is matrices else 0.0
                shared = {"lr": self.rates[part], "name": name, "weight_decay": decay}
                if params:
                    groups.append({"params": params, **shared})
        return groups

    def train_mode(self) -> None:
        """Put trained parts in training mode, and the others in evaluation mode."""
        self.network.eval()
        for part in self.parts:
            module_of(self.network, part).train()


def module_of(network: ApolloModel, part: Part) -> nn.Module:
    """The module of a trained part; its name is the beginning of its parameters' names."""
    modules: dict[Part, nn.Module] = {
        "llm": network.llm,
        "connector": network.connector,
        "encoders": network.encoders,
    }
    return modules[part]


def prepare_network(network: ApolloModel, recipe: Recipe) -> Trained:
    """Freeze a network, open what the recipe trains, and put low-rank adapters in place.

    What is trained is float32, whatever the dtype of the rest. The same seed gives the same start.

    Args:
        network: from ``load_base`` or ``load_model``; changed in place.
        recipe: what is trained, and how.

    Raises:
        DataError: peft is missing.
    """
    network.requires_grad_(False)
    lora: dict[Part, Any] = {}
    for part in PARTS:
        if part not in recipe.train:
            continue
        module = module_of(network, part)
        low_rank = part == "llm" and recipe.method != "full"
        if low_rank or (part == "encoders" and recipe.lora_encoders):
            names = [n for n, m in network.encoders.named_modules() if type(m) is nn.Linear]
            lora[part] = _inject(module, recipe, LLM_TARGETS if part == "llm" else names)
        else:
            module.requires_grad_(True)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trained = Trained(network, recipe, lora)
    trained.train_mode()
    return trained


def _inject(module: nn.Module, recipe: Recipe, targets: Sequence[str]) -> Any:
    """Put low-rank factors beside the named layers; gives their settings."""
    fault = import_fault("peft", "peft")
    if fault is not None:
        raise DataError(f'method = "{recipe.method}": {fault}', "", EXTRA)
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=recipe.lora_dropout,
        target_modules=list(targets),
    )
    kinds = {type(layer).__name__ for layer in module.modules() if is_quantised(layer)}
    for kind, flag in (("Linear4bit", "is_loaded_in_4bit"), ("Linear8bitLt", "is_loaded_in_8bit")):
        if kind in kinds:
            # PEFT looks at this mark of transformers, whose loader was not used.
            setattr(module, flag, True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        inject_adapter_in_model(config, module, _ADAPTER_NAME)
    return config


def save_result(
    model: LoadedModel,
    trained: Trained,
    recipe: Recipe,
    folder: Path,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write what was trained, so that ``--adapter FOLDER`` finds it.

    The folder may hold other files. Its manifest is written last: without it there is no result.

    Args:
        model: with its trained network. trained: what of it was trained.
        recipe: how. folder: where to.
        facts: what else the manifest should tell, such as losses and package versions.

    Returns:
        The folder.

    Raises:
        DataError: a tensor is NaN or infinite, or the result cannot be written, for example since
            the disk is full. An earlier result stays.
    """
    unfinished = folder / UNFINISHED
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name, tensors in _tensors(model.network, trained):
            _save(unfinished / name, tensors)
        for part, config in trained.lora.items():
            settings = json.dumps(_plain(config.to_dict()), indent=2, sort_keys=True)
            (unfinished / LORA_PLACES[part] / LORA_CONFIG).write_text(settings, "utf-8")
        recipe_text = to_toml(recipe).encode("utf-8", "backslashreplace")
        (unfinished / RECIPE_FILE).write_bytes(recipe_text)
        manifest = _manifest(model.located, recipe, trained, folder, dict(facts or {}))
        manifest["files"] = {
            str(path.relative_to(unfinished).as_posix()): hash_file(path).sha256
            for path in sorted(unfinished.rglob("*"))
            if path.is_file()
        }
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        _move_in(unfinished, folder, list(manifest["files"]))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"the result {folder} cannot be written ({reason})",
            next_step="make room and run again: it goes on from the last checkpoint",
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _move_in(unfinished: Path, folder: Path, names: list[str]) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)
    for place in LORA_PLACES.values():
        for old in (*WHOLE_FILES.values(), f"{place}{LORA_FILE}", f"{place}{LORA_CONFIG}"):
            (folder / old).unlink(missing_ok=True)
    for name in [*names, MANIFEST]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).replace(folder / name)


def _tensors(
    network: ApolloModel, trained: Trained
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Files of a result, with the tensors of each."""
    for part in trained.parts:
        if part not in trained.lora:
            yield WHOLE_FILES[part], whole_tensors(network, part)
            continue
        factors = {}
        for name, parameter in trained.parameters.items():
            owner, _, inside = name.partition(".")
            if owner == part:
                factors[LORA_PREFIX + inside.replace(f".{_ADAPTER_NAME}.", ".")] = parameter
        yield f"{LORA_PLACES[part]}{LORA_FILE}", factors


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in held.items():
        if not is_finite(tensor):
            raise DataError(
                f"tensor {name} of {path.name} has become NaN or infinite",
                "such a result is not saved",
                "start again with --fresh and a lower learning_rate",
            )
    save_file(held, path, metadata={"format": "pt"})
    # The library makes files for their owner alone.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _manifest(
    located: LocatedModel, recipe: Recipe, trained: Trained, folder: Path, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "base": {
            "name": located.name,
            "revision": located.revision,
            "identity": located.identity,
        },
        "stage": recipe.stage,
        "method": recipe.method,
        "parts": list(trained.parts),
        "adapters": [
            {
                "relative": os.path.relpath(adapter.folder, folder),
                "absolute": str(adapter.folder),
                "digest": adapter.digest,
            }
            for adapter in located.chain
        ],
        "facts": facts,
    }


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of PEFT as JSON holds them."""
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in settings.items()
    }
