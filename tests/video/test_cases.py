"""Every handed case gives the right pictures at the right times, or one clear line."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import av
import numpy as np
import pytest

from apollo_cli.errors import MediaError
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import read_frames
from tests.cases import CASES, FOLDER
from tests.video.made import numbers

HANDED = {case["name"]: case for case in CASES if (FOLDER / case["name"]).is_file()}
ERRORS = [name for name, case in HANDED.items() if case["klass"] == "error"]
READABLE = [name for name, case in HANDED.items() if case["klass"] != "error"]

ODD_NAMES = (
    "with space.mp4",
    "ünïcödé 日本語 🎬.mp4",
    "-leading-dash.mp4",
    "percent_%d_%03d_100%.mp4",
    "new\nline.mp4",
    "colon:name.mp4",
    "http:pretend.mp4",
    "file:pretend.mp4",
    "concat:a|b.mp4",
    "quote'\"$(id).mp4",
    "[brackets]*?.mp4",
    "x" * 251 + ".mp4",
)


@pytest.mark.parametrize("name", READABLE)
def test_a_readable_case_has_its_true_facts(name: str):
    facts = HANDED[name]["facts"]
    info = probe(FOLDER / name)
    assert info.frame_count == facts["frame_count"]
    assert info.display_size == tuple(facts["display_size"])
    assert (np.diff(info.times) >= 0).all()
    true_times = np.array(facts["times"])
    if name == "ts_jump_back.ts":
        assert info.times == pytest.approx(np.arange(120) / 30, abs=1e-3)
    elif facts.get("times_relative"):
        assert info.times - info.times[0] == pytest.approx(true_times - true_times[0], abs=1e-3)
    else:
        assert info.times + info.clock_offset_seconds == pytest.approx(true_times, abs=1e-3)
    if "duration" in facts:
        end = facts["duration"] + (info.times[0] if facts.get("first_pts") else 0)
        assert info.duration_seconds == pytest.approx(end, abs=2e-3)
    if facts.get("fps"):
        top, _, bottom = facts["fps"].partition("/")
        if "jump" not in name:
            assert info.source_fps == pytest.approx(int(top) / int(bottom or 1), rel=2e-3)
            assert info.constant_rate


@pytest.mark.parametrize("name", ERRORS)
def test_an_unreadable_case_is_one_line(name: str):
    with pytest.raises(MediaError) as caught:
        probe(FOLDER / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_probe_keeps_no_picture_in_memory():
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            probe(FOLDER / "rot90.mp4")
        assert [kept for kept in gc.get_objects() if isinstance(kept, av.VideoFrame)] == []
    finally:
        gc.enable()


def test_times_outside_of_the_video_give_its_first_and_last_picture():
    info = probe(FOLDER / "offset5.mkv")
    assert info.clock_offset_seconds == pytest.approx(5)
    frames = list(read_frames(info, [-3.0, 99.0, 0.0]))
    assert [frame.position for frame in frames] == [0, 2, 1]
    assert [f.seconds for f in frames] == pytest.approx([0, 0, info.times[-1]])


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_file_is_read_whatever_its_name(tmp_path: Path, name: str, monkeypatch):
    shutil.copyfile(FOLDER / "cfr10_target.mp4", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for path in (name, tmp_path / name):
        info = probe(path)
        assert numbers(info, [9, 0, 4]) == [9, 0, 4]
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(MediaError) as caught:
        probe(name)
    assert "\n" not in str(caught.value)
    assert name.replace("\n", "\\n") in str(caught.value)


@pytest.mark.parametrize("start", ["file://", "file://localhost", "file:"])
def test_a_file_address_of_this_machine_is_its_path(tmp_path: Path, start: str):
    shutil.copyfile(FOLDER / "cfr10_target.mp4", tmp_path / "ä b%.mp4")
    place = f"{start}{tmp_path}/"
    assert probe(place + "%C3%A4%20b%25.mp4").frame_count == 10
    for address in (place + "gone.mp4", "file://elsewhere/a.mp4"):
        with pytest.raises(MediaError, match=r"no such file|web address"):
            probe(address)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("folder", "is a folder"),
        ("pipe", "is a pipe"),
        ("device", "is a pipe, device"),
        ("missing", "no such file"),
        ("dangling link", r"is a link to gone.mp4, no such file"),
        ("in a file", "is not a usable path"),
        ("null", "is not a usable path"),
    ],
)
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, kind: str, said: str):
    path = tmp_path / "thing.mp4"
    make = {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "dangling link": lambda: path.symlink_to("gone.mp4"),
        "in a file": lambda: shutil.copyfile(FOLDER / "cfr10_target.mp4", path),
    }
    make.get(kind, lambda: None)()
    there = {
        "device": Path(os.devnull),
        "in a file": path / "inner.mp4",
        "null": tmp_path / "null\0.mp4",
    }
    with pytest.raises(MediaError, match=said):
        probe(there.get(kind, path))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser reads it all")
def test_a_file_without_permission_is_refused(tmp_path: Path):
    path = tmp_path / "locked.mp4"
    shutil.copyfile(FOLDER / "cfr10_target.mp4", path)
    path.chmod(0)
    with pytest.raises(MediaError, match="permission denied"):
        probe(path)
