"""Tensor names as files spell them, brought to the released ones.

A file may put one more prefix in front of all its names, leave the released prefix out, or hold
all parts at once. Each part is known by its first tensor, and everything else follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from apollo_cli.weights.shards import TensorInfo, name_some

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, TensorInfo]


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
