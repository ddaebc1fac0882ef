"""Files are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from apollo_cli.atomic import make_whole, scratch_folder, workshop, write_whole


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


def left_by_a_kill(target: Path) -> list[Path]:
    """What a process leaves that is killed while it writes a file and makes a folder beside it."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from apollo_cli.atomic import make_whole, workshop\n"
        "def die(fresh):\n"
        "    fresh.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "with workshop(Path(sys.argv[1])) as unfinished:\n"
        "    unfinished.mkdir()\n"
        "    make_whole(Path(sys.argv[1] + '.json'), die)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    left = list(target.parent.iterdir())
    for path in left:
        # Folders that are just being made are left alone for a minute.
        os.utime(path, (0, 0))
    return left


def test_what_a_killed_run_left_beside_its_target_is_cleared_by_the_next(tmp_path: Path):
    target, other = tmp_path / "model", tmp_path / "model.json"
    assert len(left_by_a_kill(target)) == 2
    with workshop(target) as unfinished:
        unfinished.mkdir()
        unfinished.rename(target)
    write_whole(other, "whole")
    assert sorted(tmp_path.iterdir()) == [target, other]


def test_what_a_running_owner_works_on_is_never_cleared(tmp_path: Path):
    with scratch_folder("work-", tmp_path) as first:
        (first / "kept").touch()
        os.utime(first.parent, (0, 0))
        with scratch_folder("work-", tmp_path):
            assert (first / "kept").exists()
    fresh = tmp_path / f".kept.json.{os.getppid()}.new"
    fresh.write_text("half")
    write_whole(tmp_path / "kept.json", "whole")
    assert fresh.exists()
