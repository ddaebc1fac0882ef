"""Files that are written whole or not at all: whoever reads one sees the old text or the new."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from apollo_cli.errors import UsageError

# A run that is just starting has not locked its folder yet.
_STARTING_SECONDS = 60.0


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
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.new"):
        if not _is_running(left.name.split(".")[-2]):
            with suppress(OSError):
                left.unlink()
    try:
        write(fresh)
        fresh.replace(target)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    return path


def _is_running(process: str) -> bool:
    """Whether a process with this number may be running; True where that cannot be known."""
    if os.name == "nt" or not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@contextmanager
def held(path: Path, remark: Callable[[str], None]) -> Iterator[None]:
    """Keep other runs from writing to a file while this one does.

    Args:
        remark: told where the file system has no locks; the run goes on without one.

    Raises:
        UsageError: another run writes to it, or its folder is not there.
    """
    from filelock import FileLock, Timeout

    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise UsageError(f"-o {path}", next_step=f"make the folder {target.parent} first")
    if target.exists() and not target.is_file():
        yield
        return
    mark = target.with_name(f".{target.name}.lock")
    lock = FileLock(mark)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        next_step = "wait for it to end, or choose another file"
        raise UsageError(f"-o {path} is being written by another run", "", next_step) from None
    except (OSError, NotImplementedError) as error:
        remark(f"{path} cannot be locked ({error}): let no other run write to it")
        yield
        return
    try:
        yield
    finally:
        # Before the lock is given up: whoever takes it next makes a file of their own.
        with suppress(OSError):
            mark.unlink()
        lock.release()


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder for unfinished work, deleted at the end, as are those that killed runs have left.

    A running owner holds the lock inside its folder; a folder whose lock is free has no owner.

    Args:
        prefix: how its name begins, and the names of those that are cleared.
        parent: where it is made; None is the system's folder for temporary files.
    """
    from filelock import FileLock, Timeout

    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob(f"{prefix}*/lock"):
        with suppress(OSError, Timeout):
            facts = left.parent.lstat()
            is_ours = facts.st_uid == getattr(os, "geteuid", int)()
            if is_ours and time.time() - facts.st_mtime > _STARTING_SECONDS:
                with FileLock(left, timeout=0):
                    shutil.rmtree(left.parent, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).resolve()
    try:
        with FileLock(place / "lock"):
            (place / "files").mkdir()
            yield place / "files"
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def workshop(target: Path) -> Iterator[Path]:
    """A place beside a folder to be, for what is not whole yet; nobody else has it.

    Yields:
        A path at which the folder is made, to be renamed to the target when it is whole.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(".apollo-work-", target.parent) as place:
        # Inside of it, since the place itself is for its owner alone.
        yield place / target.name
