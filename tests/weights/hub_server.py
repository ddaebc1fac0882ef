"""A model hub on the loopback device, speaking the small part of the protocol that a pull needs."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LFS_FROM_BYTES = 100_000


@dataclass
class FakeHub:
    """A hub with one repository; its faults can be switched on.

    Attributes:
        repository: the only one there is.
        files: name to content.
        commit: of the branch main.
        card: what its card says, such as the licence.
        cut_once: name of a file whose first transfer ends half-way, and is then refused.
        closed: answers like a repository behind a gate.
        cut_every: bytes after which every transfer is cut.
        token: when set, everything needs it.
        listed: changes the listing before it is sent; bytes are sent as they are.
        headers: of every answer, over those that it should have.
        statuses: code with which a file, or the listing as "", is refused.
        redirect: where everything is sent on to.
        tokens: Authorization header of everything asked.
        requests: method, path and Range header of everything asked.
    """

    repository: str
    files: dict[str, bytes]
    commit: str = "c" * 40
    card: dict = field(default_factory=lambda: {"license": "apache-2.0"})
    cut_once: str | None = None
    closed: bool = False
    cut_every: int | None = None
    token: str | None = None
    listed: Callable[[dict], Any] = lambda listing: listing
    headers: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    redirect: str | None = None
    was_cut: bool = False
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    endpoint: str = ""

    def listing(self) -> dict:
        siblings = []
        for name, content in self.files.items():
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            row: dict = {"rfilename": name, "size": len(content), "blobId": blob}
            if len(content) >= LFS_FROM_BYTES:
                sha256 = hashlib.sha256(content).hexdigest()
                row["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(row)
        return {
            "id": self.repository,
            "sha": self.commit,
            "siblings": siblings,
            "cardData": self.card,
            "gated": "manual" if self.closed else False,
            "private": False,
        }

    def downloads(self, name: str) -> list[str | None]:
        """Range headers of all transfers of one file."""
        end = f"/{name}"
        return [r for method, path, r in self.requests if method == "GET" and path.endswith(end)]


def etag_of(content: bytes) -> str:
    if len(content) >= LFS_FROM_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.requests.append((self.command, path, self.headers.get("Range")))
        hub.tokens.append(self.headers.get("Authorization"))
        if hub.redirect:
            return self.send(302, b"", {"Location": hub.redirect}, with_body)
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.refuse(401, "RepoNotFound")
        api, files = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/"
        if path.startswith(api):
            return self.send_listing(path.removeprefix(api), with_body)
        if not path.startswith(files):
            return self.refuse(404, "RepoNotFound")
        if hub.closed:
            return self.refuse(403, "GatedRepo")
        return self.send_file(path.removeprefix(files).split("/", 1)[1], with_body)

    def send_listing(self, rest: str, with_body: bool) -> None:
        hub = self.hub
        if "" in hub.statuses:
            return self.refuse(hub.statuses[""], "")
        if rest not in ("", "/revision/main", f"/revision/{hub.commit}"):
            return self.refuse(404, "RevisionNotFound")
        listing = hub.listed(hub.listing())
        raw = listing if isinstance(listing, bytes) else json.dumps(listing).encode()
        return self.send(200, raw, {}, with_body)

    def send_file(self, name: str, with_body: bool) -> None:
        hub, content = self.hub, self.hub.files[name]
        if name in hub.statuses:
            return self.refuse(hub.statuses[name], "")
        headers = {"ETag": f'"{etag_of(content)}"', "X-Repo-Commit": hub.commit}
        start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        if with_body and hub.cut_once == name:
            if hub.was_cut:
                return self.refuse(403, "NotNow")
            hub.was_cut = True
            return self.send(200, content, headers, with_body, stop=len(content) // 2)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = hub.cut_every if hub.cut_every and len(content) - start > hub.cut_every else None
        return self.send(206 if start else 200, content[start:], headers, with_body, cut)

    def send(
        self, code: int, body: bytes, headers: dict, with_body: bool, stop: int | None = None
    ) -> None:
        self.send_response(code)
        length = {"Content-Length": str(len(body))}
        for key, value in {**headers, **length, **self.hub.headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body[:stop])
        if stop is not None:
            self.close_connection = True

    def refuse(self, code: int, error: str) -> None:
        self.send(code, b"", {"X-Error-Code": error, "X-Error-Message": error}, True)


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run a hub until the block ends."""
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    # Who hangs up in the middle of an answer is part of these tests.
    server.handle_error = lambda request, client_address: None
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of every file below a folder, by its path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
