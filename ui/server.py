"""The server of the local chat: Gradio's page and our media routes behind one gate."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import uvicorn

from apollo_cli.atomic import scratch_folder
from apollo_cli.errors import UsageError
from apollo_cli.ui.files import UPLOADS, AllowedFolders
from apollo_cli.ui.gate import App, Gate, Rules, is_loopback
from apollo_cli.ui.media import MediaLinks
from apollo_cli.ui.options import UiDefaults, UiOptions
from apollo_cli.video.guard import GuardedReader

if TYPE_CHECKING:
    from starlette.routing import Route

    from apollo_cli.engine import Apollo
    from apollo_cli.loaded_model import FoundModel
    from apollo_cli.memory_plan import Settings
    from apollo_cli.ui.desk import Desk
    from apollo_cli.watcher import Progress

_LOG = logging.getLogger("apollo_cli.ui")
_FIRST_PORT, _PORTS = 7860, 100
_QUESTION_BYTES = 2048
# Pages that are open hold a line each, without end.
_GOODBYE_SECONDS = 0
_MOST_THREADS = 500


@dataclass(frozen=True)
class Site:
    """What is served. ``app`` is an ASGI application; the rest is for those who look behind it."""

    app: App
    desk: Desk
    files: AllowedFolders
    media: MediaLinks


@contextlib.contextmanager
def open_site(options: UiOptions) -> Iterator[Site]:
    """Build the page and everything behind it; at the end all of it is taken down.

    The model is not loaded yet: that is ``site.desk.start``.
    """
    with contextlib.ExitStack() as stack:
        uploads = stack.enter_context(scratch_folder(UPLOADS))
        # Gradio reads these when it is imported, and when its page is built.
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_TEMP_DIR"] = str(uploads)
        from apollo_cli.ui.desk import Desk
        from apollo_cli.ui.page import build_page, page_looks
        from apollo_cli.ui.presence import Presence

        files = AllowedFolders(options.allow, options.files, uploads)
        media = MediaLinks(files)
        stack.callback(media.close)
        ending = threading.Event()
        desk = Desk(
            lambda report: _load(options, report, ending),
            opener=GuardedReader(),
            keep_videos=options.keep_videos,
            check_file=files.check_still,
        )
        media.previews.is_wanted = desk.shows
        stack.callback(desk.close)
        stack.callback(ending.set)
        defaults = UiDefaults(
            sampling=options.sampling,
            reading=options.reading,
            generation=options.generation,
            files=options.files,
            max_upload_bytes=options.max_upload_bytes,
        )
        blocks = build_page(desk, files, media, defaults)
        routes = [*media.routes(), *Presence(desk).routes()]
        yield Site(build_app(blocks, routes, files, options, **page_looks()), desk, files, media)


def build_app(
    blocks: Any, routes: Sequence[Route], files: AllowedFolders, options: UiOptions, **look: Any
) -> App:
    """Gradio's page beside our routes, and the gate in front of both.

    Args:
        blocks: a ``gradio.Blocks``. files: what may be opened.
        look: more of ``gradio.mount_gradio_app``: theme, css and such.
    """
    import gradio
    from fastapi import FastAPI

    web = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, routes=[*routes])
    settings: dict[str, Any] = {
        **look,
        "footer_links": [],
        "run_history": False,
        "show_error": False,
        "max_file_size": options.max_upload_bytes,
        "ssr_mode": False,
        "enable_monitoring": False,
        "pwa": False,
        "mcp_server": False,
    }
    web = gradio.mount_gradio_app(web, blocks, path="/", **settings)
    return Gate(web, Rules(options.host, options.auth, files, options.max_upload_bytes))


def serve(options: UiOptions, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or a signal to end.

    Args:
        say: is given one line with the address, once the page can be opened.

    Raises:
        UsageError: the host is not one of this machine, or the port is taken.
    """
    with _ending_cleanly(), open_listener(options.host, options.port) as listener:
        _tell_on_stderr()
        address = address_of(options.host, listener.getsockname()[1])
        with open_site(options) as site:

            def begin() -> None:
                site.desk.start()
                say(address)
                if options.show_page and _has_screen():
                    threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()

            Server(site.app, begin).run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn with our settings; ``begin`` is called once it accepts requests."""

    def __init__(self, app: App, begin: Callable[[], None]) -> None:
        settings = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType]
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=_GOODBYE_SECONDS,
        )
        super().__init__(settings)
        self._begin = begin

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept requests, then tell so."""
        # Whoever waits for news of a visit holds a thread, and files are read in others.
        anyio.to_thread.current_default_thread_limiter().total_tokens = _MOST_THREADS
        await super().startup(sockets=sockets)
        self._begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Hang up on all tabs, of which every open one would be told as a fault."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets=sockets)


def open_listener(host: str, port: int | None) -> socket.socket:
    """A listening socket; without a port, the first free one from 7860 on.

    Raises:
        UsageError: the host is not one of this machine, or no such port is free.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        allowed = "allowed are a name or address of this machine"
        raise UsageError(f"--host {host} has no address", allowed, "try 127.0.0.1") from None
    family, address = found[0][0], str(found[0][4][0])
    wanted = range(_FIRST_PORT, _FIRST_PORT + _PORTS) if port is None else (port,)
    for number in wanted:
        listener = socket.socket(family, socket.SOCK_STREAM)
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, number))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"--host {host} --port {number}: {error.strerror}") from None
        else:
            return listener
    taken = f"--port {port} is taken" if port is not None else "no port from 7860 on is free"
    raise UsageError(taken, next_step="choose another, or leave --port out")


def address_of(host: str, port: int) -> str:
    """What to type into a browser."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def check_open(host: str, auth: tuple[str, str] | None, no_auth: bool) -> None:
    """Refuse to serve other machines without a password unless that was said in so many words.

    Raises:
        UsageError: neither was given, or the host has no address.
    """
    try:
        is_private = is_loopback(host)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host} has no address", next_step="try 127.0.0.1") from None
    if not (is_private or auth or no_auth):
        raise UsageError(
            f"--host {host} lets other machines in",
            "needed is --auth user:password, or --no-auth to let in anybody",
            "set APOLLO_UI_AUTH=user:password, which no list of processes shows",
        )


def _load(options: UiOptions, report: Progress, ending: threading.Event) -> Apollo:
    from apollo_cli.engine import load_found
    from apollo_cli.loaded_model import find_model
    from apollo_cli.ui.visit import Stopped

    def tell(stage: str, done: int, total: int) -> None:
        # Who ends the server does not wait for the weights.
        if ending.is_set():
            raise Stopped
        report(stage, done, total)

    reader, found = GuardedReader(), find_model(**options.model)
    settings = _fit(options, found, reader) if options.fit else None
    return load_found(found, settings=settings, reader=reader, on_progress=tell)


def _fit(options: UiOptions, found: FoundModel, reader: GuardedReader) -> Settings:
    from apollo_cli.memory_plan import fit_videos
    from apollo_cli.weights.checkpoint import stored_kind

    fitted = fit_videos(
        found.planner,
        found.hardware,
        [reader.probe(file, options.reading) for file in options.files],
        options.sampling,
        question_bytes=_QUESTION_BYTES,
        answer_tokens=options.generation.max_new_tokens,
        quant=found.quant,
        stored=stored_kind(found.located.checkpoint),
    )
    for sentence in fitted.given_up:
        _LOG.warning("%s", sentence)
    return fitted.settings


class _OneLine(logging.Handler):
    """Each record is one line on stderr; of an exception, its kind and text."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip().splitlines()[:1]
        error = record.exc_info[1] if record.exc_info else None
        what = [f"{type(error).__name__}: {' '.join(str(error).split())}"] if error else []
        sys.stderr.write(f"note: {' '.join([*text, *what])}\n")
        sys.stderr.flush()


def _tell_on_stderr() -> None:
    for name in ("apollo_cli.ui", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [_OneLine(logging.WARNING)], False
        logger.setLevel(logging.WARNING)


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Ctrl-C and SIGTERM are how a server ends: what it keeps on the side is cleared up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
    finally:
        signal.signal(signal.SIGTERM, before)


def _has_screen() -> bool:
    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return sys.platform in ("win32", "darwin") or has_display
