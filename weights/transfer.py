"""Single files from a hub into the cache, and what can go wrong on the way."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from apollo_cli.errors import WeightsError
from apollo_cli.weights.files import is_plain_name

_LARGE_BYTES = 32_000_000
_ATTEMPTS = 4


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository.

    Attributes:
        name: path inside the repository.
        size_bytes: its size.
        sha256: of the content; None for a small file that is kept in git itself.
        blob_id: git's own hash; None when unknown.
    """

    name: str
    size_bytes: int
    sha256: str | None
    blob_id: str | None


@dataclass(frozen=True)
class Hub:
    """Where to ask, and as whom. None leaves each to huggingface-hub and its variables."""

    repository: str
    endpoint: str | None
    token: str | None
    cache_dir: Path


def fetch_file(hub: Hub, commit: str, file: RemoteFile) -> Path:
    """Bring one file into the cache, unless it is there, and return its place."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.file_download import are_symlinks_supported

    cached = try_to_load_from_cache(hub.repository, file.name, hub.cache_dir, commit)
    if isinstance(cached, str):
        return Path(cached)
    # Without symbolic links the cache copies a blob, which would double the space it takes.
    large = file.sha256 is not None and file.size_bytes >= _LARGE_BYTES
    if large and are_symlinks_supported(hub.cache_dir):
        _continue_blob(hub, commit, file)
    place = hf_hub_download(
        hub.repository,
        file.name,
        revision=commit,
        cache_dir=hub.cache_dir,
        token=hub.token,
        endpoint=hub.endpoint,
    )
    return Path(place)


def _network_error() -> type[Exception]:
    """Base of all errors of the HTTP library, whichever one huggingface-hub is built on."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__mro__[1]


def _continue_blob(hub: Hub, commit: str, file: RemoteFile) -> None:
    """Bring a large file into the cache, from where an earlier try ended.

    huggingface-hub itself throws a partial file away when its process ends; it takes over a
    blob that is complete.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(hub.repository, file.name, revision=commit, endpoint=hub.endpoint)
    remote = get_hf_file_metadata(url, token=hub.token, endpoint=hub.endpoint)
    if not is_plain_name(remote.etag):
        return
    folder = hub.cache_dir / repo_folder_name(repo_id=hub.repository, repo_type="model") / "blobs"
    blob = folder / str(remote.etag)
    if blob.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{blob.name}.apollo.incomplete"
    headers = build_hf_headers(token=hub.token)
    for attempt in range(_ATTEMPTS):
        had = partial.stat().st_size if partial.exists() else 0
        if had > file.size_bytes:
            partial.unlink()
            had = 0
        try:
            with partial.open("r+b" if had else "wb") as target:
                target.seek(had)
                http_get(
                    url,
                    target,
                    resume_size=had,
                    headers=dict(headers),
                    expected_size=file.size_bytes,
                    displayed_filename=file.name,
                )
            break
        except HfHubHTTPError:
            raise
        except _network_error():
            if attempt + 1 == _ATTEMPTS or partial.stat().st_size == had:
                raise
    partial.replace(blob)


@contextmanager
def clear_errors(hub: Hub, revision: str) -> Iterator[None]:
    """Turn the errors of the hub library into one line with a next step."""
    from huggingface_hub import errors

    name = hub.repository
    try:
        yield
    except errors.GatedRepoError:
        raise WeightsError(
            f"{name} is gated",
            "its terms must be accepted by the account that downloads",
            f"accept them on the page of {name}, then set HF_TOKEN or run hf auth login",
        ) from None
    except errors.RevisionNotFoundError:
        raise WeightsError(f"{name} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError as error:
        secret = error.response.status_code == 401
        raise WeightsError(
            f"{name} does not exist, or is private",
            "",
            "check the spelling" + (", or set HF_TOKEN or run hf auth login" if secret else ""),
        ) from None
    except errors.OfflineModeIsEnabled:
        raise WeightsError(f"cannot pull {name}: offline mode is on") from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        meaning = {401: "the token is not valid", 403: "this account may not read it"}.get(code, "")
        raise WeightsError(
            f"the hub answered {code} for {name}" + (f": {meaning}" if meaning else ""),
            "",
            "check HF_TOKEN" if meaning else "try again later; a pull continues where it stopped",
        ) from None
    except (_network_error(), errors.LocalEntryNotFoundError, errors.FileMetadataError) as error:
        reason = str(error.__cause__ or error) or type(error).__name__
        raise WeightsError(
            f"no connection to the hub for {name} ({reason[:200]})",
            "",
            "check the network, then pull again: it continues where it stopped",
        ) from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
        raise WeightsError(
            f"{name} cannot be written to {hub.cache_dir} ({error.strerror or error})",
            "",
            "free some space and pull again: it continues where it stopped"
            if full
            else "set HF_HOME to a folder that can be written",
        ) from None
