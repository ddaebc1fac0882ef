"""Requests to a model hub: bounded, checked, and continued where they were cut.

Nothing that a hub says becomes a path, a header or text for a user unchecked: of an answer's
headers, only lengths and the place of a redirect are read, and files are named by hashes of the
checked listing. huggingface-hub brings the client, the token and the folders of its cache.
"""

from __future__ import annotations

import errno
import importlib
import ipaddress
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from apollo_cli.errors import WeightsError
from apollo_cli.text import keep_secret
from apollo_cli.weights.files import JSON_LIMIT_BYTES, parse_json_object

_ATTEMPTS = 4
_PAUSE_SECONDS = 0.3
_MOST_REDIRECTS = 5
_MOST_ADDRESS = 8192
_LISTING_SECONDS = 120.0
PARTIAL = ".apollo.incomplete"


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository, as its checked listing describes it.

    Attributes:
        name: path inside the repository.
        size_bytes: its size.
        sha256: of the content; None for a small file that is kept in git itself.
        blob_id: git's own hash of such a small file; None for the others.
    """

    name: str
    size_bytes: int
    sha256: str | None
    blob_id: str | None

    @property
    def blob(self) -> str:
        """Its name in the cache: the one hash that is known."""
        return self.sha256 or self.blob_id or ""


@dataclass(frozen=True)
class Hub:
    """Where to ask, and as whom. None leaves each to huggingface-hub and its variables."""

    repository: str
    endpoint: str | None
    token: str | None
    cache_dir: Path

    @property
    def address(self) -> str:
        """The address that all requests begin with."""
        from huggingface_hub import constants

        return (self.endpoint or constants.ENDPOINT).rstrip("/")

    @property
    def secret(self) -> str:
        """The token that requests carry; empty without one."""
        from huggingface_hub import get_token

        token = self.token or get_token() or ""
        keep_secret(token)
        return token

    @property
    def folder(self) -> Path:
        """The folder of the repository in the cache."""
        return self.cache_dir / f"models--{self.repository.replace('/', '--')}"

    def place(self, commit: str, name: str) -> Path:
        """Where a file of a commit lies in the cache."""
        return self.folder / "snapshots" / commit / name

    def partial(self, file: RemoteFile) -> Path:
        """Where a file grows while it is fetched."""
        return self.folder / "blobs" / f"{file.blob}{PARTIAL}"

    def bytes_there(self, file: RemoteFile) -> int:
        """How much of a file an earlier pull left, of this commit or another."""
        partial = self.partial(file)
        sizes = [p.stat().st_size for p in (partial.with_name(file.blob), partial) if p.is_file()]
        # What is longer than it should be is fetched anew.
        return max((size for size in sizes if size <= file.size_bytes), default=0)


class _Cut(Exception):
    """The hub is busy, or an answer ended before its end: worth another try."""


def read_listing(hub: Hub, revision: str) -> dict[str, Any]:
    """What a hub says of a revision of its repository: a JSON object, otherwise unchecked.

    Raises:
        WeightsError: no JSON object, too large, or too slow.
    """
    url = f"{hub.address}/api/models/{hub.repository}/revision/{quote(revision, safe='')}"
    label, body = f"the listing of {hub.repository}", bytearray()
    until = time.monotonic() + _LISTING_SECONDS
    with _answer(hub, f"{url}?blobs=true", revision) as answer:
        for piece in answer.iter_bytes():
            body += piece
            if len(body) > JSON_LIMIT_BYTES or time.monotonic() > until:
                raise WeightsError(
                    f"{label} does not end",
                    f"up to {JSON_LIMIT_BYTES} bytes in {_LISTING_SECONDS:.0f} s are read",
                    "check HF_ENDPOINT and the proxy settings",
                )
    listing, secret = parse_json_object(bytes(body), label), hub.secret
    if not secret:
        return listing
    # A hub may say back what it was sent, escaped too; a token is no part of a licence or a name.
    return json.loads(json.dumps(listing, ensure_ascii=False).replace(secret, "***"))


def fetch_file(
    hub: Hub, commit: str, file: RemoteFile, on_bytes: Callable[[int], None] = lambda count: None
) -> Path:
    """Bring one file into the cache, unless it is there, and return its place.

    A transfer that is cut goes on where it was, at once and in a later run. The content is not
    compared with its hash here.

    Args:
        on_bytes: is told how many bytes of the file are there.
    """
    place = hub.place(commit, file.name)
    below = place.parent.relative_to(hub.folder)
    if place.parent.resolve() != hub.folder.resolve() / below:
        raise WeightsError(
            f"{place.parent} leads elsewhere through a link",
            "files of a hub are kept inside of the folder of their model",
            "remove the link, then pull again",
        )
    if place.is_file():
        return place
    partial = hub.partial(file)
    blob = partial.with_name(file.blob)
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.is_symlink():
        partial.unlink()
    failures = 0
    while not blob.is_file():
        had = partial.stat().st_size if partial.exists() else 0
        try:
            _continue(hub, commit, file, partial, on_bytes)
            partial.replace(blob)
        except (_Cut, http_library().TransportError):
            grew = partial.exists() and partial.stat().st_size > had
            failures = 0 if grew else failures + 1
            if failures == _ATTEMPTS:
                raise
            time.sleep(0 if grew else _PAUSE_SECONDS)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except OSError:
        # Without symbolic links the cache holds the file itself.
        blob.replace(place)
    return place


def _continue(
    hub: Hub, commit: str, file: RemoteFile, partial: Path, on_bytes: Callable[[int], None]
) -> None:
    """Fetch what is missing of a file in one request."""
    name = f"{hub.repository}/{file.name}"
    url = f"{hub.address}/{hub.repository}/resolve/{commit}/{quote(file.name)}"
    with partial.open("ab") as target:
        if target.tell() > file.size_bytes:
            target.truncate(0)
        start = target.seek(0, os.SEEK_END)
        if start == file.size_bytes:
            return
        with _answer(hub, url, commit, name, start) as answer:
            if answer.status_code == 200:
                target.truncate(0)
                start = 0
            elif not answer.headers.get("content-range", "").startswith(f"bytes {start}-"):
                raise WeightsError(f"the hub sent another part of {name} than it was asked for")
            length = answer.headers.get("content-length", "")
            is_plain = length.isdecimal() and "content-encoding" not in answer.headers
            if is_plain and start + int(length) != file.size_bytes:
                raise _wrong_length(name, file, str(start + int(length)))
            for piece in answer.iter_bytes():
                start += len(piece)
                if start > file.size_bytes:
                    raise _wrong_length(name, file, "more")
                target.write(piece)
                on_bytes(start)
    if start < file.size_bytes:
        raise _Cut(f"{name} ended after {start} of {file.size_bytes} bytes")


def _wrong_length(name: str, file: RemoteFile, found: str) -> WeightsError:
    return WeightsError(
        f"the hub sends {name} with another length than its listing says: {found}, not "
        f"{file.size_bytes} bytes",
        "",
        "check HF_ENDPOINT and the proxy settings, or try again later",
    )


@contextmanager
def _answer(hub: Hub, url: str, revision: str, name: str = "", start: int = 0) -> Iterator[Any]:
    """The answer to one request, as a stream; redirects are checked and followed.

    Args:
        name: the file that is asked for; empty for a listing.
        start: the byte to begin with.
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(token=hub.secret or False) | {"accept-encoding": "identity"}
    if start:
        headers["range"] = f"bytes={start}-"
    first, timeout = urlsplit(url), constants.HF_HUB_DOWNLOAD_TIMEOUT
    for _ in range(_MOST_REDIRECTS):
        with get_session().stream(
            "GET", url, headers=headers, timeout=timeout, follow_redirects=False
        ) as answer:
            if not answer.has_redirect_location:
                _check_status(hub, answer, revision, name)
                yield answer
                return
            target = _redirect(first, url, answer.headers["location"])
        url = target.geturl()
        if (target.scheme, target.netloc) != (first.scheme, first.netloc):
            headers = {key: value for key, value in headers.items() if key != "authorization"}
    raise WeightsError(
        f"{hub.address} redirects {name or hub.repository} without end",
        "",
        "check HF_ENDPOINT and the proxy settings",
    )


def _redirect(first: SplitResult, url: str, location: str) -> SplitResult:
    """The target of a redirect: the web, never less secret, nor inside of this network."""
    try:
        target = urlsplit(urljoin(url, location) if len(location) <= _MOST_ADDRESS else "")
    except ValueError:
        target = urlsplit("")
    is_web = target.scheme == "https" or target.scheme == first.scheme == "http"
    is_near = _is_inside(target.hostname) and not _is_inside(first.hostname)
    if not is_web or not target.hostname or "@" in target.netloc or is_near:
        place = f"{target.scheme}://{target.hostname}"[:100]
        raise WeightsError(
            f"{first.hostname} redirects to {place}: refused",
            "a redirect may lead to another place in the web",
            "check HF_ENDPOINT and the proxy settings",
        )
    return target


def _is_inside(host: str | None) -> bool:
    """Whether a host is of this machine or this network, by its name or number alone."""
    host = (host or "").rstrip(".")
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        last = host.rpartition(".")[2]
        # Numbers are written in many ways; what has no dot is known to this network only.
        return last == host or last.isdecimal() or last.startswith("0x") or last == "localhost"


def http_library() -> ModuleType:
    """The HTTP library that huggingface-hub is built on, whichever it is."""
    from huggingface_hub import get_session

    return importlib.import_module(type(get_session()).__module__.partition(".")[0])


def _check_status(hub: Hub, answer: Any, revision: str, name: str) -> None:
    """Turn a refusal into one line with a next step; its body is not read."""
    code, kind = answer.status_code, answer.headers.get("x-error-code", "")
    repository = hub.repository
    if code in (200, 206):
        return
    login = "set HF_TOKEN or run hf auth login"
    if kind == "GatedRepo":
        raise WeightsError(
            f"{repository} is gated",
            "its terms must be accepted by the account that downloads",
            f"accept them on the page of {repository}, then {login}",
        )
    if kind == "RevisionNotFound":
        raise WeightsError(f"{repository} has no revision {revision!r}")
    is_token = "credentials" in answer.headers.get("x-error-message", "")
    if kind == "RepoNotFound" or (not name and code in (401, 404) and not is_token):
        raise WeightsError(
            f"{repository} does not exist, or is private",
            "",
            "check the spelling" + (f", or {login}" if code == 401 else ""),
        )
    if code in (408, 429) or code >= 500:
        raise _Cut(f"the hub answered {code} for {name or repository}")
    meaning = {401: "the token is not valid", 403: "this account may not read it"}.get(code, "")
    raise WeightsError(
        f"the hub answered {code} for {name or repository}" + (f": {meaning}" if meaning else ""),
        "",
        "check HF_TOKEN" if meaning else "try again later; a pull continues where it stopped",
    )


@contextmanager
def clear_errors(hub: Hub) -> Iterator[None]:
    """Turn the errors of networks and disks into one line with a next step."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    http, name = http_library(), hub.repository
    try:
        yield
    except OfflineModeIsEnabled:
        raise WeightsError(f"cannot pull {name}: offline mode is on") from None
    except _Cut as error:
        raise WeightsError(
            str(error), "", "try again later; a pull continues where it stopped"
        ) from None
    except (http.HTTPError, http.InvalidURL, UnicodeError) as error:
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
