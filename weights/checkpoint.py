"""Which layers go into how many bits, and what that takes; without torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from apollo_cli.errors import WeightsError
from apollo_cli.values import Values, any_text, flag, nothing_or, one_of, show
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

QuantKind = Literal["4bit", "8bit"]
KINDS: tuple[QuantKind, ...] = ("4bit", "8bit")
# Columns of activations with a value past this stay in 16 bits (LLM.int8, arXiv:2208.07339).
OUTLIER_THRESHOLD = 6.0
# The output head stays whole, by its name inside the language model.
SKIPPED = ("lm_head",)
# Where bitsandbytes runs for us.
DEVICES = ("cpu", "cuda")
# The share of a row that one 4-bit scale covers. The CPU kernel of bitsandbytes 0.50 takes the
# wrong scales, without an error, where rows do not hold whole blocks.
BLOCK = 64
# Scales are quantised in their turn, to 8 bits in groups of this many under one float32.
_SCALE_GROUP = 256
_CODE_BYTES = 16 * 4 + 256 * 4
_ROW_ALIGNMENT = 4


def fits_quantisation(kind: QuantKind, in_features: int) -> bool:
    """Whether a layer can be quantised: rows of whole blocks, or rows that a GPU can align."""
    return in_features % (BLOCK if kind == "4bit" else _ROW_ALIGNMENT) == 0


def quantised_bytes(kind: QuantKind, out_features: int, in_features: int) -> int:
    """Memory of one quantised weight with its scales."""
    values = out_features * in_features
    if kind == "8bit":
        return values + 4 * out_features
    blocks = values // BLOCK
    return values // 2 + blocks + 4 * -(-blocks // _SCALE_GROUP) + _CODE_BYTES


def stored_kind(checkpoint: Checkpoint) -> QuantKind | None:
    """In how many bits a checkpoint stores its language model; None when it is not quantised.

    Raises:
        WeightsError: it is quantised in a way that is not read here.
    """
    if checkpoint.llm_config.get("quantization_config") is None:
        return None
    faults: list[str] = []
    config = Values(checkpoint.llm_config, "llm/config.json", faults).inside("quantization_config")
    method = config.get("quant_method", any_text, "bitsandbytes")
    kinds: list[QuantKind] = [
        kind for kind in KINDS if config.get(f"load_in_{kind}", nothing_or(flag), None)
    ]
    if "8bit" in kinds:
        # Another one changes the numbers, and is not built here.
        config.get("llm_int8_threshold", one_of(OUTLIER_THRESHOLD, int(OUTLIER_THRESHOLD)), None)
    if not faults and (method != "bitsandbytes" or len(kinds) != 1):
        told = " and ".join(kinds) or "neither 4bit nor 8bit"
        faults.append(f"{config.where} is of {show(method)}, {told}")
    if not faults:
        return kinds[0]
    raise WeightsError(
        "; ".join(faults),
        "read are 4-bit and 8-bit weights of bitsandbytes",
        "take the checkpoint that it was made from, with --quant",
    )


def allowed_kinds(
    wanted: QuantKind | None, device: str, stored: QuantKind | None = None
) -> tuple[QuantKind | None, ...]:
    """The precisions that a run may go down to, the wanted one first.

    Args:
        wanted: what was asked for; None is the dtype of the run.
        device: where it runs.
        stored: how the checkpoint is stored; a quantised one stays so.
    """
    if stored is not None:
        return (stored,)
    runs = device.partition(":")[0] in DEVICES and importlib.util.find_spec("bitsandbytes")
    order: tuple[QuantKind | None, ...] = (None, "8bit", "4bit")
    below = order[order.index(wanted) + 1 :]
    return (wanted, *below) if runs else (wanted,)


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
