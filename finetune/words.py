"""How counts and places stand in a sentence."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from apollo_cli.words import count as count  # noqa: PLC0414  # counts here as everywhere

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
}


def kind_of(value: Any) -> str:
    """What a value of JSON is, such as ``a list``."""
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return words.get(type(value), "nothing" if value is None else "a number")


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
