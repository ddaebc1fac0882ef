"""Real servers for tests: any application, or the whole chat with apollo-nano, on a free port."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from apollo_cli.ui.gate import App
from apollo_cli.ui.options import UiOptions
from apollo_cli.ui.server import Server, Site, open_listener, open_site
from tests.waiting import PATIENCE_SECONDS

NANO = {"model": "apollo-nano", "device": "cpu", "dtype": None, "quant": None, "template": None}


class Reply(NamedTuple):
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes


def request(
    address: str,
    path: str,
    method: str = "GET",
    body: bytes | Iterator[bytes] | None = None,
    more: Mapping[str, str] | None = None,
    **headers: str,
) -> Reply:
    """Send one request with its path exactly as written, and read all of the answer.

    Args:
        body: an iterator is sent in chunks, without its length.
        more: headers. headers: likewise, with ``_`` for ``-`` in their names.
    """
    place = urlsplit(address)
    connection = HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_SECONDS)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()} | dict(
            more or {}
        )
        connection.request(method, path, body, named, encode_chunked=not isinstance(body, bytes))
        answer = connection.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, told, answer.read())
    finally:
        connection.close()


@contextmanager
def serving(app: App) -> Iterator[str]:
    """Serve an application from a thread; yields its address, with a slash at the end."""
    ready = threading.Event()
    with open_listener("127.0.0.1", 0) as listener:
        server = Server(app, ready.set)
        thread = threading.Thread(target=server.run, args=[[listener]], daemon=True)
        thread.start()
        assert ready.wait(PATIENCE_SECONDS)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@contextmanager
def chatting(folder: Path, **changes: Any) -> Iterator[tuple[str, Site]]:
    """Serve the chat with apollo-nano over one folder, as ``apollo ui`` does.

    Args:
        changes: fields of ``UiOptions``.
    """
    options = replace(UiOptions(model=dict(NANO), allow=(folder,), show_page=False), **changes)
    with open_site(options) as site, serving(site.app) as address:
        site.desk.start()
        yield address, site
