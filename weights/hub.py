"""Fetch a checkpoint from a hub repository: ask first, resume, check, record."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from apollo_cli.errors import WeightsError
from apollo_cli.weights.checkpoint import read_checkpoint
from apollo_cli.weights.files import apollo_home
from apollo_cli.weights.listing import PARTS, Listing
from apollo_cli.weights.manifests import FileRecord, Manifest, hash_file, write_manifest
from apollo_cli.weights.registry import ModelSource, checked_revision
from apollo_cli.weights.transfer import PARTIAL, Hub, RemoteFile, clear_errors, fetch_file
from apollo_cli.words import apart

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
