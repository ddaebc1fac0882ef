"""Files that are written whole or not at all: whoever reads one sees the old text or the new."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def workshop(target: Path) -> Iterator[Path]:
    """A place beside a folder to be, for what is not whole yet; nobody else has it.

    Yields:
        A path at which the folder is made, to be renamed to the target when it is whole.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".apollo-", dir=target.parent))
    try:
        # Inside of it, since the place itself is for its owner alone.
        yield place / target.name
    finally:
        shutil.rmtree(place, ignore_errors=True)
