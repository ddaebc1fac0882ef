"""Files reach the player in byte ranges, and nothing else reaches it; over real HTTP."""

import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
from starlette.applications import Starlette

from apollo_cli.ui import media as media_module
from apollo_cli.ui import previews as previews_module
from apollo_cli.ui.files import AllowedFolders
from apollo_cli.ui.media import MediaLinks
from apollo_cli.ui.previews import Previews
from tests.ui.serving import request, serving
from tests.waiting import until

CASES = Path(__file__).resolve().parents[1] / "cases"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of many kinds, beside one that is not allowed."""
    inside = tmp_path_factory.mktemp("media") / "videos"
    inside.mkdir()
    for name in ("cfr30.mp4", "hevc10.mp4", "vp8.webm", "photo.jpg", "moov_missing.mp4"):
        shutil.copy2(CASES / name, inside)
    shutil.copy(CASES / "cfr30.mp4", inside / 'ü 100%25 #1 & "x"?.mp4')
    shutil.copy(CASES / "cfr30.mp4", inside.parent / "secret.mp4")
    (inside / "id_rsa").write_text("a key")
    (inside / "page.mp4").write_text("<html><script>alert(1)</script></html>")
    (inside / "out.mp4").symlink_to("../secret.mp4")
    (inside / "way").symlink_to("..")
    os.mkfifo(inside / "pipe.mp4")
    return inside


@pytest.fixture(scope="module")
def media(place: Path) -> Iterator[MediaLinks]:
    links = MediaLinks(AllowedFolders([place]), Previews(place.parent / "previews"))
    yield links
    links.close()


@pytest.fixture(scope="module")
def address(media: MediaLinks) -> Iterator[str]:
    with serving(Starlette(routes=[*media.routes()])) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "kind"),
    [("cfr30.mp4", "video/mp4"), ("vp8.webm", "video/webm"), ("photo.jpg", "image/jpeg")],
)
def test_a_file_comes_whole_with_its_type(address: str, place: Path, name: str, kind: str):
    reply = request(address, f"/media?file={name}")
    assert reply.status == 200
    assert reply.headers["content-type"] == kind
    assert reply.headers["accept-ranges"] == "bytes"
    assert reply.body == (place / name).read_bytes()


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-99", 0, 100),
        ("bytes=100-", 100, None),
        ("bytes=-50", -50, None),
        ("bytes=14000-99999999", 14000, None),
    ],
)
def test_a_range_is_that_piece_of_the_file(
    address: str, place: Path, asked: str, start: int, end: int | None
):
    whole = (place / "cfr30.mp4").read_bytes()
    reply = request(address, "/media?file=cfr30.mp4", Range=asked)
    piece = whole[start:end]
    first = start % len(whole)
    assert (reply.status, reply.body) == (206, piece)
    assert reply.headers["content-range"] == f"bytes {first}-{first + len(piece) - 1}/{len(whole)}"


def test_a_range_past_the_end_is_told_so(address: str):
    reply = request(address, "/media?file=cfr30.mp4", Range="bytes=99999999-")
    assert reply.status == 416


@pytest.mark.parametrize(
    "asked",
    [
        *("bytes=10-5", "lines=0-1", "bytes=", "bytes", "bytes=-", "bytes=a-b", "bytes=0-1,9-2"),
        f"bytes={'9' * 5000}-",
        "bytes=٣-٤".encode().decode("latin-1"),
    ],
)
def test_a_range_that_makes_no_sense_is_as_none(address: str, place: Path, asked: str):
    reply = request(address, "/media?file=cfr30.mp4", Range=asked)
    assert (reply.status, reply.body) == (200, (place / "cfr30.mp4").read_bytes())


def test_several_ranges_come_as_parts(address: str, place: Path):
    whole = (place / "cfr30.mp4").read_bytes()
    reply = request(address, "/media?file=cfr30.mp4", Range="bytes=0-4, 20-29")
    assert reply.status == 206 and whole[:5] in reply.body and whole[20:30] in reply.body
    assert int(reply.headers["content-length"]) == len(reply.body)


def test_a_file_that_the_browser_has_already_is_not_sent_again(address: str, place: Path):
    path = place / "known.mp4"
    shutil.copy(CASES / "cfr30.mp4", path)
    tag = request(address, "/media?file=known.mp4").headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        for method in ("GET", "HEAD"):
            reply = request(address, "/media?file=known.mp4", method, If_None_Match=known)
            assert (reply.status, reply.body, reply.headers["etag"]) == (304, b"", tag)
            assert reply.headers["cache-control"] == "private, no-cache"
    os.utime(path, (1, 1))
    assert request(address, "/media?file=known.mp4", If_None_Match=tag).status == 200


@pytest.mark.parametrize("asked", ["", "bytes=0-"])
def test_of_a_file_that_grows_meanwhile_only_the_length_that_was_told_is_sent(
    place: Path, asked: str
):
    path = place / "grows.mp4"
    path.write_bytes(bytes(100_000))
    answer, sent = media_module._HeldFile(path, "video/mp4"), []
    with path.open("ab") as file:
        file.write(bytes(300_000))

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"range", asked.encode())] if asked else []
    scope = {"type": "http", "method": "GET", "headers": headers, "asgi": {"spec_version": "2.4"}}
    asyncio.run(answer(scope, cast(Any, None), send))
    start, *rest = sent
    assert dict(start["headers"])[b"content-length"] == b"100000"
    assert sum(len(message["body"]) for message in rest) == 100_000
    assert [message["more_body"] for message in rest] == [*[True] * (len(rest) - 1), False]
    path.unlink()


def test_a_range_of_a_file_that_changed_meanwhile_is_the_whole_file(address: str, place: Path):
    reply = request(address, "/media?file=cfr30.mp4")
    tag = reply.headers["etag"]
    same = request(address, "/media?file=cfr30.mp4", Range="bytes=0-9", If_Range=tag)
    other = request(address, "/media?file=cfr30.mp4", Range="bytes=0-9", If_Range='"other"')
    assert (same.status, other.status) == (206, 200)


def test_head_tells_the_length_and_sends_nothing(address: str, place: Path):
    reply = request(address, "/media?file=cfr30.mp4", "HEAD")
    assert (reply.status, reply.body) == (200, b"")
    assert int(reply.headers["content-length"]) == (place / "cfr30.mp4").stat().st_size
    assert request(address, "/media?file=cfr30.mp4", "POST").status == 405


def test_a_piece_of_a_file_of_ten_gigabytes_is_all_that_comes(address: str, place: Path):
    huge = place / "huge.mp4"
    shutil.copy(CASES / "cfr30.mp4", huge)
    # A box that fills the rest, as free space does; nothing of it is stored.
    size = 10_000_000_000
    with huge.open("r+b") as file:
        start = file.seek(0, os.SEEK_END)
        length = (size - start).to_bytes(8, "big")
        file.write(b"\x00\x00\x00\x01free" + length)
        file.truncate(size)
    reply = request(address, "/media?file=huge.mp4", Range=f"bytes={size - 1000}-")
    assert (reply.status, len(reply.body)) == (206, 1000)


@pytest.mark.parametrize(
    "asked",
    [
        "../secret.mp4",
        "%2e%2e%2fsecret.mp4",
        "%252e%252e%252fsecret.mp4",
        "..%5csecret.mp4",
        "videos/../../secret.mp4",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
        "file:///etc/passwd",
        "http://127.0.0.1/",
        "~/.bashrc",
        "out.mp4",
        "way/secret.mp4",
        "cfr30.mp4%00.txt",
        "%ff%fe",
        "nowhere.mp4",
        "id_rsa",
        "page.mp4",
        "moov_missing.mp4",
        "pipe.mp4",
        ".",
        "",
    ],
)
@pytest.mark.parametrize("route", ["media", "preview"])
def test_any_other_file_is_refused_with_a_line_in_the_log(
    address: str, asked: str, route: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, logger="apollo_cli.ui"):
        reply = request(address, f"/{route}?file={asked}")
    assert (reply.status, reply.body) == (403, b"this may not be opened here")
    (record,) = [row for row in caplog.records if row.name == "apollo_cli.ui"]
    line = record.getMessage()
    assert line.startswith(f"refused: GET /{route}?file=") and "127.0.0.1" in line
    assert "\n" not in line


def test_a_file_that_is_swapped_for_a_link_again_and_again_never_leads_outside(
    address: str, place: Path
):
    secret, inside, target = place.parent / "secret.mp4", place / "own.mp4", place / "swapped.mp4"
    shutil.copy(CASES / "cfr30.mp4", inside)
    own, outside = inside.read_bytes(), b"outside" + bytes(400_000)
    secret.write_bytes(outside)
    ended = threading.Event()

    def swap() -> None:
        fresh = place / "swap.tmp"
        while not ended.is_set():
            os.link(inside, fresh)
            fresh.replace(target)
            fresh.symlink_to(secret)
            fresh.replace(target)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        replies = [request(address, "/media?file=swapped.mp4") for _ in range(150)]
    finally:
        ended.set()
        swapping.join()
        shutil.copy(CASES / "cfr30.mp4", secret)
    assert {reply.body for reply in replies} <= {own, b"this may not be opened here"}
    assert {reply.status for reply in replies} <= {200, 403}


def test_files_that_were_sent_are_closed(address: str, place: Path):
    request(address, "/media?file=cfr30.mp4")
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        request(address, "/media?file=cfr30.mp4", Range="bytes=0-9")
        request(address, "/media?file=cfr30.mp4", Range="bytes=99999999-")
    assert len(os.listdir("/dev/fd")) <= before + 2


def test_what_a_browser_does_not_play_is_not_served_as_it_is(address: str):
    assert request(address, "/media?file=hevc10.mp4").status == 403


def test_an_odd_name_has_an_address_that_leads_back_to_it(
    address: str, media: MediaLinks, place: Path
):
    path = place / 'ü 100%25 #1 & "x"?.mp4'
    state = media.state(path)
    assert (state.state, state.kind) == ("plays", "video")
    assert '"' not in state.address and "&" not in state.address
    assert request(address, f"/{state.address}").body == path.read_bytes()


def test_a_name_that_is_not_utf_8_is_told_and_has_no_address(media: MediaLinks, place: Path):
    path = place / os.fsdecode(b"\xff.mp4")
    shutil.copy(CASES / "cfr30.mp4", path)
    state = media.state(path)
    assert (state.state, state.address) == ("cannot be shown", "")
    assert state.reason == "its name is not valid UTF-8"


def test_a_preview_goes_from_being_made_to_ready_and_is_served(
    address: str, media: MediaLinks, place: Path
):
    path = place / "hevc10.mp4"
    link = f"/preview?file={quote(str(path))}"
    assert request(address, link).status == 404
    state = media.state(path)
    assert (state.state, state.address) == ("making a preview", "")
    assert state.reason == "browsers do not play hevc everywhere"
    shares = []

    def is_made() -> bool:
        shares.append(media.state(path).share)
        return media.state(path).state != "making a preview"

    until(is_made)
    assert shares == sorted(shares) and shares[0] < 1
    state = media.state(path)
    assert state.state == "preview ready"
    reply = request(address, f"/{state.address}", Range="bytes=0-11")
    assert (reply.status, reply.body[4:8]) == (206, b"ftyp")
    assert reply.headers["content-type"] == "video/mp4"


def test_a_file_that_is_still_being_written_gets_no_preview_yet(
    media: MediaLinks, place: Path, monkeypatch: pytest.MonkeyPatch
):
    path = place / "recording.mkv"
    whole = (CASES / "h264_hi10.mkv").read_bytes()
    monkeypatch.setattr(previews_module, "_WRITING_SECONDS", 1e6)
    looks: list[Path] = []
    look = previews_module._look
    monkeypatch.setattr(previews_module, "_look", lambda path: looks.append(path) or look(path))
    for size in range(len(whole) - 5, len(whole) + 1):
        path.write_bytes(whole[:size])
        state = media.state(path)
        assert (state.state, state.share) == ("making a preview", 0)
        assert state.reason == "recording.mkv is still being written"
    # What it is was looked at once, not for each state of it.
    assert looks == [path]
    os.utime(path, (0, time.time() - 2e6))
    assert media.state(path).reason == "browsers do not open matroska files"
    wanted = [job.source for job in media.previews._jobs.values()]
    assert wanted.count(path) == 1


def test_what_cannot_be_shown_says_why(media: MediaLinks, place: Path):
    state = media.state(place / "moov_missing.mp4")
    assert (state.state, state.kind) == ("cannot be shown", "none")
    assert "it has no index" in state.reason
