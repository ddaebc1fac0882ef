"""Faults that were found by trying: each stands for its whole kind."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

from apollo_cli import engine
from apollo_cli.cli import main
from apollo_cli.config import GenerationOptions, SamplingOptions
from apollo_cli.errors import MediaError, UsageError
from apollo_cli.memory_record import read_record
from tests import tiny
from tests.command import apollo
from tests.tiny import Tiny

CASES = Path(__file__).parent / "cases"
SHORT = GenerationOptions(max_new_tokens=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("finds") / "checkpoint"))


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return Path(copyfile(CASES / "one_key_60s.mp4", tmp_path / "video.mp4"))


def test_an_output_never_overwrites_the_video_that_is_asked_about(
    video: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    before = video.read_bytes()
    arguments = ["ask", str(video), "one?", "-o", str(video), "--model", checkpoint]
    assert main(arguments) == 2
    assert "a file that is asked about" in capfd.readouterr().err
    assert video.read_bytes() == before


def test_two_runs_about_the_same_new_file_both_answer(
    video: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))
    command = [sys.executable, "-m", "apollo_cli", "ask", str(video), "one?", "--quiet"]
    command += ["--model", checkpoint, "--max-new-tokens", "4"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("home", ["file", "below a file"])
def test_a_cache_that_cannot_be_written_costs_no_answer(
    home: str, video: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    place = blocker if home == "file" else blocker / "home"
    monkeypatch.setenv("APOLLO_HOME", str(place))
    apollo = engine.load(checkpoint)
    assert apollo.ask(apollo.watch(video), "one?", SHORT).generated == 4


def test_a_memory_that_cannot_be_written_is_a_usage_error(video: Path, checkpoint: str):
    apollo = engine.load(checkpoint, use_cache=False)
    with pytest.raises(UsageError, match="cannot be written"):
        apollo.remember(video, video / "below.apollo")


def test_a_memory_obeys_the_flags_or_refuses_them(video: Path, checkpoint: str, tmp_path: Path):
    apollo = engine.load(checkpoint, use_cache=False)
    target = tmp_path / "video.apollo"
    apollo.remember(video, target)
    assert len(apollo.watch(target, SamplingOptions(max_clips=3))) == 3
    for sampling in (SamplingOptions(fps=1.0), SamplingOptions(mode="uniform", frames=8)):
        with pytest.raises(UsageError, match="chosen when it was made"):
            apollo.watch(target, sampling)


def test_a_memory_of_another_video_is_not_written_over_unasked(
    video: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    other = Path(copyfile(CASES / "vp8.webm", video.with_suffix(".webm")))
    made = video.with_suffix(".apollo")
    for code, name in ((0, video), (2, other), (0, video)):
        assert main(["remember", str(name), "--model", checkpoint]) == code
        assert read_record(made).path == str(video)
    assert f"{made} remembers {video}; choose another name with -o" in capfd.readouterr().err
    assert main(["remember", str(other), "-o", str(made), "--model", checkpoint]) == 0
    assert read_record(made).path == str(other)


def test_what_is_told_of_a_memory_is_what_fits(video: Path, tmp_path: Path):
    small = engine.load(tiny.save(tmp_path / "small", Tiny(context=600)), use_cache=False)
    small.remember(video, tmp_path / "video.apollo")
    read = small.watch(tmp_path / "video.apollo", reserve_tokens=60)
    assert len(read) < 30
    assert "seen of every" in read.plan.describe()


def test_a_memory_with_a_changed_byte_is_refused(video: Path, checkpoint: str, tmp_path: Path):
    apollo = engine.load(checkpoint, use_cache=False)
    target = tmp_path / "video.apollo"
    apollo.remember(video, target)
    content = bytearray(target.read_bytes())
    content[-900] ^= 0xFF
    target.write_bytes(content)
    with pytest.raises(MediaError, match="damaged"):
        apollo.watch(target)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ask", "V", "one?", "--sampling", "uniform", "--frames", "99999999"), "100,000"),
        (("ask", "V", "one?", "--choice", "a", "--choice", "b", "--blind-check"), "one of the two"),
        (("ask", "V", "one?", "--choice", "a", "--choice", ""), "not empty"),
        (("ask", "V", "one?", "--seed", "9" * 25), "--seed"),
        (("ask", "V", "\udcff bad"), "UTF-8"),
        (("ask", "V", "one?", "--from", "-1"), "--help"),
        (("frames", "V", "--at", "99"), "ends at 60.00 s"),
        (("check", ""), "empty name"),
        (("remember", ""), "no name of a video"),
        (("remember", "."), "no name of a video"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_code_two(
    arguments: tuple[str, ...],
    words: str,
    video: Path,
    checkpoint: str,
    capfd: pytest.CaptureFixture[str],
):
    given = [str(video) if word == "V" else word for word in arguments]
    model = ["--model", checkpoint] if arguments[0] == "ask" else []
    assert main([*given, *model]) == 2
    errors = capfd.readouterr().err.strip().splitlines()
    assert len([line for line in errors if not line.startswith("note: ")]) == 1
    assert words in errors[-1]


def test_closed_descriptors_are_no_crash(video: Path, checkpoint: str):
    command = f"{sys.executable} -m apollo_cli ask {video} 'one?' --model {checkpoint}"
    for closed in (">&-", "2>&-"):
        done = subprocess.run(
            f"{command} {closed}", shell=True, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


def test_a_video_is_read_from_stdin(video: Path, checkpoint: str):
    command = [sys.executable, "-m", "apollo_cli", "ask", "-", "one?", "--model", checkpoint]
    command += ["--max-new-tokens", "4", "--no-cache"]
    with video.open("rb") as file:
        piped = subprocess.run(command, stdin=file, capture_output=True, text=True, check=False)
    assert piped.returncode == 0, piped.stderr
    named = apollo("ask", video, *command[5:])
    assert piped.stdout == named.stdout
    nothing = subprocess.run(
        [*command[:4], "-", *command[5:]], input="", capture_output=True, text=True, check=False
    )
    assert nothing.returncode == 3
    assert "standard input is empty" in nothing.stderr


def test_a_video_from_stdin_has_a_name_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = tmp_path / "apollo-stdin-killed"
    (killed / "files").mkdir(parents=True)
    (killed / "lock").touch()
    os.utime(killed, (1, 1))
    ends: list[Callable[[], object]] = []
    monkeypatch.setattr("atexit.register", ends.append)
    for content in (
        b"",
        b"no video at all, only words",
        (CASES / "cut_middle.mp4").read_bytes()[:3000],
    ):
        stdin = io.TextIOWrapper(io.BytesIO(content))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["ask", "-", "one?"]) == 3
        told = capfd.readouterr().err
        assert "standard input" in told
        assert str(tmp_path) not in told
    assert not killed.exists()
    for end in ends:
        end()
    assert list(tmp_path.iterdir()) == []


def test_a_video_from_stdin_is_called_so_in_data_and_takes_no_room_in_the_cache(
    checkpoint: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path))
    content = (CASES / "cfr10_target.mp4").read_bytes()
    for form, start in (("csv", "-,one?,"), ("jsonl", "{")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        command = ["ask", "-", "one?", "--model", checkpoint, "--max-new-tokens", "2"]
        assert main([*command, "--format", form]) == 0
        row = capfd.readouterr().out.splitlines()[-1]
        assert row.startswith(start)
    assert json.loads(row)["videos"][0]["path"] == "-"
    assert main(["cache", "list", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["memories"] == []


def test_a_cache_that_fails_half_way_costs_no_second_look(
    video: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from apollo_cli.memory_cache import cache_folder
    from apollo_cli.memory_file import MemoryWriter

    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))
    add, seen = MemoryWriter.add, []

    def fill_the_disk(self: MemoryWriter, tokens: Any, times: Any) -> None:
        if self.done >= 8:
            raise OSError(28, "No space left on device")
        add(self, tokens, times)

    monkeypatch.setattr(MemoryWriter, "add", fill_the_disk)
    apollo = engine.load(checkpoint)
    memory = apollo.watch(video, on_progress=lambda *told: seen.append(told))
    assert len(memory) == 30
    assert any("No space left on device" in note for note in memory.notes)
    assert [done for stage, done, _ in seen if stage == "decode"] == [*range(4, 30, 4), 30]
    assert list(cache_folder().iterdir()) == []
    with pytest.raises(UsageError, match="No space left on device"):
        apollo.remember(video, tmp_path / "video.apollo")
    assert {path.suffix for path in tmp_path.glob("video.apollo.*")} == {".part", ".count"}


def test_an_answer_cannot_break_out_of_its_subtitle():
    from apollo_cli.commands.formats import to_srt

    hostile = "first\n\n2\n00:00:09,000 --> 00:00:10,000\nfaked"
    block = to_srt({"question": "what?", "answer": hostile}, 1)
    assert block.count("-->") == 1
    assert block.index("\n\n") == len(block) - 2


def test_a_web_address_is_named_as_what_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    listed = tmp_path / "videos.txt"
    listed.write_text("http://example.org/a.mp4\n")
    for arguments in (["http://example.org/a.mp4", "what?"], ["--videos", str(listed), "what?"]):
        assert main(["ask", *arguments]) == 3
        told = "http://example.org/a.mp4 is a web address; only local files are read"
        assert told in capfd.readouterr().err


def test_a_file_whose_name_is_not_utf8_is_asked_about_and_found_again(
    tmp_path: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    odd = tmp_path / os.fsdecode(b"caf\xe9.mp4")
    copyfile(CASES / "cfr30.mp4", odd)
    told = []
    for _ in range(2):
        fixed = ("--model", checkpoint, "--max-new-tokens", "4", "--json")
        assert main(["ask", str(odd), "one?", *fixed]) == 0
        told.append(json.loads(capfd.readouterr().out))
    assert told[0]["answer"] == told[1]["answer"]
    assert told[1]["seconds"]["decode"] == 0 < told[0]["seconds"]["decode"]
