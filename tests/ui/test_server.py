"""The gate covers every route, Gradio's own included; over real HTTP with Gradio's real routes."""

import asyncio
import base64
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from apollo_cli.errors import UsageError
from apollo_cli.ui.files import AllowedFolders
from apollo_cli.ui.gate import Gate, Rules
from apollo_cli.ui.media import MediaLinks
from apollo_cli.ui.options import UiOptions
from apollo_cli.ui.previews import Previews
from apollo_cli.ui.server import address_of, build_app, check_open, open_listener
from tests.ui.serving import Reply, request, serving
from tests.waiting import PATIENCE_SECONDS, until

MOST_BYTES = 1_000_000
ROUTES = [
    "/",
    "/config",
    "/theme.css",
    "/media?file=a.mp4",
    "/preview?file=a.mp4",
    "/gradio_api/info",
    "/gradio_api/queue/data?session_hash=x",
    "/gradio_api/heartbeat/x",
    "/gradio_api/upload_progress?upload_id=x",
    "/gradio_api/file=/etc/passwd",
    "/nowhere",
]


class Served:
    """A small page of Gradio behind our gate."""

    def __init__(self, folder: Path, auth: tuple[str, str] | None = None) -> None:
        import gradio as gr

        self.uploads = folder / "uploads"
        self.uploads.mkdir()
        (folder / "videos").mkdir()
        os.environ["GRADIO_TEMP_DIR"] = str(self.uploads)
        options = UiOptions(
            allow=(folder / "videos",), auth=auth, max_upload_bytes=MOST_BYTES, show_page=False
        )
        files = AllowedFolders(options.allow, uploads=self.uploads)
        self.media = MediaLinks(files, Previews(folder / "previews"))
        with gr.Blocks(analytics_enabled=False) as blocks:
            said, told = gr.Textbox(), gr.Textbox()

            def spell(text: str) -> Iterator[str]:
                yield from (text[:end] for end in range(1, len(text) + 1))

            said.submit(spell, said, told)
        self.app = build_app(blocks, self.media.routes(), files, options)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def address(served: Served) -> Iterator[str]:
    with serving(served.app) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(Served(tmp_path_factory.mktemp("guarded"), ("ann", "pä:ss")).app) as found:
        yield found


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [row.getMessage() for row in caplog.records if row.name == "apollo_cli.ui"]


def send_files(address: str, *sizes: int, in_chunks: bool = False) -> Reply:
    """Drop files of these sizes, as the page does."""
    pieces = []
    for number, size in enumerate(sizes):
        head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{number}.mp4"'
        pieces += [f"{head}\r\n\r\n".encode(), bytes([number]) * size, b"\r\n"]
    body = [*pieces, b"--x--\r\n"]
    return request(
        address,
        "/gradio_api/upload",
        "POST",
        iter(body) if in_chunks else b"".join(body),
        Content_Type="multipart/form-data; boundary=x",
    )


def test_the_page_is_served_and_may_load_nothing_from_elsewhere(address: str):
    reply = request(address, "/")
    assert reply.status == 200 and b"gradio" in reply.body
    policy = reply.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "http" not in policy and "*" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["x-frame-options"] == "DENY"
    assert "server" not in reply.headers


def test_the_page_does_nothing_of_what_gradio_does_with_other_machines(address: str):
    config = json.loads(request(address, "/config").body)
    assert config["analytics_enabled"] is False
    assert config["space_id"] is None and not config.get("mcp_server")
    assert config["max_file_size"] == MOST_BYTES


def test_the_server_itself_asks_no_other_machine_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: set[str] = set()
    connect = socket.socket.connect

    def note(line: socket.socket, place: Any) -> None:
        asked.add(str(place[0]))
        connect(line, place)

    monkeypatch.setattr(socket.socket, "connect", note)
    with serving(Served(tmp_path).app) as found:
        assert request(found, "/").status == 200
    assert asked == {"127.0.0.1"}


def test_an_event_goes_through_the_queue_and_streams(address: str):
    (dependency,) = json.loads(request(address, "/config").body)["dependencies"]
    asked = {"data": ["abc"], "fn_index": dependency["id"], "session_hash": "s1"}
    reply = request(
        address,
        "/gradio_api/queue/join",
        "POST",
        json.dumps(asked).encode(),
        Content_Type="application/json",
        Origin=address.rstrip("/"),
    )
    assert reply.status == 200
    streamed = request(address, "/gradio_api/queue/data?session_hash=s1").body
    assert b'"data":["a"]' in streamed and b'"process_completed"' in streamed


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("given", [None, "ann:wrong", "ann:pä:ss:", "Ann:pä:ss", ""])
def test_no_route_answers_without_the_password(
    guarded: str, path: str, given: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("apollo_cli.ui.gate._WRONG_PASSWORD_SECONDS", 0)
    reply = request(guarded, path, more={} if given is None else {"Authorization": basic(given)})
    assert (reply.status, reply.body) == (401, b"user and password are needed")
    assert reply.headers["www-authenticate"].startswith("Basic ")


@pytest.mark.parametrize(
    "path", ["/gradio_api/queue/join", "/gradio_api/upload", "/gradio_api/run/x"]
)
def test_nothing_is_taken_without_the_password(guarded: str, path: str):
    assert request(guarded, path, "POST", b"{}", Content_Type="application/json").status == 401


def test_a_wrong_password_is_told_on_stderr_and_never_repeated(
    guarded: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, logger="apollo_cli.ui"):
        request(guarded, "/", Authorization=basic("ann:guess"))
    (line,) = refusals(caplog)
    assert "wrong user or password" in line and "guess" not in line


@pytest.mark.parametrize("given", ["Basic", "Basic %%%", "Basic YQ=", "Bearer " + "YW5uOnBh"])
def test_a_malformed_password_is_a_wrong_one(guarded: str, given: str):
    assert request(guarded, "/", Authorization=given).status == 401


def test_the_right_password_opens_the_page(guarded: str):
    assert request(guarded, "/", Authorization=basic("ann:pä:ss")).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=%2Fetc%2Fpasswd",
        "/gradio_api/file=..%2f..%2f..%2fetc%2fpasswd",
        "/gradio_api/file=/proc/self/environ",
        "/gradio_api/file=http://127.0.0.1:1/",
        "/gradio_api/file=https://example.org/a.mp4",
        "/gradio_api/file=",
        "/gradio_api/file=a%00b",
        "/gradio_api/file/etc/passwd",
        "/file=/etc/passwd",
        "/gradio_api/proxy=http://127.0.0.1:1/",
        "/static/../../../../etc/passwd",
        "/static/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/assets/..%5c..%5cconfig",
        "/media/../config",
        "//config",
        "/gradio_api/component_server",
        "/gradio_api/custom_component/1/client/component/x",
        "/gradio_api/stream/x/1/2/playlist.m3u8",
        "/gradio_api/call/x",
        "/gradio_api/vibe-code",
        "/gradio_api/runs",
        "/gradio_api/run-history/buckets",
        "/gradio_api/openapi.json",
        "/monitoring",
        "/monitoring/summary",
        "/login",
        "/docs",
        "/openapi.json",
        "/.env",
    ],
)
def test_routes_to_other_files_and_places_are_refused_with_a_line(
    address: str, path: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, logger="apollo_cli.ui"):
        reply = request(address, path)
    assert (reply.status, reply.body) == (403, b"this may not be opened here")
    (line,) = refusals(caplog)
    assert line.startswith("refused: GET /")


def test_a_line_of_a_refusal_is_never_long(address: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="apollo_cli.ui"):
        request(address, "/media?file=" + "/x" * 2000)
        request(address, "/" + "x" * 4000)
    assert [len(line) < 800 for line in refusals(caplog)] == [True, True]


def test_only_uploads_come_back_through_gradio_and_no_link_leads_out(
    address: str, served: Served, tmp_path: Path
):
    (name,) = json.loads(send_files(address, 10).body)
    assert request(address, f"/gradio_api/file={name}").body == b"\0" * 10
    secret = tmp_path / "secret.mp4"
    secret.write_text("x")
    (served.uploads / "link.mp4").symlink_to(secret)
    for path in (served.uploads / "link.mp4", served.uploads / ".." / "videos" / "a.mp4", secret):
        assert request(address, f"/gradio_api/file={path}").status == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:7860", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.1.5", 403),
        ("", 403),
        ("localhost:1@evil.example", 403),
    ],
)
def test_only_our_own_names_are_answered(address: str, host: str, status: int):
    assert request(address, "/", Host=host).status == status


def test_a_server_for_other_machines_answers_to_addresses_and_its_own_names(tmp_path: Path):
    files = AllowedFolders([], uploads=tmp_path)
    names = Gate(lambda *_: None, Rules("0.0.0.0", None, files, 1))  # pyright: ignore
    allowed = ("192.168.1.5", "10.0.0.1", socket.gethostname().lower(), "localhost", "0.0.0.0")
    assert all(names._is_ours(name) for name in allowed)
    assert not names._is_ours("evil.example")
    with_password = Gate(lambda *_: None, Rules("0.0.0.0", ("a", "b"), files, 1))  # pyright: ignore
    assert with_password._is_ours("films.example")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://[bad"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 422),
        ({}, 422),
    ],
)
def test_no_other_page_can_send_anything(address: str, headers: dict[str, str], status: int):
    reply = request(
        address, "/gradio_api/queue/join", "POST", b"{}", headers, Content_Type="application/json"
    )
    assert reply.status == status


def test_another_page_can_link_to_ours_and_show_none_of_its_media(address: str):
    came = {"Sec-Fetch-Site": "cross-site"}
    assert request(address, "/", more=came, Sec_Fetch_Mode="navigate").status == 200
    assert request(address, "/media?file=a.mp4", more=came, Sec_Fetch_Mode="no-cors").status == 403


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize(
    ("sizes", "status"),
    [([MOST_BYTES], 200), ([MOST_BYTES + 1], 413), ([MOST_BYTES // 2] * 3, 413)],
)
def test_uploads_have_a_limit_and_leave_nothing_when_they_exceed_it(
    address: str, served: Served, in_chunks: bool, sizes: list[int], status: int
):
    before = set(served.uploads.iterdir())
    assert send_files(address, *sizes, in_chunks=in_chunks).status == status
    assert status == 200 or set(served.uploads.iterdir()) == before


def test_uploads_share_a_space_and_what_nobody_opened_is_deleted_after_a_while(tmp_path: Path):
    served = Served(tmp_path)
    with serving(served.app) as address:
        names = []
        for number in range(4):
            names += json.loads(send_files(address, MOST_BYTES - number).body)
        full = send_files(address, MOST_BYTES - 4)
        assert full.status == 507 and b"fill their space" in full.body
        served.media.files.opened.add(Path(names[0]))
        for name in names[:2]:
            os.utime(name, (1, 1))
        assert send_files(address, MOST_BYTES - 4).status == 200
        assert [Path(name).exists() for name in names] == [True, False, True, True]


def test_an_endless_upload_is_cut_off(address: str, served: Served):
    sent = []

    def endless() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
        while True:
            sent.append(1)
            yield bytes(100_000)

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    try:
        status = request(address, "/gradio_api/upload", "POST", endless(), headers).status
    except OSError:
        # The server hung up before all was sent.
        status = 413
    assert status == 413 and len(sent) < 1000
    assert not [path for path in served.uploads.iterdir() if path.name.startswith("tmp")]


def begin_upload(address: str, sent: int = 1000) -> socket.socket:
    """Announce a file of the size that is allowed, and send the first bytes of it."""
    line = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1].strip("/"))))
    head = "POST /gradio_api/upload HTTP/1.1\r\nHost: localhost\r\n"
    kind = "Content-Type: multipart/form-data; boundary=x\r\n"
    size = f"Content-Length: {MOST_BYTES}\r\n\r\n"
    part = '--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
    line.sendall((head + kind + size + part).encode() + bytes(sent))
    return line


def test_a_visitor_who_leaves_in_the_middle_of_an_upload_leaves_nothing(
    address: str, served: Served
):
    begin_upload(address, 100_000).close()
    until(lambda: not [path for path in served.uploads.iterdir() if path.name.startswith("tmp")])


def test_uploads_that_stand_still_are_ended_and_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("apollo_cli.ui.gate._PAUSE_SECONDS", 0.5)
    served = Served(tmp_path)
    with serving(served.app) as address, contextlib.ExitStack() as stack:
        lines = [stack.enter_context(begin_upload(address)) for _ in range(4)]
        told = [line.makefile("rb").read() for line in lines]
        assert all(text.startswith(b"HTTP/1.1 408 ") for text in told)
        assert told[0].endswith(b"the rest did not come; send it again")
        monkeypatch.setattr("apollo_cli.ui.gate._PAUSE_SECONDS", PATIENCE_SECONDS)
        assert send_files(address, MOST_BYTES).status == 200
        assert not [path for path in served.uploads.iterdir() if path.name.startswith("tmp")]


def test_an_upload_that_comes_slowly_and_a_page_that_only_listens_are_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each piece has the whole limit anew; who has sent all has none."""
    limits, limit = [], asyncio.timeout

    def noted(seconds: float | None) -> asyncio.Timeout:
        limits.append(seconds)
        return limit(None if seconds == PATIENCE_SECONDS else seconds)

    monkeypatch.setattr(asyncio, "timeout", noted)
    monkeypatch.setattr("apollo_cli.ui.gate._PAUSE_SECONDS", PATIENCE_SECONDS)
    sent: list[int] = []

    def slowly() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
        for piece in range(4):
            # The server waits for the next piece, so that each arrives by itself.
            until(lambda: limits.count(PATIENCE_SECONDS) > len(sent))
            sent.append(piece)
            yield bytes(1000)
        yield b"\r\n--x--\r\n"

    with serving(Served(tmp_path).app) as address:
        port = int(address.rsplit(":", 1)[1].strip("/"))
        with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as line:
            line.sendall(b"GET /gradio_api/heartbeat/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert line.recv(1000).startswith(b"HTTP/1.1 200 ")
            headers = {"Content-Type": "multipart/form-data; boundary=x"}
            reply = request(address, "/gradio_api/upload", "POST", slowly(), headers)
            assert (reply.status, len(sent)) == (200, 4)
            line.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                assert line.recv(1000) != b""


@pytest.mark.parametrize("announced", [True, False])
def test_other_requests_have_a_limit_too(address: str, announced: bool):
    body = b"x" * 17_000_000
    sent = body if announced else iter([body])
    try:
        reply = request(
            address, "/gradio_api/queue/join", "POST", sent, Content_Type="application/json"
        )
    except OSError:
        return
    assert reply.status == 413


def test_a_page_that_is_open_does_not_hold_up_the_end():
    async def stream() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.05)

    app = Starlette(routes=[Route("/", lambda _: StreamingResponse(stream()))])
    with contextlib.ExitStack() as stack:
        place = urlsplit(stack.enter_context(serving(app)))
        line = socket.create_connection((str(place.hostname), place.port or 0))
        stack.push(lambda *_: line.close())
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert line.recv(10)


def test_a_websocket_is_closed(served: Served):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def visit() -> None:
        await served.app({"type": "websocket", "path": "/", "headers": []}, receive, send)

    asyncio.run(visit())
    assert sent == [{"type": "websocket.close"}]


def test_the_next_free_port_is_taken_and_a_taken_one_is_told():
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {port} is taken; choose another"):
            open_listener("127.0.0.1", port)
    with open_listener("127.0.0.1", None) as first, open_listener("127.0.0.1", None) as second:
        assert second.getsockname()[1] > first.getsockname()[1] >= 7860


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_ours_is_told(host: str):
    with pytest.raises(UsageError, match=f"--host {host} "):
        open_listener(host, 0)


def test_other_machines_are_let_in_only_with_a_password_or_by_decision():
    with pytest.raises(UsageError, match="lets other machines in; needed is --auth"):
        check_open("0.0.0.0", None, no_auth=False)
    check_open("0.0.0.0", ("a", "b"), no_auth=False)
    check_open("0.0.0.0", None, no_auth=True)
    for host in ("127.0.0.1", "localhost", "127.3.2.1"):
        check_open(host, None, no_auth=False)
    with pytest.raises(UsageError, match="has no address"):
        check_open("no.such.host.invalid", None, no_auth=False)


def test_an_address_is_one_that_a_browser_opens():
    assert address_of("127.0.0.1", 7860) == "http://127.0.0.1:7860/"
    assert address_of("::1", 1) == "http://[::1]:1/"
    assert address_of("0.0.0.0", 1) == f"http://{socket.gethostname()}:1/"
