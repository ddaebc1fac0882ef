"""What the player loads: files in byte ranges, never copied, and previews of the others."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from apollo_cli.errors import UsageError
from apollo_cli.ui.files import AllowedFolders, UiForbidden
from apollo_cli.ui.options import MediaState
from apollo_cli.ui.previews import Previews, is_being_written
from apollo_cli.video.container import shown

_LOG = logging.getLogger("apollo_cli.ui")
# A file may change under the same name, so a browser asks before it uses what it keeps.
_HEADERS = {"cache-control": "private, no-cache"}
_RANGE = re.compile(r"(\d{0,18})-(\d{0,18})", re.ASCII)


class MediaLinks:
    """Addresses for the player, and the routes behind them. Safe for any thread.

    Args:
        files: what may be opened at all.
        previews: makes what a browser does not play; None keeps them in the user's folder.
    """

    def __init__(self, files: AllowedFolders, previews: Previews | None = None) -> None:
        self.files = files
        self.previews = previews or Previews()

    def state(self, path: Path) -> MediaState:
        """How a resolved path can be shown; begins a preview where one is needed.

        The first call for a file takes part of a second, since a child looks into it.
        """
        seen = self.previews.look(path, is_patient=True)
        if seen.kind == "none" or not _link("media", path):
            reason = seen.reason or "its name is not valid UTF-8"
            return MediaState("cannot be shown", kind="none", reason=reason)
        if seen.plays:
            return MediaState("plays", address=_link("media", path), kind=seen.kind)
        try:
            job = None if is_being_written(path.stat()) else self.previews.job(path)
        except OSError as error:
            reason = f"{shown(path.name)} cannot be read ({error.strerror})"
            return MediaState("cannot be shown", kind="none", reason=reason)
        if job is not None and job.failure:
            return MediaState("cannot be shown", kind="none", reason=job.failure)
        if job is None or job.share < 1:
            reason = seen.reason if job else f"{shown(path.name)} is still being written"
            share = job.share if job else 0.0
            return MediaState("making a preview", share=share, kind=seen.kind, reason=reason)
        link = _link("preview", path)
        return MediaState("preview ready", address=link, kind=seen.kind, reason=seen.reason)

    def close(self) -> None:
        """End what runs on the side."""
        self.previews.close()

    def routes(self) -> list[Route]:
        """``/media?file=`` and ``/preview?file=``, for GET and HEAD."""
        return [
            Route("/media", self._media, methods=["GET"]),
            Route("/preview", self._preview, methods=["GET"]),
        ]

    async def _media(self, request: Request) -> Response:
        return await run_in_threadpool(self._answer, request, False)

    async def _preview(self, request: Request) -> Response:
        return await run_in_threadpool(self._answer, request, True)

    def _answer(self, request: Request, is_preview: bool) -> Response:
        try:
            path, kind = self._find(request.query_params.get("file", ""), is_preview)
            return _HeldFile(path, kind)
        except UsageError as error:
            # Also for a file that is not there: whoever asks for names learns nothing.
            return refuse(request, error.message)
        except OSError as error:
            if is_preview:
                return PlainTextResponse("there is no preview; the page makes one", 404)
            # A link was put in its place, or it was deleted, since it was found.
            return refuse(request, error.strerror or "it cannot be opened")

    def _find(self, text: str, is_preview: bool) -> tuple[Path, str]:
        is_upload = self.files.is_upload(Path(text))
        path = self.files.resolve_upload(text) if is_upload else self.files.resolve(text)
        if not path.is_file():
            raise UiForbidden(f"{shown(path)} is no plain file")
        seen = self.previews.look(path)
        if seen.kind == "none":
            raise UiForbidden(seen.reason)
        if is_preview:
            kind = "image/jpeg" if seen.kind == "image" else "video/mp4"
            return self.previews.target(path), kind
        if not seen.plays:
            raise UiForbidden(seen.reason, next_step="the page shows a preview")
        return path, seen.media_type


class _HeldFile(FileResponse):
    """A file that is held open from the last look at its path on: no other can take its place.

    Raises:
        UiForbidden: a link or another file was put in its place just now.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self._held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            facts = os.fstat(self._held)
            # What was opened must be what stands at the end of a path without links.
            if Path(os.path.realpath(path)) != path or not os.path.samestat(facts, os.lstat(path)):
                raise UiForbidden(f"{shown(path)} has become a link")
        except BaseException:
            os.close(self._held)
            raise
        held = f"/dev/fd/{self._held}"
        super().__init__(held, media_type=kind, headers=_HEADERS, stat_result=facts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, tag = Headers(scope=scope), self.headers["etag"]
        known = [name.strip() for name in asked.get("if-none-match", "").split(",")]
        try:
            if {tag, f"W/{tag}", "*"} & {*known}:
                same = Response(status_code=304, headers={"etag": tag, **_HEADERS})
                await same(scope, receive, send)
                return
            if not _is_range(asked.get("range", "")):
                rows = [row for row in scope["headers"] if row[0] != b"range"]
                scope = {**scope, "headers": rows}
            await super().__call__(scope, receive, _Announced(send).send)
        finally:
            os.close(self._held)


class _Announced:
    """Sends no more than was announced, however the file grows meanwhile."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._left: int | None = None

    async def send(self, message: Message) -> None:
        if self._left is None:
            self._left = int(Headers(raw=message["headers"])["content-length"])
        elif message["body"]:
            if not self._left:
                # All of it was sent, and its end told.
                return
            body = message["body"][: self._left]
            self._left -= len(body)
            message = {**message, "body": body, "more_body": bool(self._left)}
        await self._send(message)


def _is_range(asked: str) -> bool:
    """Whether pieces are asked for; what is malformed counts as not asked."""
    unit, _, rest = asked.partition("=")
    found = [_RANGE.fullmatch(part.strip()) for part in rest.split(",")]
    pairs = [part.groups() for part in found if part]
    return (
        unit.strip().lower() == "bytes"
        and len(pairs) == len(found)
        and all(
            (start or end) and (not start or not end or int(start) <= int(end))
            for start, end in pairs
        )
    )


def refuse(request: Request, reason: str) -> Response:
    """403, and a line on stderr that says what was asked for and by whom."""
    asked = shown(f"{request.method} {request.url.path}?{request.url.query}"[:300])
    client = request.client.host if request.client else "unknown"
    _LOG.warning("refused: %s from %s: %s", asked, client, reason[:300])
    return PlainTextResponse("this may not be opened here", 403)


def _link(route: str, path: Path) -> str:
    # A name that is not UTF-8 has no address: the browser could not send it back.
    try:
        return f"{route}?file={quote(str(path), safe='')}"
    except UnicodeEncodeError:
        return ""
