"""What a training run leaves: a folder that is put on the model it was trained from.

    apollo_adapter.json           manifest: base model, method, what it stands on, hash of each file
    adapter_model.safetensors     low-rank factors of the language model, in PEFT's own format,
    adapter_config.json           with their settings
    encoders_adapter/             the same for the vision encoders
    connector.safetensors         tensors of a part that was trained whole; also llm, encoders
    recipe.toml                   the recipe, every value spelled out

Reading it here is free of torch; ``weights.overlay`` puts it on a network.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.values import (
    Values,
    any_text,
    list_of,
    nothing_or,
    number,
    one_of,
    show,
    table,
    table_of,
    text,
)
from apollo_cli.values import whole as whole_number
from apollo_cli.weights.checkpoint import HEAD, LLM, Checkpoint, stored_kind
from apollo_cli.weights.files import hash_file, read_json
from apollo_cli.weights.shards import TensorInfo, name_some

MANIFEST, FORMAT, VERSION = "apollo_adapter.json", "apollo-adapter", 1
LORA_FILE, LORA_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ENCODERS_FOLDER = "encoders_adapter"
# Low-rank factors by the part they belong to, and files of parts that were trained whole.
LORA_PLACES = {"llm": "", "encoders": f"{ENCODERS_FOLDER}/"}
WHOLE_FILES = {
    "llm": "llm.safetensors",
    "connector": "connector.safetensors",
    "encoders": "encoders.safetensors",
}
_VISUAL_FILES = (
    WHOLE_FILES["connector"],
    WHOLE_FILES["encoders"],
    f"{ENCODERS_FOLDER}/{LORA_FILE}",
    f"{ENCODERS_FOLDER}/{LORA_CONFIG}",
)
RECIPE_FILE = "recipe.toml"
# How PEFT begins the name of each tensor.
LORA_PREFIX = "base_model.model."
# The part of the language model that no quantisation rewrites.
KEPT = "llm, without its linear layers"
_PIECE_BYTES = 256
# Settings of PEFT that change nothing of what is computed from the factors.
_HARMLESS = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "init_lora_weights",
    "megatron_core",
    "qalora_group_size",
}


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank factors of one part.

    Attributes:
        file: holds them. rank: inner width. scale: factor of their product.
        targets: ends of the names of the layers that they belong to.
    """

    file: Path
    rank: int
    scale: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """An earlier result that a result stands on.

    Attributes:
        places: where it may lie, the likeliest first. digest: of its manifest.
    """

    places: tuple[Path, ...]
    digest: str


@dataclass(frozen=True)
class Adapter:
    """One result folder, read and checked as far as it goes without the model.

    Attributes:
        folder: where it lies. digest: sha256 of its manifest.
        base_name, base_revision: the model that it was trained from.
        identity: of that model's weights, by part.
        method, stage, parts: how it was trained.
        links: results below this one, the lowest first.
        lora: low-rank factors by part. whole: files of whole parts, by part.
        files: sha256 by name.
    """

    folder: Path
    digest: str
    base_name: str
    base_revision: str | None
    identity: dict[str, str]
    method: str
    stage: int | str
    parts: tuple[str, ...]
    links: tuple[Link, ...]
    lora: dict[str, LoraSettings]
    whole: dict[str, Path]
    files: dict[str, str]

    @property
    def name(self) -> str:
        """What to call it."""
        return self.folder.name

    def describe(self) -> dict[str, Any]:
        """What an answer tells of it."""
        about = {"name": self.name, "stage": self.stage, "method": self.method}
        return about | {"id": self.digest[:12]}


def read_adapter(folder: Path | str) -> Adapter:
    """Read the manifest of a result and check that its files are there and unchanged.

    Raises:
        WeightsError: it is no result, or is damaged.
    """
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    place = folder / MANIFEST
    if not place.is_file():
        missing = "is a file" if folder.exists() else "does not exist"
        what = f"holds no {MANIFEST}" if folder.is_dir() else missing
        raise WeightsError(
            f"adapter {folder} {what}",
            "the folder of a finished training run is needed",
            "apollo finetune run RECIPE.toml makes one",
        )
    manifest = read_json(place)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise WeightsError(
            f"{place} is of the format {str(manifest.get('format'))[:40]!r}, "
            f"version {str(manifest.get('version'))[:10]}",
            f"read is {FORMAT}, version {VERSION}",
        )
    adapter = _build(folder, manifest, hashlib.sha256(place.read_bytes()).hexdigest())
    _check_files(adapter)
    return adapter


def _build(folder: Path, manifest: dict[str, Any], digest: str) -> Adapter:
    values = Values(manifest, MANIFEST, faults := [])
    base = values.inside("base")
    files = values.get("files", table_of(any_text))
    rows = values.get("adapters", list_of(table)) or ()
    links = [Values(row, f"{values.where}: adapters", faults) for row in rows]
    told = {
        "base_name": base.get("name", text),
        "base_revision": base.get("revision", nothing_or(text)),
        "identity": base.get("identity", table_of(any_text)),
        "method": values.get("method", text),
        "stage": values.get("stage", one_of(1, 2, 3, "custom")),
        "parts": values.get("parts", list_of(text)),
        "links": tuple(
            Link(
                (folder / (row.get("relative", text) or ""), Path(row.get("absolute", text) or "")),
                row.get("digest", text),
            )
            for row in links
        ),
    }
    if faults:
        raise WeightsError(
            f"{folder / MANIFEST} is damaged: {'; '.join(faults)}",
            next_step="run the training again",
        )
    lora = {
        part: _read_lora(folder, f"{place}{LORA_FILE}", f"{place}{LORA_CONFIG}")
        for part, place in LORA_PLACES.items()
        if f"{place}{LORA_FILE}" in files
    }
    whole = {part: folder / name for part, name in WHOLE_FILES.items() if name in files}
    known = {*WHOLE_FILES.values(), RECIPE_FILE}
    known |= {f"{place}{n}" for place in LORA_PLACES.values() for n in (LORA_FILE, LORA_CONFIG)}
    unknown = sorted(set(files) - known)
    if unknown or not (lora or whole):
        raise WeightsError(
            f"{folder / MANIFEST} names {name_some(unknown) or 'no tensors'}",
            f"known files are {name_some(sorted(known))}",
        )
    return Adapter(folder=folder, digest=digest, lora=lora, whole=whole, files=files, **told)


def _read_lora(folder: Path, file: str, config: str) -> LoraSettings:
    """Settings of low-rank factors; whatever changes the arithmetic and is not known is refused."""
    settings = read_json(folder / config)
    unknown = {
        key: value
        for key, value in settings.items()
        if value
        and key not in {*_HARMLESS, "peft_type", "r", "lora_alpha", "target_modules"}
        and (key, value) != ("bias", "none")
    }
    values = Values(settings, config, faults := [])
    values.get("peft_type", one_of("LORA"))
    rank = values.get("r", whole_number(1, 65536))
    alpha = values.get("lora_alpha", number(-1e6, 1e6))
    targets = values.get("target_modules", list_of(text))
    faults += [f"{values.where}: {key} is {show(value)}" for key, value in unknown.items()]
    if faults:
        raise WeightsError(
            f"{folder / config} has settings that are not read here: {'; '.join(faults)}",
            "read are plain low-rank factors with a rank, lora_alpha and a list of target_modules",
        )
    return LoraSettings(folder / file, rank, alpha / rank, targets)


def _check_files(adapter: Adapter) -> None:
    for name, expected in adapter.files.items():
        path = adapter.folder / name
        if not path.is_file():
            raise WeightsError(f"{path} is missing", next_step="run the training again")
        found = hash_file(path).sha256
        if found != expected:
            raise WeightsError(
                f"{path} has changed: its sha256 is {found}, not {expected}",
                next_step="run the training again, or put the right file back",
            )


def resolve_chain(folders: Sequence[Path | str]) -> tuple[Adapter, ...]:
    """All results that are put on a model, the lowest first.

    Args:
        folders: results; those that the last one stands on need not be named.

    Raises:
        WeightsError: one is missing or damaged, or they do not stand on each other.
    """
    if not folders:
        return ()
    named = [read_adapter(folder) for folder in folders]
    chain = (*(_follow(link, named[-1]) for link in named[-1].links), named[-1])
    digests = [adapter.digest for adapter in chain]
    for adapter in named:
        if adapter.digest not in digests:
            raise WeightsError(
                f"adapter {named[-1].folder} was not trained on top of {adapter.folder}",
                "each must have been trained on top of those in front of it",
                "name the last result alone: it knows what it stands on",
            )
    return chain


def _follow(link: Link, owner: Adapter) -> Adapter:
    for place in link.places:
        if (place / MANIFEST).is_file():
            adapter = read_adapter(place.resolve())
            if adapter.digest == link.digest:
                return adapter
    raise WeightsError(
        f"adapter {owner.folder} stands on {link.places[-1]}, which is missing or has changed",
        "all results of a chain are needed",
        "put it back, or train again on what is there now",
    )


def base_identity(checkpoint: Checkpoint) -> dict[str, str]:
    """The identity of a model's weights by part, whatever its name, place and number of files.

    Samples of every tensor stand for the whole, so that a large model takes a moment. A language
    model that is stored in fewer bits is known by what quantising leaves as it was.
    """
    identity = {part: _digest(tensors) for part, tensors in checkpoint.tensors.items()}
    if stored_kind(checkpoint) is not None:
        del identity[LLM]
    kept = {
        name: info
        for name, info in checkpoint.tensors[LLM].items()
        if ("_proj." not in name or name.endswith("_proj.bias"))
        and not (name == HEAD and checkpoint.tied_head)
    }
    return identity | {KEPT: _digest(kept)}


def _digest(tensors: dict[str, TensorInfo]) -> str:
    digest = hashlib.sha256()
    for name, info in sorted(tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape}".encode())
        with info.file.open("rb") as file:
            middle = (info.start + info.end - _PIECE_BYTES) // 2
            for start in (info.start, max(info.start, middle), info.end - _PIECE_BYTES):
                file.seek(max(info.start, start))
                digest.update(file.read(min(_PIECE_BYTES, info.size_bytes)))
    return digest.hexdigest()


def check_base(chain: Sequence[Adapter], found: Mapping[str, str], root: Path) -> None:
    """Check that results were trained from this model.

    A copy that stores its language model in fewer bits counts as the same model.

    Args:
        found: identity of the model, from ``base_identity``. root: its folder, for the message.

    Raises:
        WeightsError: one was trained from another model.
    """
    for adapter in chain:
        wanted = adapter.identity
        # Either may be the copy in fewer bits, whose language model is compared by the rest of it.
        compared = {*found, *wanted} - ({LLM} if LLM not in found or LLM not in wanted else set())
        parts = {part for part in compared if found.get(part) != wanted.get(part)}
        different = sorted({LLM if part == KEPT else part for part in parts})
        if different:
            named = adapter.base_name
            named += f"@{adapter.base_revision}" if adapter.base_revision else ""
            raise WeightsError(
                f"adapter {adapter.folder} was trained from {named}; {root} differs in "
                f"{name_some(different)}",
                "allowed is the model that it was trained from, under any name",
                f"use --model {shlex.quote(named)}",
            )


def visual_identity(chain: Sequence[Adapter]) -> str:
    """What of a chain changes visual tokens: empty when it leaves encoders and connector alone.

    Watched videos stay valid as long as this does.
    """
    hashes = [a.files[name] for a in chain for name in _VISUAL_FILES if name in a.files]
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes else ""
