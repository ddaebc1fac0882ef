"""The tensors of a checkpoint under their released names, from safetensors headers alone.

A header names every tensor with its dtype, shape and byte range, so a folder of many gigabytes
is listed and checked for completeness in milliseconds, without torch. A file may put a prefix in
front of all names, leave the released prefix out, or hold all parts at once. The first tensor of
a part tells which part it is and which prefix its names have.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.weights.files import (
    PICKLE_SUFFIXES,
    is_lfs_pointer,
    is_plain_name,
    parse_json_object,
    read_json,
)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_LIMIT_BYTES = 100_000_000
_LENGTH_BYTES = 8
_NAMED_AT_MOST = 6

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: as the header spells it, such as ``BF16``.
        shape: as stored.
        file: the safetensors file.
        start: first byte in the file, counted from its beginning.
        end: one past the last byte.
        key: its name in the file, which may have a prefix that the released names do not have.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    key: str

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.start

    @property
    def elements(self) -> int:
        """Number of values."""
        return prod(self.shape)


Tensors = dict[str, TensorInfo]


def read_header(path: Path, *, label: str | None = None) -> dict[str, TensorInfo]:
    """List the tensors of one safetensors file and check that all their bytes are there.

    Args:
        path: the file; only its header is read.
        label: what to call it in an error; None takes the path.

    Raises:
        WeightsError: it is missing, cut, too long, or not a safetensors file.
    """
    label = label or str(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES)
            if is_lfs_pointer(start + file.read(16)):
                raise WeightsError(f"{label} is a Git LFS pointer, not the file")
            length = int.from_bytes(start, "little")
            if len(start) < _LENGTH_BYTES:
                raise WeightsError(f"{label} is cut: {size} bytes, not even a header")
            if length > HEADER_LIMIT_BYTES:
                raise WeightsError(f"{label} is not a safetensors file")
            if _LENGTH_BYTES + length > size:
                raise WeightsError(
                    f"{label} is cut: {size} bytes, its header alone needs {_LENGTH_BYTES + length}"
                )
            file.seek(_LENGTH_BYTES)
            raw = file.read(length)
    except OSError as error:
        raise WeightsError(f"{label} cannot be read ({error.strerror or error})") from None
    header = parse_json_object(raw, f"the header of {label}")
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    tensors = {key: _tensor(key, entry, path, data_start, label) for key, entry in header.items()}
    _check_extent(tensors, data_start, size, label)
    return tensors


def _tensor(key: str, entry: Any, path: Path, data_start: int, label: str) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        bits = DTYPE_BITS[dtype] * prod(shape)
        fits = all(type(n) is int and n >= 0 for n in numbers) and 8 * (end - begin) == bits
        if fits:
            return TensorInfo(dtype, shape, path, data_start + begin, data_start + end, key)
    except (KeyError, TypeError, ValueError):
        pass
    raise WeightsError(f"{label} describes the tensor {key[:80]!r} wrongly: {str(entry)[:120]}")


def _check_extent(tensors: dict[str, TensorInfo], data_start: int, size: int, label: str) -> None:
    expected = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start != expected:
            raise WeightsError(f"{label} has overlapping tensors or holes between them")
        expected = info.end
    if size < expected:
        raise WeightsError(f"{label} is cut: {size} bytes, its header says {expected}")
    if size > expected:
        raise WeightsError(f"{label} has {size} bytes, its header says {expected}")


def list_tensors(folder: Path, faults: list[str], *, label: str = "") -> dict[str, TensorInfo]:
    """List the tensors of one folder, in one file or in shards with an index.

    Args:
        folder: holds ``model.safetensors``, or an index and its shards.
        faults: everything that is wrong is appended here, so that a caller can report all
            faults of all folders at once.
        label: how the folder is called in a fault, such as ``llm/``.

    Returns:
        Tensor name to place. Incomplete when faults were added.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return _header_or_fault(single, faults, label + SINGLE_FILE)
    if index.is_file():
        return _sharded(folder, faults, label)
    faults.append(_why_no_weights(folder, label))
    return {}


def has_tensors(folder: Path) -> bool:
    """Whether a folder holds weights of its own, in one file or in shards."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


def _header_or_fault(path: Path, faults: list[str], label: str) -> dict[str, TensorInfo]:
    try:
        return read_header(path, label=label)
    except WeightsError as error:
        faults.append(error.message)
        return {}


def _sharded(folder: Path, faults: list[str], label: str) -> dict[str, TensorInfo]:
    try:
        weight_map = read_json(folder / INDEX_FILE, label=label + INDEX_FILE).get("weight_map")
    except WeightsError as error:
        faults.append(error.message)
        return {}
    if not isinstance(weight_map, dict) or not weight_map:
        faults.append(f"{label}{INDEX_FILE} has no weight_map")
        return {}
    keys_of: dict[Any, list[str]] = {}
    for key, shard in weight_map.items():
        if not is_plain_name(shard):
            faults.append(
                f"{label}{INDEX_FILE} points outside of its folder ({str(shard)[:80]!r}): refused"
            )
            return {}
        keys_of.setdefault(shard, []).append(key)
    tensors: dict[str, TensorInfo] = {}
    for shard, keys in sorted(keys_of.items()):
        if not shard.endswith(".safetensors"):
            faults.append(f"{label}{INDEX_FILE} names {shard}: only safetensors files are read")
        elif not (folder / shard).is_file():
            faults.append(_missing_file(folder, shard, label))
        else:
            header = _header_or_fault(folder / shard, faults, label + shard)
            absent = [key for key in keys if key not in header]
            if header and absent:
                faults.append(f"{label}{shard} lacks {name_some(absent)}, which the index promises")
            tensors |= {key: header[key] for key in keys if key in header}
    return tensors


def _missing_file(folder: Path, name: str, label: str) -> str:
    stopped = (folder / f"{name}.incomplete").exists()
    rest = " (a stopped download left an .incomplete file)" if stopped else ""
    return f"{label}{name} is missing{rest}"


def _why_no_weights(folder: Path, label: str) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles:
        return (
            f"{label}{pickles[0]} is a pickle, which can run code and is not read: "
            f"{label}{SINGLE_FILE} is needed"
        )
    if any(name.endswith(".safetensors") for name in names):
        return f"{label}{INDEX_FILE} is missing, which says what the shards hold"
    return _missing_file(folder, SINGLE_FILE, label)


def name_some(names: list[str]) -> str:
    """The first few names and how many more there are."""
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class _Mark:
    """The tensor by which a part is known: the released prefix of its names, and the rest."""

    prefix: str
    rest: str

    def places(self, names: Tensors) -> list[str]:
        """What stands in front of it, wherever it may be in a file; the shortest first."""
        ends = [n for n in names if n == self.rest or n.endswith(f".{self.rest}")]
        return sorted((name.removesuffix(self.rest) for name in ends), key=len)

    def extra(self, ahead: str) -> str:
        """The part of it that the released names do not have."""
        return ahead.removesuffix(self.prefix)


def _mark(part: str) -> _Mark:
    if part == "llm":
        return _Mark("model.", "embed_tokens.weight")
    if part == "mm_connector":
        return _Mark("", "proj.0.weight")
    if "siglip" in part.lower():
        return _Mark("vision_model.", "embeddings.patch_embedding.weight")
    return _Mark("", "patch_embed.proj.weight")


def rename(part: str, tensors: Tensors, faults: list[str], notes: list[str]) -> Tensors:
    """The tensors of one part under their released names.

    Args:
        part: ``llm``, ``mm_connector`` or ``vision_tower/<name>``.
        tensors: by their names in the file.
        faults: what stands in the way is added. notes: what was done is added.
    """
    mark = _mark(part)
    places = mark.places(tensors)
    if mark.prefix in places or not tensors:
        return tensors
    if not places:
        begin = _common_begin(tensors)
        told = f"all its keys begin with {begin!r}" if begin else f"it has {_some(tensors)}"
        faults.append(f"{part} lacks the tensor {mark.prefix}{mark.rest}; {told}")
        return tensors
    extra = mark.extra(places[0])
    others = [name for name in tensors if not name.startswith(extra)]
    if others:
        faults.append(f"{part}: not all keys begin with {extra!r} ({_some(others)})")
        return tensors
    lacking = "" if places[0].endswith(mark.prefix) else mark.prefix
    if extra:
        notes.append(f"{part}: all keys begin with {extra!r}, which is left out")
    if lacking:
        notes.append(f"{part}: the keys lack {lacking!r}, which is put in front")
    short = {name.removeprefix(extra): info for name, info in tensors.items()}
    return {name if name == HEAD else lacking + name: info for name, info in short.items()}


def split(
    tensors: Tensors, parts: list[str], faults: list[str], notes: list[str]
) -> dict[str, Tensors]:
    """Share the tensors of one file out to the parts that it holds.

    Args:
        tensors: of the whole file. parts: those that are to be found in it.
        faults: parts that are not found are added. notes: what was done is added.

    Returns:
        Tensors by part, under their names in the file.
    """
    begins: dict[str, str] = {}
    for part in parts:
        mark, name = _mark(part), part.rpartition("/")[2]
        places = mark.places(tensors)
        named = [place for place in places if f"{name}." in place]
        found = {mark.extra(place) for place in named or places}
        if len(found) == 1:
            begins[part] = found.pop()
        else:
            told = f"{len(found)} keys end so" if found else f"there are {_some(tensors)}"
            faults.append(
                f"model.safetensors lacks {part}: no one key ends in {mark.rest} ({told})"
            )
    shared: dict[str, Tensors] = {part: {} for part in parts}
    left = []
    for name, info in tensors.items():
        fitting = [part for part, begin in begins.items() if name.startswith(begin)]
        if fitting:
            shared[max(fitting, key=lambda part: len(begins[part]))][name] = info
        else:
            left.append(name)
    notes.append(f"model.safetensors holds {', '.join(parts)} in one file")
    if left:
        notes.append(f"model.safetensors: {len(left)} tensors belong to no part ({_some(left)})")
    return shared


def _common_begin(names: Tensors) -> str:
    """The pieces up to dots with which all names begin."""
    first, last = (name.split(".") for name in (min(names), max(names)))
    pairs = zip(first, last, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))
    return "".join(f"{piece}." for piece in first[:same])


def _some(names: Tensors | list[str]) -> str:
    return name_some([name[:80] for name in names])
