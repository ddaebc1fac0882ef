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
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.info import VideoInfo
from tests import tiny
from tests.cases.marker import read_marker
from tests.waiting import PATIENCE_SECONDS

CASES = Path(__file__).parent / "cases"
KLASSES = {
    case["name"]: case["klass"] for case in json.loads((CASES / "cases.json").read_text())["cases"]
}


def test_a_folder_with_every_case_gets_a_line_for_each_and_never_hangs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    names = [name for name in KLASSES if (CASES / name).is_file()]
    for name in names:
        copyfile(CASES / name, tmp_path / name)
    os.mkfifo(tmp_path / "fifo.mp4")
    (tmp_path / "dangling.mp4").symlink_to(tmp_path / "nowhere.mp4")
    assert main(["check", str(tmp_path), "--json"]) == 3
    found = {Path(row["path"]).name: row for row in json.loads(capfd.readouterr().out)}
    assert set(found) == {*names, "fifo.mp4", "dangling.mp4"}
    for name in names:
        allowed = {"reads": {"ok", "odd"}, "warns": {"odd", "broken"}, "error": {"broken"}}
        verdict = found[name]["verdict"]
        assert verdict in allowed.get(KLASSES[name], {"ok", "odd", "broken"}), (name, found[name])
    assert found["cfr30.mp4"]["verdict"] == "ok"
    assert found["fifo.mp4"]["verdict"] == found["dangling.mp4"]["verdict"] == "broken"


def test_a_sound_file_ends_with_zero_and_its_facts(capfd: pytest.CaptureFixture[str]):
    assert main(["check", str(CASES / "cfr30.mp4")]) == 0
    written = capfd.readouterr()
    assert f"ok\t{CASES / 'cfr30.mp4'}\t320x180, h264, 30 fps, 4.00 s" in written.out
    assert "1 file, 0 odd, 0 broken" in written.err


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with two files of one name, and what lies beside videos."""
    for folder in (tmp_path, tmp_path / "sub"):
        folder.mkdir(exist_ok=True)
        copyfile(CASES / "cfr10_target.mp4", folder / "clip.mp4")
    copyfile(CASES / "html_page.mp4", tmp_path / "page.mp4")
    copyfile(CASES / "no_suffix", tmp_path / "no_suffix")
    for name in ("notes.txt", "clip.srt", "clip.apollo", "archive.zip"):
        (tmp_path / name).write_bytes(b"no video \x00\x01")
    return tmp_path


def test_what_is_no_media_is_left_out_of_a_folder_and_what_is_broken_is_named(
    mixed: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(mixed)
    assert main(["check", "-r", "."]) == 3
    written = capfd.readouterr()
    rows = sorted(line.split("\t")[:2] for line in written.out.splitlines()[1:])
    assert rows == [
        ["broken", "page.mp4"],
        ["ok", "clip.mp4"],
        ["ok", "no_suffix"],
        ["ok", "sub/clip.mp4"],
    ]
    notes = written.err.splitlines()
    assert "archive.zip, clip.apollo, clip.srt and 1 more" in notes[0]
    assert "page.mp4" in notes[-1]
    assert main(["check", "notes.txt"]) == 3
    (mixed / "page.mp4").unlink()
    assert main(["check", "."]) == 0
    capfd.readouterr()
    assert main(["check", "clip.srt", "--json"]) == 3
    assert [row["verdict"] for row in json.loads(capfd.readouterr().out)] == ["broken"]


@pytest.mark.parametrize("width", [80, 40])
def test_a_terminal_of_any_width_shows_whole_words(
    mixed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
):
    monkeypatch.chdir(mixed)
    monkeypatch.setenv("COLUMNS", str(width))
    copyfile(CASES / "c1_010_flip_photo.jpg", "photo.jpg")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["check", "-r", "."]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    heads = {tuple(line.split()) for line in lines if line[0] != " "}
    assert {("ok", "clip.mp4"), ("odd", "photo.jpg"), ("broken", "page.mp4")} <= heads


def test_a_file_that_hangs_delays_no_other(mixed: Path, monkeypatch: pytest.MonkeyPatch):
    goes_on, probe = threading.Event(), GuardedReader.probe

    def hang(reader: GuardedReader, name: str) -> VideoInfo:
        assert "page" not in name or goes_on.wait(PATIENCE_SECONDS)
        return probe(reader, name)

    monkeypatch.setattr(GuardedReader, "probe", hang)
    names = {str(mixed / name): True for name in ("page.mp4", "clip.mp4", "no_suffix", "clip.srt")}
    found = check_files(names, full=False)
    first = [Path(next(found).path).name for _ in range(3)]
    goes_on.set()
    assert sorted(first) == ["clip.mp4", "clip.srt", "no_suffix"]
    assert [Path(last.path).name for last in found] == ["page.mp4"]


def test_addresses_are_told_as_what_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    copyfile(CASES / "cfr10_target.mp4", tmp_path / "a b.mp4")
    assert main(["check", f"file://{tmp_path}/a%20b.mp4", f"file://{tmp_path}"]) == 0
    assert main(["check", "https://example.org/a.mp4"]) == 3
    assert "is a web address" in capfd.readouterr().out


def test_an_empty_folder_is_a_usage_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["check", str(tmp_path)]) == 2
    assert "holds no file" in capfd.readouterr().err


def test_the_picture_of_a_moment_is_written_with_its_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    clip = str(CASES / "vfr_screen.mp4")
    assert main(["frames", clip, "--at", "12", "--at", "0:20.4", "-o", str(tmp_path)]) == 0
    files = [Path(line) for line in capfd.readouterr().out.split()]
    assert [file.name for file in files] == [
        "vfr_screen-00006.033.png",
        "vfr_screen-00020.400.png",
    ]
    marks = [read_marker(np.asarray(Image.open(file))) for file in files]
    assert [mark and mark[0] for mark in marks] == [32, 45]


def test_the_pictures_of_the_clips_are_those_that_the_model_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    model = str(tiny.save(tmp_path / "checkpoint"))
    clip = str(CASES / "cfr30.mp4")
    assert main(["frames", clip, "--model", model, "-o", str(tmp_path)]) == 0
    files = [Path(line) for line in capfd.readouterr().out.split()]
    marks = [read_marker(np.asarray(Image.open(file))) for file in files]
    assert [mark and mark[0] for mark in marks] == [0, 15, 30, 45, 60, 75, 90, 105]


def test_each_picture_that_is_announced_has_a_file_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    clip = tmp_path / ("\N{CLAPPER BOARD}" * 60 + ".mp4")
    copyfile(CASES / "bit_flips.mp4", clip)
    moments = [word for k in (16, 44, 103, 103, 119, 152) for word in ("--at", str(k / 30 + 0.01))]
    assert main(["frames", str(clip), *moments, "-o", str(tmp_path / "out")]) == 0
    written = capfd.readouterr()
    files = written.out.splitlines()
    assert len(set(files)) == len(files) == 5
    assert sorted(files) == sorted(map(str, (tmp_path / "out").iterdir()))
    assert "5 pictures" in written.err


@pytest.mark.parametrize(
    ("name", "at"), [("bit_flips.mp4", 0.54), ("c1_010_flip_photo.jpg", 0), ("size_change.ts", 1)]
)
def test_frames_tells_what_check_tells(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, at: float
):
    assert main(["check", str(CASES / name), "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert main(["frames", str(CASES / name), "--at", str(at), "-o", str(tmp_path)]) == 0
    told = capfd.readouterr().err
    assert row["verdict"] == "odd"
    for remark in row["remarks"]:
        assert ("damaged" if "damaged" in remark else remark) in told


def test_a_contact_sheet_holds_all_pictures(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    clip = str(CASES / "cfr30.mp4")
    moments = [word for t in range(4) for word in ("--at", str(t))]
    assert main(["frames", clip, *moments, "--sheet", "-o", str(tmp_path)]) == 0
    sheet = np.asarray(Image.open(capfd.readouterr().out.strip()))
    marks = [read_marker(sheet[:135, 240 * i : 240 * (i + 1)]) for i in range(4)]
    assert [mark and mark[0] for mark in marks] == [0, 30, 60, 90]
