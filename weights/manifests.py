"""Manifests: what was fetched, at which commit, and what each file hashes to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from apollo_cli.atomic import write_whole
from apollo_cli.errors import WeightsError
from apollo_cli.values import Values, any_text, table, table_of, text, whole
from apollo_cli.weights.files import apollo_home, is_commit, is_plain_name, read_json

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
