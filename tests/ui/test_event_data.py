"""What an event carries: no file but uploads, whichever event, route, depth and spelling."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apollo_cli.ui.options import UiOptions
from apollo_cli.ui.server import Site, open_site
from tests.ui.serving import NANO, Reply, request, serving

META = {"_type": "gradio.FileData"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "videos").mkdir()
    (folder / "secret.txt").write_text("a secret")
    return folder


@pytest.fixture(scope="module")
def page(place: Path) -> Iterator[tuple[str, Site]]:
    options = UiOptions(model=dict(NANO), allow=(place / "videos",), show_page=False)
    with open_site(options) as site, serving(site.app) as address:
        yield address, site


def post(address: str, path: str, value: Any) -> Reply:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return request(address, path, "POST", raw, Content_Type="application/json")


def drop(address: str, name: str, content: bytes) -> str:
    """Upload a file as the page does; returns the path that the page is told."""
    head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
    body = head.encode() + content + b"\r\n--x--\r\n"
    reply = request(
        address, "/gradio_api/upload", "POST", body, Content_Type="multipart/form-data; boundary=x"
    )
    return json.loads(reply.body)[0]


def events(address: str) -> list[tuple[int, int]]:
    """Every event of the page, and how many values it takes."""
    found = json.loads(request(address, "/config").body)["dependencies"]
    return [(event["id"], len(event["inputs"])) for event in found]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def named(path: str, **more: Any) -> dict[str, Any]:
    return {"path": path, "orig_name": "x.mp4", "size": 8, "meta": META} | more


def forms(path: str) -> dict[str, Any]:
    """Ways to name a file that is no upload."""
    return {
        "plain": named(path),
        "list": [named(path)],
        "deep": {"a": [{"b": [[named(path)]]}]},
        "url": {"url": f"file://{path}", "meta": META},
        "web": named("http://127.0.0.1:9/x"),
        "no meta": {"path": path},
        "only meta": {"meta": META},
        "odd meta": {"path": path, "meta": 7},
        "stream": named(path, is_stream=True),
        "number": named(path) | {"path": 7},
        "root": {"root": named(path)},
    }


@pytest.mark.parametrize("route", ["/gradio_api/queue/join", "/queue/join", "/gradio_api/run/x"])
def test_no_event_takes_a_file_that_is_no_upload(page: tuple[str, Site], place: Path, route: str):
    address, site = page
    assert site.files.uploads is not None
    before = files_below(site.files.uploads)
    found = events(address)
    assert len(found) > 20
    for fn_index, count in found:
        for name, form in forms(str(place / "secret.txt")).items():
            asked = {"fn_index": fn_index, "session_hash": "s", "trigger_id": 1}
            for more in ({"data": [form] * max(1, count)}, {"data": [], "event_data": form}):
                assert post(address, route, asked | more).status == 403, (fn_index, name)
    assert files_below(site.files.uploads) == before


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 200), ("/../lock", 403), ("x", 403), ("\0", 403), ("/", 403)],
)
def test_an_upload_is_taken_by_its_exact_path(
    page: tuple[str, Site], place: Path, ending: str, status: int
):
    address, _ = page
    upload = drop(address, "a b.mp4", b"no video")
    url = f"{address}gradio_api/file={upload}"
    asked = {"fn_index": next(n for n, count in events(address) if count == 2), "session_hash": "s"}
    right = named(upload + ending, url=url)
    reply = post(address, "/gradio_api/queue/join", asked | {"data": ["", right]})
    assert reply.status == status
    other = named(upload, url=f"{address}gradio_api/file={place}/secret.txt")
    reply = post(address, "/gradio_api/queue/join", asked | {"data": ["", other]})
    assert reply.status == 403


@pytest.mark.parametrize("raw", [b"{", b"\xff\xfe{", b"[" * 200_000, b"data=1&path=/etc/passwd"])
@pytest.mark.parametrize(
    "path", ["/gradio_api/queue/join", "/gradio_api/run/x", "/gradio_api/cancel"]
)
def test_data_that_is_no_json_is_refused(page: tuple[str, Site], path: str, raw: bytes):
    assert post(page[0], path, raw).status == 400
