"""Files are written whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from apollo_cli.atomic import make_whole, write_whole


@pytest.mark.parametrize("content", ["größer\n", b"\x00\xff", ""])
def test_a_file_gets_its_new_content_and_nothing_else_is_left(tmp_path: Path, content: str | bytes):
    target = tmp_path / "kept.json"
    write_whole(target, "of before")
    assert write_whole(target, content) == target
    assert target.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_what_was_there(tmp_path: Path, error: BaseException):
    target = tmp_path / "kept.json"
    target.write_text("of before")

    def fail(fresh: Path) -> None:
        fresh.write_text("half")
        raise error

    with pytest.raises(type(error)):
        make_whole(target, fail)
    assert target.read_text() == "of before"
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path):
    target, link = tmp_path / "far" / "kept.json", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to(target)
    write_whole(link, "through the link")
    assert link.is_symlink()
    assert target.read_text() == "through the link"


def test_a_pipe_is_written_as_it_stands(tmp_path: Path):
    pipe, told = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: told.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "down the pipe")
    reader.join(10)
    assert told == ["down the pipe"]
    assert pipe.is_fifo()
