"""Real servers for tests: any application, or the whole chat with apollo-nano, on a free port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from apollo_cli.ui.gate import App
from apollo_cli.ui.options import UiOptions
from apollo_cli.ui.server import Server, Site, open_listener, open_site

NANO = {"model": "apollo-nano", "device": "cpu", "dtype": None, "quant": None, "template": None}


@contextmanager
def serving(app: App) -> Iterator[str]:
    """Serve an application from a thread; yields its address, with a slash at the end."""
    ready = threading.Event()
    with open_listener("127.0.0.1", 0) as listener:
        server = Server(app, ready.set)
        thread = threading.Thread(target=server.run, args=[[listener]], daemon=True)
        thread.start()
        assert ready.wait(30)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(30)


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
