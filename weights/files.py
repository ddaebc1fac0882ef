"""Small readers for files that come from elsewhere: nothing is trusted, nothing is run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from platformdirs import user_cache_path, user_data_path

from apollo_cli.atomic import write_whole
from apollo_cli.errors import WeightsError
from apollo_cli.values import Values, any_text, parse_object, table, table_of, text, whole

JSON_LIMIT_BYTES = 32 * 1024 * 1024
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LFS_START = b"version https://git-lfs"


def apollo_home() -> Path:
    """Where this program keeps its own records: ``APOLLO_HOME``, or the user's data folder."""
    return _chosen_home() or _with_home(user_data_path("apollo", appauthor=False))


def apollo_cache() -> Path:
    """Where this program keeps what can be made again: ``APOLLO_HOME``, or the cache folder."""
    return _chosen_home() or _with_home(user_cache_path("apollo", appauthor=False))


def _chosen_home() -> Path | None:
    chosen = os.environ.get("APOLLO_HOME")
    return Path(os.path.expanduser(chosen)).absolute() if chosen else None


def _with_home(folder: Path) -> Path:
    """The folder; where the user has no home, as in containers, one among temporary files."""
    return folder if folder.is_absolute() else homeless_folder() / folder.name


@cache
def homeless_folder() -> Path:
    """A folder of this user's own among temporary files, the same in each run where possible."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    place = Path(tempfile.gettempdir()) / f"apollo-{user}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        facts = place.lstat()
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == user:
            return place
    except OSError:
        pass
    # Somebody else was there first.
    return Path(tempfile.mkdtemp(prefix="apollo-"))


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that starts like this is a Git LFS pointer instead of the file itself."""
    return start.startswith(_LFS_START)


def is_commit(text: object) -> bool:
    """Whether this is a whole commit: 40 hexadecimal digits."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def is_plain_name(name: object) -> bool:
    """Whether a name from a config is one file or folder name, on every operating system."""
    if not isinstance(name, str) or not name.isprintable() or name in {"", ".", ".."}:
        return False
    return PurePosixPath(name).name == name and PureWindowsPath(name).name == name


def parse_json_object(raw: bytes, label: str) -> dict[str, Any]:
    """A JSON object from bytes.

    Args:
        raw: UTF-8 text, with or without a byte order mark.
        label: what to call it in an error.

    Raises:
        WeightsError: it is not JSON, not an object, holds NaN or Infinity, or a key twice.
    """
    if is_lfs_pointer(raw):
        raise WeightsError(f"{label} is a Git LFS pointer, not the file", "", "run git lfs pull")
    try:
        return parse_object(raw)
    except ValueError as error:
        raise WeightsError(f"{label} {error}") from None


def read_json(path: Path, *, label: str | None = None) -> dict[str, Any]:
    """Read one JSON object from a file.

    Args:
        path: the file.
        label: what to call it in an error; None takes the path.

    Raises:
        WeightsError: it is missing, unreadable, over 32 MiB, not JSON or not an object.
    """
    label = label or str(path)
    try:
        if not path.is_file():
            raise WeightsError(f"{label} is missing")
        size = path.stat().st_size
        if size > JSON_LIMIT_BYTES:
            raise WeightsError(f"{label} has {size} bytes", f"up to {JSON_LIMIT_BYTES} are read")
        raw = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{label} cannot be read ({error.strerror or error})") from None
    return parse_json_object(raw, label)


_SCHEMA = 1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one file, as computed when it was fetched."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What was fetched, once.

    Attributes:
        repository: ``owner/name``.
        revision: branch, tag or commit that was asked for.
        commit: what it resolved to.
        licence: label of the repository on that day; empty when it had none.
        fetched_at: UTC, ISO 8601.
        folder: the checkpoint, inside the cache of huggingface-hub.
        files: by path inside the folder.
    """

    repository: str
    revision: str
    commit: str
    licence: str
    fetched_at: str
    folder: Path
    files: dict[str, FileRecord]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(record.size_bytes for record in self.files.values())


def _path(repository: str, commit: str) -> Path:
    return apollo_home() / "models" / f"{repository.replace('/', '--')}@{commit[:12]}.json"


def write_manifest(manifest: Manifest) -> Path:
    """Keep a manifest, in one step: a reader sees the old one or the new one."""
    path = _path(manifest.repository, manifest.commit)
    row = asdict(manifest) | {"folder": str(manifest.folder), "schema": _SCHEMA}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, json.dumps(row, indent=1) + "\n")
    except OSError as error:
        raise WeightsError(
            f"the manifest {path} cannot be written ({error.strerror or error})",
            "",
            "set APOLLO_HOME to a folder that can be written",
        ) from None


def read_manifests(repository: str | None = None) -> list[Manifest]:
    """All manifests, the newest first; or those of one repository.

    Raises:
        WeightsError: one of them is damaged.
    """
    folder = apollo_home() / "models"
    paths = sorted(folder.glob("[!.]*.json")) if folder.is_dir() else []
    found = [_read_manifest(path) for path in paths]
    kept = [m for m in found if repository is None or m.repository == repository]
    return sorted(kept, key=lambda manifest: manifest.fetched_at, reverse=True)


def _read_manifest(path: Path) -> Manifest:
    row = Values(read_json(path), path.name, faults := [])
    texts = {k: row.get(k, text) for k in ("repository", "revision", "commit", "fetched_at")}
    texts["licence"] = row.get("licence", any_text)
    folder, files = row.get("folder", text), row.get("files", table_of(table)) or {}
    records = {}
    for name, record in files.items():
        inside = Values(record, f"{row.where}: {name}", faults)
        records[name] = FileRecord(
            inside.get("size_bytes", whole(0)), inside.get("sha256", any_text)
        )
    # Both name the file of the manifest, and what is looked at below the folder.
    steps = [
        *(texts["repository"] or "").split("/"),
        *(s for name in files for s in name.split("/")),
    ]
    if not is_commit(texts["commit"]) or not all(map(is_plain_name, steps)):
        row.refuse("commit, repository or files", "do not name one commit and files below it")
    if faults:
        raise WeightsError(
            f"the manifest {path} is damaged: {'; '.join(faults)}",
            "",
            "delete it and run apollo models pull again: files that are there are not fetched anew",
        )
    return Manifest(**texts, folder=Path(folder), files=records)


def delete_manifest(manifest: Manifest) -> None:
    """Forget a manifest."""
    _path(manifest.repository, manifest.commit).unlink(missing_ok=True)


def hash_file(path: Path) -> FileRecord:
    """Size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileRecord(size, digest.hexdigest())
