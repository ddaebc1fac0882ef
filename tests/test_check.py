"""``apollo check`` and ``apollo frames``: every file gets its line, every picture its time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import copyfile

import numpy as np
import pytest
from PIL import Image

from apollo_cli.cli import main
from tests import tiny
from tests.cases.marker import read_marker

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
    assert "ok\tcfr30.mp4\t320x180, h264, 30 fps, 4.00 s" in written.out
    assert "1 files, 0 odd, 0 broken" in written.err


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


def test_a_contact_sheet_holds_all_pictures(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    clip = str(CASES / "cfr30.mp4")
    moments = [word for t in range(4) for word in ("--at", str(t))]
    assert main(["frames", clip, *moments, "--sheet", "-o", str(tmp_path)]) == 0
    sheet = np.asarray(Image.open(capfd.readouterr().out.strip()))
    marks = [read_marker(sheet[:135, 240 * i : 240 * (i + 1)]) for i in range(4)]
    assert [mark and mark[0] for mark in marks] == [0, 30, 60, 90]
