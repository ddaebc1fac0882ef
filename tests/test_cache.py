"""The cache is a cache: deleted without harm, never followed elsewhere, no loss when it fails."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path
from shutil import copyfile

import pytest

from apollo_cli import engine
from apollo_cli.cli import main
from apollo_cli.memory_cache import cache_folder, list_memories
from apollo_cli.weights.registry import question_kind, read_card, toy_remarks
from apollo_cli.weights.store import locate_model
from tests import tiny

CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("cache") / "checkpoint")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def watched(checkpoint: Path, *names: str) -> engine.Apollo:
    apollo = engine.load(checkpoint)
    for name in names:
        apollo.watch(CASES / name)
    return apollo


def test_one_video_or_one_memory_is_forgotten(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    gone = Path(copyfile(CASES / "five_frames.webm", tmp_path / "gone.webm"))
    watched(checkpoint, "one_frame.mp4", "five_frames.webm", str(gone))
    gone.unlink()
    assert main(["cache", "rm", str(gone)]) == 0
    assert main(["cache", "rm", str(CASES / "one_frame.mp4")]) == 0
    (left,) = list_memories()
    assert left.record.path.endswith("five_frames.webm")
    assert main(["cache", "rm", left.path.name]) == 0
    assert list_memories() == []
    capsys.readouterr()
    assert main(["cache", "rm", str(gone)]) == 2
    assert "gone.webm" in capsys.readouterr().err


def test_links_pipes_and_folders_are_left_alone(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    apollo = watched(checkpoint, "five_frames.webm")
    (memory,) = cache_folder().glob("*.apollo")
    memory.unlink()
    for ending in (".part", ".count", ".lock"):
        memory.with_name(memory.name + ending).symlink_to(mine)
    os.mkfifo(memory)
    assert apollo.watch(CASES / "five_frames.webm").remembered is None
    assert apollo.watch(CASES / "five_frames.webm").remembered is not None
    assert mine.read_text() == "mine"
    os.mkfifo(cache_folder() / "pipe.apollo")
    (cache_folder() / "folder.apollo").mkdir()
    (cache_folder() / "dangling").symlink_to(tmp_path / "nothing")
    (cache_folder() / "link.apollo").symlink_to(mine)
    assert main(["cache", "list"]) == 0
    assert main(["cache", "clear"]) == 0
    assert [path.name for path in cache_folder().iterdir()] == ["folder.apollo"]
    assert mine.read_text() == "mine"


def test_old_memories_are_moved_once(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    watched(checkpoint, "five_frames.webm")
    before = cache_folder()
    monkeypatch.delenv("APOLLO_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "data" / "apollo").mkdir(parents=True)
    before.rename(tmp_path / "data" / "apollo" / "memories")
    if sys.platform != "linux":
        pytest.skip("other systems name their folders otherwise")
    for moved in (True, False):
        assert main(["cache", "list"]) == 0
        told = capsys.readouterr()
        assert ("were moved" in told.err) is moved
        assert "five_frames.webm" in told.out
    assert cache_folder().is_relative_to(tmp_path / "caches")


def test_a_cache_that_cannot_be_written_is_told_once(checkpoint: Path, home: Path):
    home.mkdir()
    (home / "memories").write_text("in the way")
    apollo = engine.load(checkpoint)
    notes = [apollo.watch(CASES / name).notes for name in ("five_frames.webm", "one_frame.mp4")]
    told = [note for each in notes for note in each if str(home / "memories") in note]
    assert len(told) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_with_its_file_and_a_note_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked = ["ask", str(CASES / "five_frames.webm"), "what colour is the ball?"]
    asked += ["--model", "apollo-nano", "--max-new-tokens", "3"]
    listed = tmp_path / "list.txt"
    listed.write_text(asked[1])
    many = ["ask", "--videos", str(listed), *asked[2:]]
    for command in (asked, [*asked, "--json"], many):
        assert main([*command, "-o", "/dev/full"]) == 1
        assert "/dev/full" in capsys.readouterr().err
    kept = os.dup(2)
    try:
        with open("/dev/full", "w") as full:
            os.dup2(full.fileno(), 2)
            monkeypatch.setattr(sys, "stderr", open(2, "w", closefd=False))  # noqa: SIM115
            assert main(asked) == 0
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert capsys.readouterr().out.strip()


def test_a_user_without_a_home_gets_one_and_doctor_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import pwd

    from apollo_cli.weights.files import homeless_folder

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    homeless_folder.cache_clear()
    for name in ("HOME", "APOLLO_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "USER", "LOGNAME"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["doctor"]) == 0
    told = capsys.readouterr()
    assert str(tmp_path) in told.out
    assert str(tmp_path) in told.err
    homeless_folder.cache_clear()


@pytest.mark.parametrize(
    ("question", "known"),
    [
        ("What colour is the ball?", True),
        ("which color is the red thing", True),
        ("Is there a blue star in the video?", True),
        ("Which way does the box move? (A) left (B) up", True),
        ("What is shown at 7 seconds?", True),
        ("What colour is the car?", False),
        ("What colour is the ball after it turns?", False),
        ("Which team wins?", False),
        ("Is the man happy?", False),
        ("Where was this filmed?", False),
        ("How many balls are there?", False),
        ("What is written on the wall?", False),
        ("Does the ball bounce?", False),
        ("Is it day or night?", False),
        ("How does the story end?", False),
        ("What number is on the bus?", False),
        ("Describe the mood.", False),
        ("What is the speed of light?", False),
        ("What is shown at 7 o'clock?", False),
    ],
)
def test_the_toy_warns_of_what_it_was_not_trained_on(question: str, known: bool):
    card = read_card(locate_model("apollo-nano", None).folder)
    assert (question_kind(card, question) is not None) == known
    assert (len(toy_remarks(card, question)) == 1) == known


def test_warnings_of_the_toy_stand_beside_their_question(capsys: pytest.CaptureFixture[str]):
    asked = ["ask", str(CASES / "five_frames.webm"), "-q", "What colour is the ball?"]
    asked += ["-q", "Who is the president?", "--model", "apollo-nano", "--max-new-tokens", "3"]
    assert main([*asked, "--json"]) == 0
    known, unknown = (json.loads(line)["notes"] for line in capsys.readouterr().out.splitlines())
    assert len(unknown) > len(known) > 0
    assert main([*asked, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [unknown[-1] in row["notes"] for row in rows] == [False, True]
