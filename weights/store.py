"""What is on this machine: finding, verifying, removing and listing models.

The files themselves lie in the cache of huggingface-hub, where other programs share them. A
manifest in our own folder says which commit they are and what each file hashes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from apollo_cli.errors import WeightsError
from apollo_cli.model.config import NetworkConfig
from apollo_cli.weights.adapter import Adapter, base_identity, check_base, resolve_chain
from apollo_cli.weights.checkpoint import Checkpoint, read_checkpoint
from apollo_cli.weights.files import (
    FileRecord,
    Manifest,
    delete_manifest,
    hash_file,
    is_commit,
    read_manifests,
)
from apollo_cli.weights.network import build_network_config, released_network
from apollo_cli.weights.registry import ModelEntry, ModelSource, known_models, resolve

_SHORT_COMMIT = 7


@dataclass(frozen=True)
class VerifyReport:
    """Result of a check.

    Attributes:
        name: the model.
        folder: where it lies.
        commit: of the manifest; None where there is none.
        hashed: files whose SHA-256 was compared; 0 where no hashes were ever recorded.
        faults: what is wrong; empty when all is well.
    """

    name: str
    folder: Path
    commit: str | None
    hashed: int
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


@dataclass(frozen=True)
class ModelStatus:
    """One row of the list of models.

    Attributes:
        name: to be used with ``--model``.
        state: ``embedded``; ``ready`` with a manifest; ``cached`` when complete but fetched by
            another program; ``absent``.
        size_bytes: on disk, or the approximate download when absent; None when unknown.
        commit: None unless ready.
        folder: None when absent.
        entry: None for a repository that is not known by name.
    """

    name: str
    state: Literal["embedded", "ready", "cached", "absent"]
    size_bytes: int | None
    commit: str | None
    folder: Path | None
    entry: ModelEntry | None


def _matches(manifest: Manifest, revision: str | None) -> bool:
    if revision is None:
        return True
    is_prefix = len(revision) >= _SHORT_COMMIT and manifest.commit.startswith(revision)
    return is_prefix or manifest.revision == revision


def find_manifest(source: ModelSource) -> Manifest | None:
    """The newest manifest of a hub source whose files are still there."""
    if source.repository is None:
        return None
    for manifest in read_manifests(source.repository):
        if _matches(manifest, source.revision) and manifest.folder.is_dir():
            return manifest
    return None


def find_local(source: ModelSource) -> Path | None:
    """The folder of a model that can be loaded now, without a network; None when there is none.

    A repository that another program left in the cache of huggingface-hub counts when it is
    complete. An embedded model or a folder is returned as it is, whatever it holds.
    """
    if source.folder is not None:
        return source.folder
    manifest = find_manifest(source)
    return manifest.folder if manifest else _find_cached(source)


def _find_cached(source: ModelSource) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    assert source.repository is not None
    try:
        config = try_to_load_from_cache(source.repository, "config.json", revision=source.revision)
    except (OSError, ValueError):
        # The file that names the commit of a branch is no such file.
        return None
    if not isinstance(config, str) or not is_commit(Path(config).parent.name):
        return None
    try:
        return read_checkpoint(Path(config).parent).root
    except WeightsError:
        return None


def require_local(source: ModelSource) -> Path:
    """The folder of a model that can be loaded now.

    Raises:
        WeightsError: it has not been fetched; says how large it is and how to fetch it.
    """
    folder = find_local(source)
    if folder is not None:
        return folder
    size = source.entry.approximate_bytes if source.entry else None
    about = f" (about {size / 1e9:.1f} GB)" if size else ""
    wanted = f"{source.repository if source.entry is None else source.name}"
    wanted += f"@{source.revision}" if source.revision else ""
    raise WeightsError(
        f"the model {wanted} is not on this machine", "", f"run apollo models pull {wanted}{about}"
    )


def verify(source: ModelSource, *, on_file: Callable[[str], None] | None = None) -> VerifyReport:
    """Check that a model is complete, and unchanged since it was fetched.

    Args:
        source: what to check.
        on_file: called with each file name before it is hashed.

    Raises:
        WeightsError: it is not on this machine.
    """
    manifest = find_manifest(source)
    folder = manifest.folder if manifest else require_local(source)
    faults: list[str] = []
    for name, record in manifest.files.items() if manifest else ():
        if on_file is not None:
            on_file(name)
        faults += _file_faults(folder / name, name, record)
    try:
        read_checkpoint(folder)
    except WeightsError as error:
        faults.append(error.received)
    return VerifyReport(
        name=source.name,
        folder=folder,
        commit=manifest.commit if manifest else None,
        hashed=len(manifest.files) if manifest else 0,
        faults=tuple(faults),
    )


def _file_faults(path: Path, name: str, expected: FileRecord) -> list[str]:
    try:
        size = path.stat().st_size
        if size != expected.size_bytes:
            return [f"{name} has {size} bytes, not {expected.size_bytes}"]
        found = hash_file(path)
    except FileNotFoundError:
        return [f"{name} is missing"]
    except OSError as error:
        return [f"{name} cannot be read ({error.strerror or error})"]
    if found.sha256 != expected.sha256:
        return [f"{name} has changed: its sha256 is {found.sha256}, not {expected.sha256}"]
    return []


def remove(source: ModelSource) -> int:
    """Delete a fetched model: its files in the cache, and its manifest.

    Blobs that another revision of the repository shares are kept. Without a revision, all
    revisions of the repository go.

    Returns:
        Bytes freed.

    Raises:
        WeightsError: it was never fetched, or is embedded or a folder, which are not ours to
            delete.
    """
    if source.repository is None:
        what = "is part of the program" if source.kind == "embedded" else "is a folder of yours"
        raise WeightsError(f"{source.name} {what}", "only a fetched model can be removed")
    manifests = [m for m in read_manifests(source.repository) if _matches(m, source.revision)]
    freed = _delete_from_caches(source, manifests)
    for manifest in manifests:
        delete_manifest(manifest)
    if freed is None and not manifests:
        raise WeightsError(
            f"the model {source.name} is not on this machine", "", "see apollo models list"
        )
    return freed or 0


def _delete_from_caches(source: ModelSource, manifests: list[Manifest]) -> int | None:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    caches = {Path(constants.HF_HUB_CACHE)} | {m.folder.parents[2] for m in manifests}
    commits = {m.commit for m in manifests}
    freed = None
    for cache in caches:
        try:
            info = scan_cache_dir(cache)
        except CacheNotFound:
            continue
        doomed = [
            revision.commit_hash
            for repo in info.repos
            if repo.repo_id == source.repository and repo.repo_type == "model"
            for revision in repo.revisions
            if source.revision is None
            or revision.commit_hash in commits
            or source.revision in revision.refs
        ]
        if doomed:
            strategy = info.delete_revisions(*doomed)
            freed = (freed or 0) + strategy.expected_freed_size
            strategy.execute()
    return freed


def list_models() -> list[ModelStatus]:
    """All known models and all fetched ones."""
    rows = [_status(resolve(name)) for name in known_models()]
    named = {entry.repository for entry in known_models().values()}
    others = sorted({m.repository for m in read_manifests()} - named)
    return rows + [row for row in map(_status, map(resolve, others)) if row.state != "absent"]


def _status(source: ModelSource) -> ModelStatus:
    entry = source.entry
    if source.kind == "embedded":
        assert source.folder is not None
        size = sum(p.stat().st_size for p in source.folder.rglob("*") if p.is_file())
        return ModelStatus(source.name, "embedded", size, None, source.folder, entry)
    manifest = find_manifest(source)
    if manifest is not None:
        return ModelStatus(
            source.name, "ready", manifest.size_bytes, manifest.commit, manifest.folder, entry
        )
    folder = find_local(source)
    if folder is not None:
        size = read_checkpoint(folder).size_bytes
        return ModelStatus(source.name, "cached", size, None, folder, entry)
    return ModelStatus(
        source.name, "absent", entry.approximate_bytes if entry else None, None, None, entry
    )


AUTO = "auto"
TOY = "apollo-nano"
Fits = Callable[[NetworkConfig], bool]


@dataclass(frozen=True)
class LocatedModel:
    """A checkpoint on disk, with its configs and tensor headers read; no weight has been read.

    Attributes:
        name: what to call it. checkpoint: what its folder holds.
        revision: resolved commit, or None for a folder of the user.
        chosen: whether the user named no model, so that one was chosen.
        chain: adapters to apply, the lowest first.
    """

    name: str
    checkpoint: Checkpoint
    revision: str | None
    chosen: bool = False
    chain: tuple[Adapter, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return self.checkpoint.root

    @cached_property
    def config(self) -> NetworkConfig:
        """Shape of the network.

        Raises:
            WeightsError: values are missing, wrong or unsupported; all of them are listed.
        """
        return build_network_config(self.checkpoint)

    @cached_property
    def identity(self) -> dict[str, str]:
        """Digests of the weights by part, as adapters store them."""
        return base_identity(self.checkpoint)

    @property
    def adapter(self) -> dict[str, Any] | None:
        """What an answer says of the last adapter; None without one."""
        return self.chain[-1].describe() if self.chain else None

    @property
    def is_toy(self) -> bool:
        """Whether it is the embedded toy."""
        return self.name == TOY


def locate_model(
    name: str | Path, fits: Fits | None = None, adapters: Sequence[str | Path] = ()
) -> LocatedModel:
    """Find a model that can be loaded now, and read its headers; nothing is downloaded.

    Args:
        name: a known name, a folder, ``owner/repository[@revision]``, or ``auto``.
        fits: whether a network fits the device, for ``auto``; None takes any.
        adapters: folders of training results; ``auto`` then stands for the model that the last
            one was trained from.

    Raises:
        WeightsError: the name is unknown, the model has not been downloaded or is damaged, or an
            adapter is missing, damaged, or was trained from another model.
    """
    if adapters:
        chain = resolve_chain(adapters)
        located = _base_of(chain[-1]) if str(name) == AUTO else locate_model(name)
        check_base(chain, located.identity, located.folder)
        return replace(located, chain=chain)
    chosen = str(name) == AUTO
    source = resolve(_best_local(fits) if chosen else name)
    manifest = find_manifest(source) if source.kind == "hub" else None
    folder = manifest.folder if manifest else require_local(source)
    revision = manifest.commit if manifest else None
    return LocatedModel(source.name, read_checkpoint(folder), revision, chosen)


def _base_of(adapter: Adapter) -> LocatedModel:
    try:
        return locate_model(adapter.base_name)
    except WeightsError as error:
        raise WeightsError(
            f"adapter {adapter.folder} was trained from {adapter.base_name}: {error.received}",
            "that model is needed, under any name",
            f"say with --model where it is; {error.next_step}".rstrip("; "),
        ) from None


def _best_local(fits: Fits | None) -> str:
    """The name of the largest downloaded model that fits; the embedded toy when there is none."""
    for entry in reversed(known_models().values()):
        if (
            entry.repository is not None
            and find_local(resolve(entry.name)) is not None
            and (fits is None or fits(released_network(entry).config))
        ):
            return entry.name
    return TOY
