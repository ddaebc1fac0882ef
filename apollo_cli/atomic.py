"""Files that are written whole or not at all: whoever reads one sees the old text or the new."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Give a file a new content in one step.

    Args:
        content: text is written as UTF-8.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    raw = content.encode() if isinstance(content, str) else content
    return make_whole(path, lambda fresh: fresh.write_bytes(raw))


def make_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Let something be written under another name, and give it its own when that is done.

    A link is followed. What is no plain file, like a terminal or a pipe, is written as it stands.

    Args:
        write: writes the file whose path it is given.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        write(target)
        return path
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        write(fresh)
        fresh.replace(target)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    return path
