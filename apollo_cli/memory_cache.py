"""Video memories that are found again by themselves, in a folder with a size limit."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import ApolloError, MediaError, UsageError
from apollo_cli.memory_record import SUFFIX, MemoryRecord, read_record
from apollo_cli.video.container import shown
from apollo_cli.video.sampler import ClipPlan
from apollo_cli.weights.adapter import Adapter, visual_identity
from apollo_cli.weights.checkpoint import Checkpoint
from apollo_cli.weights.files import apollo_cache, apollo_home

LIMIT_VARIABLE = "APOLLO_CACHE_GB"
DEFAULT_LIMIT_GB = 10.0
_SAMPLE_BYTES = 64 * 1024
_SAMPLES = 8
# Raised when pictures or times of some files are read otherwise than before: memories in the cache
# that an earlier reader made are then not served again.
_READER = "reader 2, "


@dataclass(frozen=True)
class CachedMemory:
    """One file of the cache."""

    path: Path
    record: MemoryRecord
    size_bytes: int
    used: float


def cache_folder() -> Path:
    """Where memories are kept."""
    return apollo_cache() / "memories"


def limit_bytes() -> int:
    """Most bytes that the cache may take: ``APOLLO_CACHE_GB``, else ten gigabytes.

    Raises:
        UsageError: the variable holds no amount.
    """
    text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_GB)
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not gigabytes >= 0:
        raise UsageError(f"{LIMIT_VARIABLE}={text}", "allowed are gigabytes, 0 or more, and inf")
    return int(min(gigabytes * 1e9, sys.maxsize))


def identify(path: Path, stream: int = 0) -> str:
    """The identity of a file: its path, size, time of change, and samples of its content.

    Raises:
        MediaError: it cannot be read any more.
    """
    try:
        facts = path.stat()
        told = f"\0{facts.st_size}\0{facts.st_mtime_ns}\0{stream}"
        # A name need not be UTF-8.
        digest = hashlib.sha256(os.fsencode(path) + told.encode())
        _add_samples(digest, path, facts.st_size)
    except OSError as error:
        raise MediaError(f"{shown(path)} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _add_samples(digest: hashlib._Hash, path: Path, size: int) -> None:
    """Pieces spread over a file stand for the whole, so that a large one takes milliseconds."""
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))


def fingerprint(checkpoint: Checkpoint, dtype: str, chain: Sequence[Adapter] = ()) -> str:
    """The identity of what makes visual tokens: encoders, connector, and how clips are cut.

    The language model and its precision do not enter: they only read the tokens. Of the results
    of training in ``chain``, what changes encoders or connector enters.
    """
    digest = hashlib.sha256((dtype + visual_identity(chain)).encode())
    keys = ("clip_duration", "frames_per_clip", "mm_vision_select_layer")
    digest.update(repr([checkpoint.config.get(key) for key in keys]).encode())
    digest.update(repr(checkpoint.encoder_names).encode())
    for part, tensors in sorted(checkpoint.tensors.items()):
        if part == "llm":
            continue
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{part}/{name} {tensor.dtype} {tensor.shape}".encode())
        for file in sorted({tensor.file for tensor in tensors.values()}):
            _add_samples(digest, file, file.stat().st_size)
    return digest.hexdigest()


def place_for(source: str, model: str, plan: ClipPlan) -> Path:
    """Where the memory of a plan goes."""
    digest = hashlib.sha256(f"{_READER}{source}{model}{plan.clip_seconds}".encode())
    digest.update(plan.times.tobytes())
    return cache_folder() / f"{source[:12]}-{digest.hexdigest()[:20]}{SUFFIX}"


def find_memory(
    source: str, model: str, plan: ClipPlan, reading: ReadingOptions | None = None
) -> Path | None:
    """The memory of the same file by the same model that shows exactly the clips of the plan.

    A memory that shows more or other clips is no match: the nearest of its clips would give
    another answer than watching does.

    Args:
        reading: how the pictures would be read now; another decoder's are not taken, and where
            damage is an error, only those that are known to be sound. None is the default.
    """
    reading = reading or ReadingOptions()
    path = place_for(source, model, plan)
    if not is_own(path):
        return None
    try:
        record = read_record(path)
    except ApolloError:
        # None, cut, or of another version: it will be written anew.
        return None
    alike = (record.source, record.fingerprint, record.decoder) == (source, model, reading.decoder)
    return path if alike and (record.damaged == 0 or not reading.strict) else None


def prune(limit: int) -> int:
    """Delete the memories that were not used for longest until the rest takes ``limit`` bytes.

    Returns:
        Bytes freed.
    """
    memories = list_memories()
    total, freed = sum(memory.size_bytes for memory in memories), 0
    while memories and total - freed > limit:
        oldest = memories.pop()
        oldest.path.unlink(missing_ok=True)
        freed += oldest.size_bytes
    return freed


def remove(name: str) -> int:
    """Delete the memories of one video, or one memory.

    Args:
        name: path of the video, which may be gone; or path or name of a file of the cache.

    Returns:
        Bytes freed.

    Raises:
        UsageError: nothing is remembered of it.
    """
    path = Path(os.path.realpath(name))
    found = [
        memory
        for memory in list_memories()
        if memory.path.name == name
        or Path(os.path.realpath(memory.path)) == path
        or Path(os.path.realpath(memory.record.path)) == path
    ]
    if not found:
        raise UsageError(f"{name}: nothing is remembered of it", next_step="see apollo cache list")
    for memory in found:
        memory.path.unlink(missing_ok=True)
    return sum(memory.size_bytes for memory in found)


def clear() -> int:
    """Delete all memories, finished or not; folders are not ours and stay.

    Returns:
        Bytes freed.
    """
    freed = 0
    for path in cache_folder().glob("*"):
        with suppress(FileNotFoundError):
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode):
                path.unlink()
                freed += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return freed


def list_memories() -> list[CachedMemory]:
    """All readable memories, the one that was used last first."""
    found = []
    for path in cache_folder().glob(f"*{SUFFIX}"):
        try:
            if is_own(path):
                record, facts = read_record(path), path.stat()
                found.append(CachedMemory(path, record, facts.st_size, facts.st_mtime))
        except (ApolloError, OSError):
            continue
    return sorted(found, key=lambda memory: memory.used, reverse=True)


def is_own(path: Path) -> bool:
    """Whether an entry of the cache is a plain file: links and pipes are not followed or read."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def adopt_old() -> str | None:
    """Move memories to where they are kept now, from the user's data folder, where they were.

    Returns:
        What was done, as a sentence; None where there was nothing to do.
    """
    old, new = apollo_home() / "memories", cache_folder()
    if old == new or not old.is_dir() or old.is_symlink() or new.exists():
        return None
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(old, new)
    except OSError:
        return None
    return f"remembered videos were moved from {old} to {new}"
