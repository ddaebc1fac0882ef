"""The listing of a repository: what a hub says of it, every value checked before it is used."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.text import apart
from apollo_cli.weights.checkpoint import CONNECTOR, LLM, TOWER, read_checkpoint
from apollo_cli.weights.files import (
    PICKLE_SUFFIXES,
    FileRecord,
    Manifest,
    apollo_home,
    hash_file,
    is_commit,
    write_manifest,
)
from apollo_cli.weights.registry import ModelSource, checked_revision
from apollo_cli.weights.transfer import (
    PARTIAL,
    Hub,
    RemoteFile,
    clear_errors,
    fetch_file,
    read_listing,
)

PARTS = (LLM, TOWER, CONNECTOR)
_SUFFIXES = frozenset({".json", ".txt", ".safetensors"})
# A name that every system takes as it is, for a file below the folder: relative, neither hidden
# nor with an end that Windows drops or a name that stands for a device there.
_STEP = r"(?!(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|/|$))[\w+=,@-](?:[\w.+=,@ -]{0,198}[\w+=,@-])?"
_NAME = re.compile(rf"{_STEP}(?:/{_STEP}){{0,5}}", re.ASCII | re.IGNORECASE)
_HASHES = {"sha256": re.compile(r"[0-9a-f]{64}"), "blobId": re.compile(r"[0-9a-f]{40}")}
_MOST_BYTES = 1 << 50
_MOST_LABEL = 200


@dataclass(frozen=True)
class Listing:
    """What a hub says of one revision of a repository.

    Attributes:
        commit: 40 hexadecimal digits.
        files: those of the released layout that are read: .json, .txt and .safetensors.
        has_pickles: whether there are weights in files that can run code.
        licence: label of the repository; empty when it has none. licence_link: may be empty.
        gated: whether its terms must be accepted on its page first.
    """

    commit: str
    files: tuple[RemoteFile, ...]
    has_pickles: bool
    licence: str
    licence_link: str
    gated: bool

    @classmethod
    def read(cls, hub: Hub, revision: str) -> Listing:
        """Ask a hub, and check what it says.

        Raises:
            WeightsError: a value is missing, or of another kind than it must be.
        """
        listing = _Reader(hub, read_listing(hub, revision))
        commit = listing.value("sha")
        if not is_commit(commit):
            raise listing.refuse("sha", commit, "40 lower-case hexadecimal digits")
        rows = listing.value("siblings")
        if not isinstance(rows, list):
            raise listing.refuse("siblings", rows, "a list of files")
        rows = [listing.row("siblings", row) for row in rows]
        names = [listing.text(row, "rfilename", 4096) for row in rows]
        files = [listing.file(n, row) for n, row in zip(names, rows, strict=True) if _is_read(n)]
        lower = [file.name.lower() for file in files]
        taken = {str(folder) for name in lower for folder in PurePosixPath(name).parents}
        for name in lower:
            # Where case makes no difference, the second file would take the place of the first.
            if lower.count(name) > 1 or name in taken:
                raise listing.refuse("rfilename", name, "the only file or folder of its name")
        card = listing.row("cardData", listing.value("cardData") or {})
        labels = card.get("license")
        rows = [{"license": one} for one in (labels if isinstance(labels, list) else [labels])]
        label = ", ".join(listing.text(row, "license") for row in rows)[:_MOST_LABEL]
        name = listing.text(card, "license_name")
        return cls(
            commit=str(commit),
            files=tuple(files),
            has_pickles=any(PurePosixPath(name).suffix in PICKLE_SUFFIXES for name in names),
            licence=f"{label} ({name})" if label and name else label,
            licence_link=listing.text(card, "license_link"),
            gated=bool(listing.value("gated")),
        )


@dataclass(frozen=True)
class _Reader:
    """A listing as it came, and how its faults are told."""

    hub: Hub
    listing: dict[str, Any]

    def value(self, key: str) -> object:
        return self.listing.get(key)

    def text(self, row: dict[str, Any], key: str, most: int = _MOST_LABEL) -> str:
        """A text of a row; empty where there is none."""
        value = row.get(key)
        if value is not None and (not isinstance(value, str) or len(value) > most):
            raise self.refuse(key, value, f"a text of up to {most} characters")
        return value or ""

    def row(self, key: str, value: object) -> dict[str, Any]:
        """A value that must be an object."""
        if not isinstance(value, dict):
            raise self.refuse(key, value, "an object")
        return value

    def file(self, name: str, row: dict[str, Any]) -> RemoteFile:
        """A file of the listing."""
        if not _NAME.fullmatch(name):
            raise self.refuse("rfilename", name, "a plain name below the folder of the model")
        is_large = row.get("lfs") is not None
        key, where = ("sha256", self.row("lfs", row["lfs"])) if is_large else ("blobId", row)
        size, digest = where.get("size"), where.get(key)
        if type(size) is not int or not 0 <= size <= _MOST_BYTES:
            raise self.refuse(f"the size of {name}", size, f"a number of bytes up to {_MOST_BYTES}")
        if not isinstance(digest, str) or not _HASHES[key].fullmatch(digest):
            raise self.refuse(f"the {key} of {name}", digest, "a lower-case hexadecimal hash")
        return RemoteFile(name, size, *((digest, None) if is_large else (None, digest)))

    def refuse(self, key: str, value: object, allowed: str) -> WeightsError:
        shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
        return WeightsError(
            f"the hub's listing of {self.hub.repository} has {key} {shown[:80]}",
            f"it must be {allowed}",
            "check HF_ENDPOINT and the proxy settings",
        )


def _is_read(name: str) -> bool:
    """Whether a file is one of the layout, by its first folder and its suffix."""
    steps = name.split("/")
    in_layout = name == "config.json" or (len(steps) > 1 and steps[0] in PARTS)
    return in_layout and PurePosixPath(steps[-1]).suffix in _SUFFIXES


SPARE_BYTES = 200_000_000


@dataclass(frozen=True)
class PullPlan:
    """What a pull would do, to be shown before it is done.

    Attributes:
        source: what was asked for.
        repository: ``owner/name``.
        revision: branch, tag or commit.
        commit: what the revision is now.
        files: all files that are needed.
        missing: those that are not in the cache yet.
        missing_bytes: of these, what an earlier pull did not leave there.
        licence: label of the repository; empty when it has none.
        licence_link: where the label points; may be empty.
        gated: whether its terms must be accepted on its page first.
        cache_dir: cache of huggingface-hub.
        free_bytes: free on that disk.
    """

    source: ModelSource
    repository: str
    revision: str
    commit: str
    files: tuple[RemoteFile, ...]
    missing: tuple[RemoteFile, ...]
    missing_bytes: int
    licence: str
    licence_link: str
    gated: bool
    cache_dir: Path
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all needed files."""
        return sum(file.size_bytes for file in self.files)


def fetch_model(
    source: ModelSource,
    *,
    confirm: Callable[[PullPlan], bool],
    on_status: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Manifest | None:
    """Download what is missing of a checkpoint, check every file and record it.

    Only ``.json``, ``.txt`` and ``.safetensors`` files of the released layout are fetched. A
    large file that was stopped is continued where it ended.

    Args:
        source: a hub source.
        confirm: is shown the plan, with size and licence, before anything is downloaded.
        on_status: is told each step in a few words.
        on_progress: is told the bytes that are there of the file under way, and its size.
        revision: wins over the one of the source.
        token: None takes HF_TOKEN or the saved login.
        offline: None takes HF_HUB_OFFLINE.
        cache_dir: None takes HF_HUB_CACHE or HF_HOME.
        endpoint: None takes HF_ENDPOINT.

    Returns:
        The manifest; None when `confirm` said no.

    Raises:
        WeightsError: no network, offline mode, no such repository or revision, closed to this
            user, not the released layout, disk full, or a file that does not hash as promised.
    """
    from huggingface_hub import constants

    repository = _fetchable(source, constants.HF_HUB_OFFLINE if offline is None else offline)
    cache = (cache_dir or Path(constants.HF_HUB_CACHE)).expanduser().absolute()
    hub = Hub(repository, endpoint, token, cache)
    wanted = checked_revision(revision) or source.revision or "main"
    plan = _plan(hub, source, wanted)
    if plan.missing_bytes + SPARE_BYTES > plan.free_bytes:
        needed, free = apart((plan.missing_bytes + SPARE_BYTES) / 1e9, plan.free_bytes / 1e9)
        raise WeightsError(
            f"{plan.repository} needs {needed} GB more, and the disk of {cache} has {free} GB free",
            "",
            "free some space, or set HF_HOME to a folder on another disk",
        )
    if not confirm(plan):
        return None
    with clear_errors(hub), _one_at_a_time(hub):
        root = _download(hub, plan, on_status, on_progress)
    on_status("checking the files")
    manifest = _checked_manifest(hub, plan, root)
    write_manifest(manifest)
    return manifest


def _fetchable(source: ModelSource, offline: bool) -> str:
    if source.repository is None:
        raise WeightsError(f"{source.name} is on this machine already", "a hub model is pulled")
    if offline:
        raise WeightsError(
            f"cannot pull {source.repository}: offline mode is on",
            "",
            "unset HF_HUB_OFFLINE, or give the folder of a checkpoint instead",
        )
    return source.repository


def _plan(hub: Hub, source: ModelSource, revision: str) -> PullPlan:
    with clear_errors(hub):
        listing = Listing.read(hub, revision)
    files = _needed_files(hub.repository, listing)
    missing = [file for file in files if not hub.place(listing.commit, file.name).is_file()]
    return PullPlan(
        source=source,
        repository=hub.repository,
        revision=revision,
        commit=listing.commit,
        files=files,
        missing=tuple(missing),
        missing_bytes=sum(file.size_bytes - hub.bytes_there(file) for file in missing),
        licence=listing.licence,
        licence_link=listing.licence_link,
        gated=listing.gated,
        cache_dir=hub.cache_dir,
        free_bytes=_free_bytes(hub.cache_dir),
    )


def _needed_files(repository: str, listing: Listing) -> tuple[RemoteFile, ...]:
    files = listing.files
    weights = {f.name.split("/")[0] for f in files if f.name.endswith(".safetensors")}
    has_config = any(file.name == "config.json" for file in files)
    lacking = sorted(set(PARTS) - weights) + ([] if has_config else ["config.json"])
    if lacking:
        raise WeightsError(
            f"{repository} has no {', '.join(lacking)}",
            "the released layout is needed: config.json, and safetensors in llm/, vision_tower/ "
            "and mm_connector/"
            + (" (pickle files can run code and are not read)" * listing.has_pickles),
        )
    return tuple(sorted(files, key=lambda file: (file.size_bytes, file.name)))


def _free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def _one_at_a_time(hub: Hub) -> Iterator[None]:
    from filelock import FileLock, Timeout

    folder = apollo_home() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(
            f"the folder {folder} cannot be made ({error.strerror or error})",
            "",
            "set APOLLO_HOME to a folder that can be written",
        ) from None
    # Beside what it protects: records may lie elsewhere for another program on the same cache.
    locks = hub.cache_dir / ".locks" / hub.folder.name
    locks.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(locks / "apollo.lock", timeout=0):
            yield
    except Timeout:
        raise WeightsError(
            f"another pull of {hub.repository} is running", "", "wait for it to end"
        ) from None


def _download(
    hub: Hub,
    plan: PullPlan,
    on_status: Callable[[str], None],
    on_progress: Callable[[int, int], None],
) -> Path:
    missing = set(plan.missing)
    wanted = {hub.partial(file) for file in missing}
    # What a stopped pull of another commit left is of no use, and nobody else is pulling.
    for left in set((hub.folder / "blobs").glob(f"*{PARTIAL}")) - wanted:
        left.unlink(missing_ok=True)
    for number, file in enumerate(plan.files, start=1):
        if file in missing:
            on_status(f"{number}/{len(plan.files)} {file.name}")
        fetch_file(hub, plan.commit, file, lambda done, all=file.size_bytes: on_progress(done, all))
    return hub.place(plan.commit, "")


def _checked_manifest(hub: Hub, plan: PullPlan, root: Path) -> Manifest:
    records = {}
    for file in plan.files:
        path = root / file.name
        record = hash_file(path)
        if not _is_as_promised(path, record, file):
            for copy in (hub.partial(file).with_name(file.blob), path):
                copy.unlink(missing_ok=True)
            raise WeightsError(
                f"{file.name} of {plan.repository} arrived damaged: its sha256 is {record.sha256}"
                + (f", not {file.sha256}" if file.sha256 else ""),
                "",
                "it was removed; pull again",
            )
        records[file.name] = record
    read_checkpoint(root)
    return Manifest(
        repository=plan.repository,
        revision=plan.revision,
        commit=plan.commit,
        licence=plan.licence,
        fetched_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        folder=root,
        files=records,
    )


def _is_as_promised(path: Path, record: FileRecord, file: RemoteFile) -> bool:
    if record.size_bytes != file.size_bytes:
        return False
    if file.sha256 is not None:
        return record.sha256 == file.sha256
    digest = hashlib.sha1(f"blob {record.size_bytes}\0".encode(), usedforsecurity=False)
    with path.open("rb") as content:
        return hashlib.file_digest(content, lambda: digest).hexdigest() == file.blob_id
