"""The guarded child gives the same pictures, and its end is never the end of its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copyfile

import numpy as np
import pytest

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import read_clips, read_frames
from apollo_cli.video.transforms import PixelSpec
from apollo_cli.video.worker import Reply, encode
from tests.cases import FOLDER
from tests.waiting import PATIENCE_SECONDS, until

SPECS = [
    PixelSpec("one", 32, "bicubic", (127, 127, 127), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    PixelSpec("two", 28, "bilinear", (123, 116, 103), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
]


@pytest.fixture(scope="module")
def guard() -> Iterator[GuardedReader]:
    with GuardedReader() as reader:
        yield reader


def bytes_of(content: object) -> bytes:
    """All of a result, arrays included."""
    return b"".join(encode(Reply(0, "result", content)))


@pytest.mark.parametrize("name", ["open_gop_b.mp4", "sar16_11.mp4", "size_change.ts", "anim.gif"])
def test_the_child_sees_and_gives_the_same(guard: GuardedReader, name: str):
    info = probe(FOLDER / name)
    assert bytes_of(guard.probe(FOLDER / name)) == bytes_of(info)
    times = info.times[[-1, 0, 7, 7]]
    clips = info.times[np.arange(12).reshape(3, 4)]
    for ours, theirs in (
        (guard.read_frames(info, times), read_frames(info, times)),
        (
            guard.read_clips(info, clips, SPECS, batch_clips=2),
            read_clips(info, clips, SPECS, batch_clips=2),
        ),
    ):
        assert list(map(bytes_of, ours)) == list(map(bytes_of, theirs))


def test_errors_and_reports_come_through_whole(guard: GuardedReader):
    with pytest.raises(MediaError, match=r"encrypted.mp4 is encrypted; an unprotected file"):
        guard.probe(FOLDER / "encrypted.mp4")
    info = guard.probe(FOLDER / "bit_flips.mp4")
    frames = list(guard.read_frames(info, info.times))
    assert (len(frames), sum(len(frame.damaged) for frame in frames)) == (240, 75)
    assert len(guard.check_pictures(info)) == 75
    with pytest.raises(MediaError, match="is damaged"):
        list(guard.read_frames(info, info.times, ReadingOptions(strict=True)))
    with pytest.raises(MediaError, match="1,000 pixels"):
        guard.probe(FOLDER / "cfr30.mp4", ReadingOptions(max_pixels=1000))


def test_a_file_that_took_the_name_of_another_is_read_by_its_own_times(
    guard: GuardedReader, tmp_path: Path
):
    path = Path(copyfile(FOLDER / "cfr30.mp4", tmp_path / "film.mp4"))
    list(guard.read_frames(guard.probe(path), [0.0]))
    path.write_bytes((FOLDER / "vfr_screen.mp4").read_bytes())
    info = probe(path)
    ours, theirs = guard.read_frames(info, info.times), read_frames(info, info.times)
    assert list(map(bytes_of, ours)) == list(map(bytes_of, theirs))


def test_a_reading_may_be_left_early(guard: GuardedReader):
    info = guard.probe(FOLDER / "cfr30.mp4")
    child = guard.process_id
    for _ in range(3):
        assert next(guard.read_frames(info, info.times)).position == 0
    assert len(list(guard.read_frames(info, info.times[:5]))) == 5
    assert guard.process_id == child


def test_a_hang_is_one_line_and_the_next_file_is_read():
    with GuardedReader(stall_seconds=PATIENCE_SECONDS) as reader:
        reader.probe(FOLDER / "cfr30.mp4")
        assert reader.process_id is not None
        os.kill(reader.process_id, signal.SIGSTOP)
        reader.stall_seconds = 1
        with pytest.raises(MediaError, match=r"fps240.mp4: decoding made no progress for 1 s"):
            reader.probe(FOLDER / "fps240.mp4")
        reader.stall_seconds = PATIENCE_SECONDS
        assert reader.probe(FOLDER / "cfr30.mp4").frame_count == 120


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGSEGV, r"crashed \(signal 11"),
        (signal.SIGKILL, r"from outside \(signal 9"),
        (signal.SIGTERM, r"from outside \(signal 15"),
    ],
)
def test_a_child_that_ends_in_the_middle_is_one_line(how: signal.Signals, said: str):
    with GuardedReader() as reader:
        info = reader.probe(FOLDER / "cfr30.mp4")
        frames = reader.read_frames(info, info.times)
        next(frames)
        os.kill(reader.process_id or 0, how)
        with pytest.raises(MediaError, match=rf"cfr30.mp4: .*{said}"):
            list(frames)
        assert reader.probe(FOLDER / "fps240.mp4").frame_count > 0


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # A process that has ended stays listed until its new parent takes note of it.
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_child_ends_with_an_owner_that_is_killed():
    code = (
        "import sys\n"
        "from apollo_cli.video.guard import GuardedReader\n"
        "reader = GuardedReader()\n"
        "reader.probe(sys.argv[1])\n"
        "print(reader.process_id, flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = Path(__file__).parents[2]
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(FOLDER / "cfr30.mp4")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
    )
    assert owner.stdout is not None
    with owner.stdout:
        child = int(owner.stdout.readline())
        assert is_running(child)
        owner.kill()
        owner.wait()
    until(lambda: not is_running(child))


@pytest.mark.skipif(sys.platform != "linux", reason="told by /proc only")
def test_the_start_of_the_child_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(1.2)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with GuardedReader(stall_seconds=1) as reader:
        assert reader.probe(FOLDER / "cfr30.mp4").frame_count == 120


def exchange(path: Path, data: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(data)
    os.replace(other, path)


@pytest.mark.parametrize("change", [Path.write_bytes, exchange, lambda path, data: path.unlink()])
@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_file_that_changes_while_it_is_read_is_told(
    tmp_path: Path, guard: GuardedReader, is_guarded: bool, change: Callable
):
    other = (FOLDER / "vfr_screen.mp4").read_bytes()
    path = Path(copyfile(FOLDER / "one_key_60s.mp4", tmp_path / "film.mp4"))
    info = guard.probe(path)
    read = guard.read_frames if is_guarded else read_frames
    frames = read(info, info.times)
    next(frames)
    change(path, other)
    # Nor is another file read by the times of the one that was looked at.
    for rest in (frames, read(info, info.times[:1])):
        with pytest.raises(MediaError, match=r"film.mp4"):
            list(rest)
