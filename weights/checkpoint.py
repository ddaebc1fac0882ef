"""A checkpoint in the released layout: found, listed and checked without torch.

    <root>/config.json
    <root>/llm/                  config, tokenizer, safetensors
    <root>/vision_tower/         config with the ordered list ``vision_towers``
    <root>/vision_tower/<name>/  config, safetensors
    <root>/mm_connector/         config, safetensors

The weights of parts that have none of their own may lie together in <root>/model.safetensors.
The root config of a release also holds copies of the component configs and paths of the machine
it was trained on. A component's own file wins over the copy, key by key; the paths are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.weights.files import is_plain_name, read_json
from apollo_cli.weights.shards import (
    EMBEDDING,
    HEAD,
    TensorInfo,
    has_tensors,
    list_tensors,
    name_some,
    rename,
    split,
)

__all__ = ["HEAD", "Checkpoint", "TensorInfo", "encoder_part", "read_checkpoint", "read_json"]

LLM, CONNECTOR, TOWER = "llm", "mm_connector", "vision_tower"


def encoder_part(name: str) -> str:
    """The key of an encoder in `Checkpoint.tensors`."""
    return f"{TOWER}/{name}"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder holds. Everything is plain data; no weight has been read.

    Attributes:
        root: the folder, absolute.
        config: the root config.
        llm_config: the language model's config.
        connector_config: the connector's config.
        tower_config: the config of the vision tower as a whole.
        encoder_names: vision encoders, in the order of the channel concat.
        encoder_configs: config by encoder name.
        tensors: by part (``llm``, ``mm_connector``, ``vision_tower/<name>``), then by tensor name.
        generation_config: of the language model; empty when there is none.
        preprocessor_configs: by encoder name; empty where there is none.
        tokenizer: the folder of its files. notes: what was found otherwise than released.
    """

    root: Path
    config: dict[str, Any]
    llm_config: dict[str, Any]
    connector_config: dict[str, Any]
    tower_config: dict[str, Any]
    encoder_names: tuple[str, ...]
    encoder_configs: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, TensorInfo]]
    generation_config: dict[str, Any]
    preprocessor_configs: dict[str, dict[str, Any]]
    tokenizer: Path
    notes: tuple[str, ...]

    @property
    def tied_head(self) -> bool:
        """Whether the language model's head is its embedding."""
        return HEAD not in self.tensors[LLM] or bool(self.llm_config.get("tie_word_embeddings"))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(info.size_bytes for part in self.tensors.values() for info in part.values())

    @property
    def parameters(self) -> dict[str, int]:
        """Number of stored values by part."""
        return {part: sum(info.elements for info in t.values()) for part, t in self.tensors.items()}


def read_checkpoint(path: Path) -> Checkpoint:
    """Find all parts of a checkpoint and check that they are complete.

    Args:
        path: the root folder.

    Raises:
        WeightsError: something is missing, cut, unreadable or refused; lists every fault.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise WeightsError(
            f"checkpoint {path} {what}",
            "a folder with config.json, llm/, vision_tower/ and mm_connector/ is needed",
            "apollo models list shows known names",
        )
    reader = _Reader(path.absolute())
    checkpoint = reader.read()
    if reader.faults:
        raise WeightsError(
            f"checkpoint {path} cannot be used: {'; '.join(reader.faults)}",
            "",
            "put the named files in place, or run apollo models pull again, which resumes",
        )
    return checkpoint


class _Reader:
    """One pass over a folder that collects faults instead of stopping at the first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.absent: set[str] = set()

    def read(self) -> Checkpoint:
        config = self._json("config.json", needed=True)
        if not has_tensors(self.root):
            self.absent = {p for p in (LLM, TOWER, CONNECTOR) if not (self.root / p).is_dir()}
        if len(self.absent) == 3:
            # A flat folder without weights: what is wrong with its own files is still told.
            list_tensors(self.root, self.faults)
        self.faults += [f"{part}/ is missing" for part in sorted(self.absent)]
        tower = self._component(TOWER, config)
        names = self._encoder_names(tower)
        copies = tower.get("configs")
        copies = copies if isinstance(copies, dict) else {}
        tensors = self._tensors([LLM, CONNECTOR, *map(encoder_part, names)])
        checkpoint = Checkpoint(
            root=self.root,
            config=config,
            llm_config=self._component(LLM, config),
            connector_config=self._component(CONNECTOR, config),
            tower_config=tower,
            encoder_names=names,
            encoder_configs={
                n: self._merged(
                    encoder_part(n), copies.get(n) if isinstance(copies, dict) else None
                )
                for n in names
            },
            tensors=tensors,
            generation_config=self._json(f"{LLM}/generation_config.json"),
            preprocessor_configs={
                n: self._json(f"{encoder_part(n)}/preprocessor_config.json") for n in names
            },
            tokenizer=self._tokenizer(),
            notes=tuple(self.notes),
        )
        self._check_head(checkpoint)
        return checkpoint

    def _json(self, relative: str, *, needed: bool = False) -> dict[str, Any]:
        path = self.root / relative
        if not needed and not path.is_file():
            return {}
        try:
            return read_json(path, label=relative)
        except WeightsError as error:
            self.faults.append(error.message)
            return {}

    def _component(self, part: str, config: dict[str, Any]) -> dict[str, Any]:
        return self._merged(part, config.get(f"{part}_cfg"))

    def _merged(self, part: str, copy: Any) -> dict[str, Any]:
        """A config of its own, completed from its copy; how weights are stored is its own alone."""
        copy = copy if isinstance(copy, dict) else {}
        own = self._json(f"{part}/config.json", needed=not copy and part not in self.absent)
        return {k: v for k, v in copy.items() if k != "quantization_config" or not own} | own

    def _encoder_names(self, tower: dict[str, Any]) -> tuple[str, ...]:
        where, place = f"{TOWER}/config.json", self.root / TOWER
        names = tower.get("vision_towers")
        if TOWER in self.absent or not tower:
            return ()
        if names is None:
            found = sorted(p.parent.name for p in place.glob("*/config.json"))
            if len(found) == 1:
                return tuple(found)
            self.faults.append(
                f"{where} has no vision_towers, the list of encoders in their order"
                + (f" (there are {name_some(found)})" if found else "")
            )
            return ()
        if not isinstance(names, list) or not names or not all(map(is_plain_name, names)):
            self.faults.append(f"{where} has vision_towers {str(names)[:120]}: names are needed")
            return ()
        if len(set(names)) < len(names):
            self.faults.append(f"{where} names an encoder twice: {name_some(names)}")
            return ()
        lost = [n for n in names if not has_tensors(self.root) and not (place / n).is_dir()]
        if lost:
            self.faults.append(f"{where}: vision_towers names {name_some(lost)}: no such folder")
        return tuple(names)

    def _tensors(self, parts: list[str]) -> dict[str, dict[str, TensorInfo]]:
        """The tensors of each part: from files of its own, or else from one for all parts."""
        is_flat = has_tensors(self.root)
        shared = [p for p in parts if is_flat and not has_tensors(self.root / p)]
        found = {
            part: list_tensors(self.root / part, self.faults, label=f"{part}/")
            for part in parts
            if part not in shared and part not in self.absent
        }
        if shared:
            found |= split(list_tensors(self.root, self.faults), shared, self.faults, self.notes)
        return {p: rename(p, found.get(p, {}), self.faults, self.notes) for p in parts}

    def _tokenizer(self) -> Path:
        folder = self.root / LLM
        slow = ("vocab.json", "merges.txt")
        for place in (folder, self.root):
            lacking = [name for name in slow if not (place / name).is_file()]
            if not lacking or (place / "tokenizer.json").is_file():
                return place
        lacking = [name for name in slow if not (folder / name).is_file()]
        self.faults.append(
            f"the tokenizer is missing: {LLM}/tokenizer.json, or "
            + " and ".join(f"{LLM}/{name}" for name in lacking)
        )
        return folder

    def _check_head(self, checkpoint: Checkpoint) -> None:
        tensors = checkpoint.tensors[LLM]
        untied = checkpoint.llm_config.get("tie_word_embeddings") is False
        if EMBEDDING in tensors and HEAD not in tensors and untied:
            self.faults.append(
                f"{LLM}/ has no {HEAD}, and its config says that the head is not tied"
            )
