"""``apollo check`` and ``apollo frames``: every file gets its line, every picture its time."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from shutil import copyfile

import numpy as np
import pytest
from PIL import Image

from apollo_cli.cli import main
from apollo_cli.commands.check import check_files
from apollo_cli.config import ReadingOptions
from apollo_cli.video.container import DEFAULT_READING
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.info import VideoInfo
from tests import tiny
from tests.cases import CASES, FOLDER
from tests.cases.marker import read_marker
from tests.command import apollo
from tests.waiting import PATIENCE_SECONDS

KLASSES = {case["name"]: case["klass"] for case in CASES}


def numbers(pictures: list[Path]) -> list[int | None]:
    """The numbers drawn into pictures."""
    marks = [read_marker(np.asarray(Image.open(picture))) for picture in pictures]
    return [mark and mark.number for mark in marks]


def test_a_folder_with_every_case_gets_a_line_for_each_and_never_hangs(tmp_path: Path):
    names = [name for name in KLASSES if (FOLDER / name).is_file()]
    for name in names:
        copyfile(FOLDER / name, tmp_path / name)
    os.mkfifo(tmp_path / "fifo.mp4")
    (tmp_path / "dangling.mp4").symlink_to(tmp_path / "nowhere.mp4")
    done = apollo("check", tmp_path, "--json")
    found = {Path(row["path"]).name: row["verdict"] for row in json.loads(done.stdout)}
    assert done.returncode == 3
    assert set(found) == {*names, "fifo.mp4", "dangling.mp4"}
    for name in names:
        allowed = {"reads": {"ok", "odd"}, "warns": {"odd", "broken"}, "error": {"broken"}}
        assert found[name] in allowed.get(KLASSES[name], {"ok", "odd", "broken"}), name
    assert found["cfr30.mp4"] == "ok"
    assert found["fifo.mp4"] == found["dangling.mp4"] == "broken"


def test_a_sound_file_ends_with_zero_and_its_facts():
    done = apollo("check", FOLDER / "cfr30.mp4")
    assert done.returncode == 0
    assert f"ok\t{FOLDER / 'cfr30.mp4'}\t320x180, h264, 30 fps, 4.00 s" in done.stdout
    assert "1 file, 0 odd, 0 broken" in done.stderr


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two files of one name, and what lies beside videos."""
    (tmp_path / "sub").mkdir()
    for name, target in (
        ("cfr10_target.mp4", "clip.mp4"),
        ("cfr10_target.mp4", "sub/clip.mp4"),
        ("html_page.mp4", "page.mp4"),
        ("no_suffix", "no_suffix"),
    ):
        copyfile(FOLDER / name, tmp_path / target)
    for name in ("notes.txt", "clip.srt", "clip.apollo", "archive.zip"):
        (tmp_path / name).write_bytes(b"no video \x00\x01")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_no_media_is_left_out_of_a_folder_and_what_is_broken_is_named(mixed: Path):
    done = apollo("check", "-r", ".")
    rows = sorted(line.split("\t")[:2] for line in done.stdout.splitlines()[1:])
    assert done.returncode == 3
    assert rows == [
        ["broken", "page.mp4"],
        ["ok", "clip.mp4"],
        ["ok", "no_suffix"],
        ["ok", "sub/clip.mp4"],
    ]
    notes = done.stderr.splitlines()
    assert "archive.zip, clip.apollo, clip.srt and 1 more" in notes[0]
    assert "page.mp4" in notes[-1]
    assert apollo("check", "notes.txt").returncode == 3
    (mixed / "page.mp4").unlink()
    assert apollo("check", ".").returncode == 0
    done = apollo("check", "clip.srt", "--json")
    assert (done.returncode, json.loads(done.stdout)[0]["verdict"]) == (3, "broken")


@pytest.mark.parametrize("width", [80, 40])
def test_a_terminal_of_any_width_shows_whole_words(
    mixed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
):
    monkeypatch.setenv("COLUMNS", str(width))
    copyfile(FOLDER / "c1_010_flip_photo.jpg", "photo.jpg")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["check", "-r", "."]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    heads = {tuple(line.split()) for line in lines if line[0] != " "}
    assert {("ok", "clip.mp4"), ("odd", "photo.jpg"), ("broken", "page.mp4")} <= heads


def test_a_file_that_hangs_delays_no_other(mixed: Path, monkeypatch: pytest.MonkeyPatch):
    goes_on, probe = threading.Event(), GuardedReader.probe

    def hang(
        reader: GuardedReader, name: str, reading: ReadingOptions = DEFAULT_READING
    ) -> VideoInfo:
        assert "page" not in name or goes_on.wait(PATIENCE_SECONDS)
        return probe(reader, name, reading)

    monkeypatch.setattr(GuardedReader, "probe", hang)
    found = check_files(
        dict.fromkeys(("page.mp4", "clip.mp4", "no_suffix", "clip.srt"), True), full=False
    )
    first = [next(found).path for _ in range(3)]
    goes_on.set()
    assert sorted(first) == ["clip.mp4", "clip.srt", "no_suffix"]
    assert [last.path for last in found] == ["page.mp4"]


def test_addresses_and_empty_folders_are_told_as_what_they_are(tmp_path: Path):
    copyfile(FOLDER / "cfr10_target.mp4", tmp_path / "a b.mp4")
    assert apollo("check", f"file://{tmp_path}/a%20b.mp4", f"file://{tmp_path}").returncode == 0
    done = apollo("check", "https://example.org/a.mp4")
    assert (done.returncode, "web address" in done.stdout) == (3, True)
    (tmp_path / "none").mkdir()
    done = apollo("check", tmp_path / "none")
    assert (done.returncode, str(tmp_path / "none") in done.stderr) == (2, True)


def test_the_picture_of_a_moment_is_written_with_its_time(tmp_path: Path):
    done = apollo("frames", FOLDER / "vfr_screen.mp4", "--at", 12, "--at", "0:20.4", "-o", tmp_path)
    files = [Path(line) for line in done.stdout.split()]
    names = ["vfr_screen-00006.033.png", "vfr_screen-00020.400.png"]
    assert [file.name for file in files] == names
    assert numbers(files) == [32, 45]


def test_the_pictures_of_the_clips_are_those_that_the_model_is_shown(tmp_path: Path):
    model = tiny.save(tmp_path / "checkpoint")
    done = apollo("frames", FOLDER / "cfr30.mp4", "--model", model, "-o", tmp_path)
    assert numbers([Path(line) for line in done.stdout.split()]) == list(range(0, 120, 15))


def test_each_picture_that_is_announced_has_a_file_of_its_own(tmp_path: Path):
    clip = tmp_path / ("\N{CLAPPER BOARD}" * 60 + ".mp4")
    copyfile(FOLDER / "bit_flips.mp4", clip)
    moments = [word for k in (16, 44, 103, 103, 119, 152) for word in ("--at", k / 30 + 0.01)]
    done = apollo("frames", clip, *moments, "-o", tmp_path / "out")
    files = done.stdout.splitlines()
    assert (done.returncode, len(set(files)), len(files)) == (0, 5, 5)
    assert sorted(files) == sorted(map(str, (tmp_path / "out").iterdir()))
    assert "5 pictures" in done.stderr


@pytest.mark.parametrize(
    ("name", "at"), [("bit_flips.mp4", 0.54), ("c1_010_flip_photo.jpg", 0), ("size_change.ts", 1)]
)
def test_frames_tells_what_check_tells(tmp_path: Path, name: str, at: float):
    (row,) = json.loads(apollo("check", FOLDER / name, "--json").stdout)
    told = apollo("frames", FOLDER / name, "--at", at, "-o", tmp_path).stderr
    assert row["verdict"] == "odd"
    for remark in row["remarks"]:
        assert ("damaged" if "damaged" in remark else remark) in told


def test_a_contact_sheet_holds_all_pictures(tmp_path: Path):
    moments = [word for t in range(4) for word in ("--at", t)]
    done = apollo("frames", FOLDER / "cfr30.mp4", *moments, "--sheet", "-o", tmp_path)
    sheet = np.asarray(Image.open(done.stdout.strip()))
    marks = [read_marker(sheet[:135, 240 * i : 240 * (i + 1)]) for i in range(4)]
    assert [mark and mark.number for mark in marks] == [0, 30, 60, 90]
