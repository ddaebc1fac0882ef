"""Files and folders that a recipe names: what is missing, and what a run would write over."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from apollo_cli.errors import ApolloError
from apollo_cli.weights.adapter import MANIFEST
from apollo_cli.weights.files import hash_file, read_json

TABLES = ("data", "validation")
# Files of a result that other files are called by too.
_COMMON_NAMES = ("recipe.toml", "log.jsonl", "run.json", "quarantine.jsonl", "loss.png")
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
}


def spell(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(spell(item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's as well, but for this character.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def tidy(path: Path | str) -> Path:
    """A path from the root on, without steps up and down; links in it are not followed."""
    return Path(os.path.abspath(Path(path).expanduser()))


def describe_place(path: Path) -> str:
    """What is at a path, such as ``is a folder`` or ``does not exist``."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be looked at ({error.strerror or error})"
    return f"is {_KINDS.get(kind, 'a device or socket')}"


def write_obstacle(folder: Path) -> str:
    """Why a folder cannot be made or written to; empty where it can. Nothing is left there."""
    place = folder
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".apollo-", dir=place):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def list_missing(values: dict[str, Any], coming: Collection[Path] | None) -> Iterator[str]:
    """What a recipe needs and does not find, in words.

    Args:
        values: of the recipe. coming: results that need not be there yet; None is any.
    """
    for name in TABLES:
        for source in values.get(name, ()):
            if not source.path.is_file():
                yield f"{name}: {source.path} {describe_place(source.path)}; name a file"
            if source.media is not None and not source.media.is_dir():
                place = describe_place(source.media)
                yield f"{name}: media folder {source.media} {place}; name a folder"
    for adapter in list_absent(values.get("adapters", ())):
        if coming is not None and adapter not in coming:
            yield f"adapters: {adapter} holds no result; run the recipe that writes it first"
    output = values.get("output")
    if output is not None and output.exists() and not output.is_dir():
        yield f"output: {output} is a file; name a folder"


def list_absent(adapters: Collection[Path]) -> list[Path]:
    """Those of some folders that hold no result."""
    return [adapter for adapter in adapters if not (adapter / MANIFEST).is_file()]


def list_overlaps(recipe: Path, values: dict[str, Any]) -> Iterator[str]:
    """What the output of a recipe would destroy, in words.

    Args:
        recipe: its file. values: of it.
    """
    output = values.get("output")
    if output is None:
        return
    place = _real(output)
    for adapter in values.get("adapters", ()):
        for folder in (adapter, *_stands_on(adapter)):
            other = _real(folder)
            if place == other or place in other.parents or other in place.parents:
                yield (
                    f"output: {output} is, holds or lies in {folder}, which this run starts from; "
                    "name another folder"
                )
                break
    sources = [(name, source) for name in TABLES for source in values.get(name, ())]
    files = [(f"a file of {name}", source.path) for name, source in sources]
    if not _is_of_result(recipe, place):
        files.insert(0, ("this recipe", recipe))
    owned = [(what, path.parent) for what, path in files]
    owned += [("the media", source.media) for _, source in sources if source.media is not None]
    taken = next((what for what, folder in owned if place == _real(folder)), None)
    if taken is None:
        written = {_real(output / name) for name in _COMMON_NAMES}
        taken = next((what for what, path in files if _real(path) in written), None)
    if taken is not None:
        yield (
            f"output: {output} is the folder of {taken}, and a run writes over files there; "
            "name a folder of its own"
        )


def list_doubles(values: dict[str, Any]) -> Iterator[str]:
    """Files of data that are named twice, each time with other media: samples have one name."""
    media: dict[Path, Path] = {}
    for source in (source for name in TABLES for source in values.get(name, ())):
        place = _real(source.path)
        folder = _real(source.media or source.path.parent)
        if media.setdefault(place, folder) != folder:
            yield f"data: {source.path} is named twice, with two media folders; copy the file"


def _is_of_result(recipe: Path, output: Path) -> bool:
    """Whether a recipe is the one that a run wrote down beside its result there."""
    try:
        written = read_json(output / MANIFEST)["files"]["recipe.toml"]
        return _real(recipe).parent == output and hash_file(recipe).sha256 == written
    except (ApolloError, OSError, KeyError, TypeError):
        return False


def _stands_on(adapter: Path) -> Iterator[Path]:
    """The folders of earlier results below one, as far as its manifest can be read."""
    try:
        for row in read_json(adapter / MANIFEST)["adapters"]:
            yield adapter / str(row["relative"])
            yield Path(str(row["absolute"]))
    except (ApolloError, OSError, KeyError, TypeError):
        # Whatever is wrong with it is told when it is read.
        return


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
