"""The gate in front of every route, Gradio's own included: who may ask for what, and how much."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import ipaddress
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse

from apollo_cli.ui.event_data import names_only_uploads
from apollo_cli.ui.files import AllowedFolders
from apollo_cli.video.container import shown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_LOG = logging.getLogger("apollo_cli.ui")

# What the page needs of Gradio. Left out are its routes for other files, other addresses, logins,
# monitoring, code, recording and streams.
_ROUTES = re.compile(
    r"/(|media|preview|presence|config|theme\.css|favicon\.ico|manifest\.json|robots\.txt)"
    r"|/(assets|static|svelte)/[\w./@+~-]+"
    r"|/gradio_api/(info|config|theme\.css|app_id|login_check|startup-events|upload|"
    r"upload_progress|cancel|reset/?|queue/join|queue/data|heartbeat/\w+|run/\w+)"
)
_FILE_ROUTES = ("/gradio_api/file=", "/file=")
_UPLOAD = "/gradio_api/upload"

# Talk and settings travel in other requests; beside a file, an upload holds a few headers.
_MOST_BODY_BYTES, _MULTIPART_BYTES = 16_000_000, 100_000
_DRAINED_BYTES, _DRAIN_SECONDS = 16_000_000, 2.0
# Who announced a file and sends nothing of it keeps its space from the others for so long.
_PAUSE_SECONDS = 30.0
# An upload that no page has opened by then is left over; all of them share four times the limit.
_UNOPENED_SECONDS, _ALL_UPLOADS = 300.0, 4
_FULL = "uploads of all visitors fill their space; try again in some minutes, or open a path"
_WRONG_PASSWORD_SECONDS = 0.5

# Gradio's page has scripts and styles inside of it and makes functions from text, so these are
# allowed; nothing from elsewhere is.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Refused(Exception):
    """An answer that is given before any route is asked; with a reason, it is told on stderr."""

    def __init__(self, status: int, text: str, reason: str = "") -> None:
        self.status, self.text, self.reason = status, text, reason
        super().__init__(text)


@dataclass(frozen=True)
class Rules:
    """What the gate holds.

    Attributes:
        host: where the server listens. auth: user and password, None for no question.
        files: says where dropped files lie, and which of them are in use.
        max_upload_bytes: of what is dropped at once; of all that lies there, four times that.
    """

    host: str
    auth: tuple[str, str] | None
    files: AllowedFolders
    max_upload_bytes: int


class Gate:
    """An ASGI application around another one; it passes on what the rules allow."""

    def __init__(self, app: App, rules: Rules) -> None:
        self.app = app
        self.rules = rules
        self._is_private = is_loopback(rules.host)
        self._names = _own_names(rules.host, self._is_private)
        self._coming: list[int] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        send = _with_headers(send)
        try:
            self._check(scope)
            await self._pass_on(scope, receive, send)
        except Refused as refused:
            if refused.status == 401:
                await asyncio.sleep(_WRONG_PASSWORD_SECONDS if refused.reason else 0)
            if refused.reason:
                client = scope["client"][0] if scope.get("client") else "unknown"
                query = scope["query_string"].decode("latin-1")
                asked = shown(f"{scope['method']} {scope['path']}{'?' if query else ''}{query}")
                _LOG.warning("refused: %s from %s: %s", asked[:300], client, refused.reason[:300])
            challenge = {"www-authenticate": 'Basic realm="apollo", charset="UTF-8"'}
            headers = {"connection": "close", **(challenge if refused.status == 401 else {})}
            answer = PlainTextResponse(refused.text, refused.status, headers)
            await answer(scope, receive, send)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers)
        self._check_password(headers)
        _check_origin(scope["method"], headers)
        self._check_path(scope["path"])

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not self._is_ours(name):
            reason = f"the host {shown(', '.join(hosts))[:100]} is not this server"
            raise Refused(403, "this server does not answer to that name", reason)

    def _is_ours(self, name: str) -> bool:
        # A page elsewhere can give its own name our address, but has no password for it.
        if self.rules.auth is not None or name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_private

    def _check_password(self, headers: Headers) -> None:
        if self.rules.auth is None:
            return
        given = headers.get("authorization", "")
        kind, _, code = given.partition(" ")
        try:
            said = base64.b64decode(code.strip(), validate=True)
        except (binascii.Error, ValueError):
            said = b""
        right = hmac.compare_digest(said, ":".join(self.rules.auth).encode())
        if not (right and kind.lower() == "basic"):
            reason = "wrong user or password" if given else ""
            raise Refused(401, "user and password are needed", reason)

    def _check_path(self, path: str) -> None:
        for route in _FILE_ROUTES:
            if path.startswith(route):
                self._check_file(path.removeprefix(route))
                return
        steps = path.replace("\\", "/").split("/")
        if ".." in steps or not _ROUTES.fullmatch(path):
            raise Refused(403, "this may not be opened here", "no such route is open")

    def _check_file(self, name: str) -> None:
        try:
            real = Path(os.path.realpath(name))
        except (OSError, ValueError):
            real = Path("/")
        if not os.path.isabs(name) or not self.rules.files.is_upload(real):
            raise Refused(403, "this may not be opened here", "the file is not one of the page")

    async def _pass_on(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        is_upload = scope["path"] == _UPLOAD
        most = self.rules.max_upload_bytes + _MULTIPART_BYTES if is_upload else _MOST_BODY_BYTES
        announced = Headers(scope=scope).get("content-length", "")
        size = int(announced) if announced.isdecimal() else most
        body = _Body(receive, send, most)
        too_much = Refused(413, f"more than the {most / 1e6:,.0f} MB that are allowed", "too large")
        refused = too_much if size > most and announced else None
        if refused is None and is_upload and not self._has_room(size):
            refused = Refused(507, _FULL, "uploads fill all of their space")
        if refused is not None:
            await body.drain()
            raise refused
        if is_upload:
            self._coming.append(size)
        try:
            # Gradio copies the files that an event names before our code sees them.
            given = body.receive if is_upload else await body.read_whole(self._check_data)
            await self.app(scope, given, body.send)
        except ClientDisconnect:
            # The visitor left while sending, stood still, or sent more than is allowed.
            pass
        finally:
            if is_upload:
                self._coming.remove(size)
                self._sweep()
        if body.is_answered:
            return
        if body.is_stalled:
            raise Refused(408, "the rest did not come; send it again", "it stood still")
        if body.is_over:
            await body.drain()
            raise too_much

    def _check_data(self, raw: bytes) -> None:
        try:
            is_fine = names_only_uploads(raw, self.rules.files)
        except ValueError:
            raise Refused(400, "this is no JSON", "its data is no JSON") from None
        if not is_fine:
            raise Refused(403, "this may not be opened here", "its data names a file")

    def _has_room(self, size: int) -> bool:
        """Whether an upload of so many bytes fits beside those that lie there or are on the way."""
        room = _ALL_UPLOADS * (self.rules.max_upload_bytes + _MULTIPART_BYTES)
        return self._sweep() + sum(self._coming) + size <= room

    def _sweep(self) -> int:
        """Delete what broken uploads left, and what nobody opened; the bytes of what stays."""
        kept, now, files = 0, time.time(), self.rules.files
        files.opened -= {path for path in list(files.opened) if not path.exists()}
        for path in files.uploads.rglob("*") if files.uploads else ():
            with contextlib.suppress(OSError):
                facts = path.lstat()
                if stat.S_ISDIR(facts.st_mode):
                    continue
                # Whole ones lie in folders of their own.
                is_part = path.parent == files.uploads and path.name.startswith("tmp")
                is_left = path not in files.opened and now - facts.st_mtime > _UNOPENED_SECONDS
                if not self._coming if is_part else is_left:
                    path.unlink()
                else:
                    kept += 0 if is_part else facts.st_size
        return kept


class _Body:
    """A request's body with limits; past them the application sees a visitor who has left."""

    def __init__(self, receive: Receive, send: Send, most: int) -> None:
        self._receive, self._send, self._left = receive, send, most
        self._is_read = False
        self.is_answered = self.is_stalled = False

    @property
    def is_over(self) -> bool:
        return self._left < 0

    @property
    def is_cut(self) -> bool:
        return self.is_over or self.is_stalled

    async def receive(self) -> Message:
        message: Message = {"type": "http.disconnect"}
        if self.is_cut:
            return message
        try:
            # What comes behind the body is that the visitor left, however late that is.
            async with asyncio.timeout(None if self._is_read else _PAUSE_SECONDS):
                read = await self._read()
        except TimeoutError:
            self.is_stalled = True
            return message
        return message if self.is_over else read

    async def read_whole(self, check: Callable[[bytes], None]) -> Receive:
        """Read all of the body and look at it; what is returned gives it once more."""
        raw, is_given = bytearray(), False
        while not self._is_read:
            message = await self.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            raw += message.get("body", b"")
        check(bytes(raw))

        async def again() -> Message:
            nonlocal is_given
            if is_given:
                return await self.receive()
            is_given = True
            return {"type": "http.request", "body": bytes(raw), "more_body": False}

        return again

    async def send(self, message: Message) -> None:
        if self.is_cut and not self.is_answered:
            return
        if not self.is_answered:
            self.is_answered = True
            if not await self.drain():
                # Otherwise all that still comes would be read and thrown away, without end.
                MutableHeaders(scope=message)["connection"] = "close"
        await self._send(message)

    async def drain(self) -> bool:
        """Read some of what is left, since who is still sending sees no answer; is that all?"""
        left = self._left - _DRAINED_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not self._is_read and self._left > left:
                    await self._read()
        return self._is_read

    async def _read(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        self._is_read = self._is_read or not message.get("more_body", False)
        return message


def is_loopback(host: str) -> bool:
    """Whether a server there is reached from this machine only.

    Raises:
        OSError: the host has no address.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(str(row[4][0]).split("%")[0]).is_loopback for row in found)


def _own_names(host: str, is_private: bool) -> frozenset[str]:
    names = {"localhost", host.lower().strip("[]")}
    if not is_private:
        own = socket.gethostname().lower()
        names |= {own, f"{own.split('.')[0]}.local", socket.getfqdn().lower()}
    return frozenset(names)


def _host_name(host: str) -> str | None:
    """The name in a Host header, without port and brackets; None where it is malformed."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?", host, re.ASCII)
    return found[1].strip("[]").lower().rstrip(".") if found else None


def _check_origin(method: str, headers: Headers) -> None:
    """Refuse what a page from elsewhere sends; following a link to the page itself is fine."""
    refused = Refused(403, "requests from other pages are refused", "it comes from another page")
    origin = headers.get("origin")
    is_read = method in ("GET", "HEAD")
    if origin is not None and (not is_read or origin != "null"):
        try:
            other = urlsplit(origin).netloc.lower()
        except ValueError:
            raise refused from None
        if other != headers["host"].lower():
            raise refused
    navigates = is_read and headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigates:
        raise refused


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
        await send(message)

    return sending
