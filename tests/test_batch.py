"""Many questions, many videos, many formats: one run, resumed after a failure or a stop."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from shutil import copyfile
from typing import Any, NamedTuple

import pytest

from apollo_cli.atomic import held
from apollo_cli.engine import Apollo
from apollo_cli.errors import MediaError
from tests import tiny
from tests.command import apollo
from tests.tiny import Tiny
from tests.video.made import make_talk

CASES = Path(__file__).parent / "cases"
CLIP = CASES / "cfr30.mp4"


class Asked(NamedTuple):
    """What ``apollo ask`` left behind."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.out)


def read_rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("batch") / "checkpoint"))


@pytest.fixture
def ask(checkpoint: str):
    fixed = ("--max-new-tokens", "4", "--model", checkpoint)
    return lambda *arguments: Asked(*apollo("ask", *fixed, *arguments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two videos and an empty file."""
    videos = tmp_path / "videos"
    videos.mkdir()
    for name in ("cfr30.mp4", "empty.mp4", "vp8.webm"):
        copyfile(CASES / name, videos / name)
    return videos


@pytest.fixture
def sound(folder: Path) -> Path:
    """The folder without the empty file."""
    (folder / "empty.mp4").unlink()
    return folder


def test_whatever_is_wrong_with_one_video_the_others_are_answered(folder: Path, ask):
    talk = make_talk(folder / "b_talk.mkv")
    talk.write_bytes(talk.read_bytes().replace(b"<b>one</b>", b"\xff\xfe\xfd\xfc\xfb" * 2))
    done = ask("--videos", folder, "-q", "one?", "-q", "two?", "--subtitles", "auto", "--json")
    assert done.code == 3
    found = [(Path(row["video"]).name, row["question"], "error" in row) for row in done.rows]
    names = [("b_talk.mkv", True), ("cfr30.mp4", False), ("empty.mp4", True), ("vp8.webm", False)]
    assert found == [(name, asked, bad) for name, bad in names for asked in ("one?", "two?")]
    assert "subtitle track is damaged" in done.rows[0]["error"]
    assert done.rows[0]["exit_code"] == 3


def test_a_list_of_videos_is_relative_to_its_file_and_what_is_odd_is_said(folder: Path, ask):
    (folder / "list.txt").write_text("# two of them\n\ncfr30.mp4\nodd.mp4\n")
    (folder / "questions.txt").write_text("one?\n\ntwo?\n", encoding="utf-8-sig")
    copyfile(CASES / "cut_middle.mp4", folder / "odd.mp4")
    questions = ("--questions-file", folder / "questions.txt")
    done = ask("--videos", folder / "list.txt", *questions, "--json")
    assert done.code == 0
    assert [row["question"] for row in done.rows] == ["one?", "two?"] * 2
    assert "odd.mp4: the file ends early" in done.err


def test_a_stopped_run_is_resumed_and_failures_are_tried_again(folder: Path, ask, tmp_path: Path):
    output = tmp_path / "answers.jsonl"
    command = ("--videos", folder, "one?", "-o", output)
    assert ask(*command).code == 3
    whole = output.read_text()
    first, failed, second = whole.splitlines(keepends=True)
    output.write_text(first + failed + second[:30])
    copyfile(CLIP, folder / "empty.mp4")
    assert ask(*command).code == 0
    again = read_rows(output.read_text())
    assert output.read_text().startswith(first + failed)
    answers = {Path(row["video"]).name: row["answer"] for row in again if "answer" in row}
    assert len(again) == 4 and len(answers) == 3
    assert answers["vp8.webm"] == json.loads(second)["answer"]


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ((), False),
        (("--seed", "5"), False),
        (("--to", "2"), False),
        (("--max-new-tokens", "5"), True),
        (("--choice", "red", "--choice", "blue"), True),
        (("--blind-check",), True),
        (("--template", "qwen_1_5"), True),
        (("--model", "OTHER"), True),
    ],
)
def test_only_answers_of_the_same_model_and_options_are_left_out_and_that_is_said(
    changed: tuple[str, ...], again: bool, sound: Path, ask
):
    output = sound / "answers.jsonl"
    command = ("--videos", sound, "one?", "-o", output, "--template", "qwen_2")
    first = ask(*command)
    assert first.code == 0 and "from before" not in first.err
    if changed == ("--model", "OTHER"):
        changed = ("--model", str(tiny.save(sound.parent / "other", Tiny(seed=3))))
    done = ask(*command, *changed)
    assert done.code == 0
    assert ("2 answers from before" in done.err) == (not again)
    assert ("2 answers of another model" in done.err) == again
    assert ask(*command, *changed).code == 0
    assert len(output.read_text().splitlines()) == (4 if again else 2)


EDITS = {
    "video": "5", "question": "[]", "answer": "{}", "model": "[1]", "tokens": "3",
    "probabilities": "7", "videos": "NaN",
}  # fmt: skip


def test_an_edited_row_is_told_and_its_question_asked_again(ask, tmp_path: Path):
    (tmp_path / "list.txt").write_text(str(CLIP))
    output = tmp_path / "answers.jsonl"
    command = ("--videos", tmp_path / "list.txt", "one?", "-o", output)
    assert ask(*command).code == 0
    (row,) = read_rows(output.read_text())
    edited = [json.dumps(row | {key: "@"}).replace('"@"', raw) for key, raw in EDITS.items()]
    lines = [json.dumps({"video": "x", "error": "e"}), *edited, "[" * 5000, "3", "null"]
    output.write_text("\n".join(lines) + "\n")
    done = ask(*command)
    assert done.code == 0
    assert "line 2" in done.err and "video is 5" in done.err and "from before" not in done.err
    assert json.loads(output.read_text().splitlines()[-1])["answer"] == row["answer"]


def test_of_a_folder_only_what_may_be_a_video_is_asked_about(sound: Path, ask):
    texts = ("cfr30.srt", "notes.TXT", "a.csv", "b.jsonl", ".hidden.mp4", "cfr30.apollo", "README")
    for name in texts:
        (sound / name).write_text("hello\n")
    (sound / "blob.bin").write_bytes(b"\x00\x01\x02\xff" * 500)
    copyfile(CASES / "no_suffix", sound / "no_suffix")
    output = sound / "answers.ndjson"
    for _ in range(2):
        done = ask("--videos", sound, "one?", "--json", "-o", output)
        assert done.code == 0
        assert "README" in done.err and "no video was given" not in done.err
    names = [Path(row["video"]).name for row in read_rows(output.read_text())]
    assert names == ["cfr30.mp4", "no_suffix", "vp8.webm"]
    one = ask(sound, "one?")
    assert one.code == 3 and "--videos" in one.err


def test_a_failure_of_a_later_question_takes_no_answer_back(
    sound: Path, ask, monkeypatch: pytest.MonkeyPatch
):
    def fail(apollo: Apollo, question: str) -> list[str]:
        if question == "two?":
            raise MediaError("gone")
        return []

    monkeypatch.setattr(Apollo, "remarks", fail)
    done = ask("--videos", sound, "-q", "one?", "-q", "two?", "-q", "three?", "--json")
    assert done.code == 3
    assert [(row["question"], "error" in row) for row in done.rows] == [
        ("one?", False), ("two?", True), ("three?", True),
    ] * 2  # fmt: skip


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MediaError])
@pytest.mark.parametrize("form", ["jsonl", "csv", "srt", "md"])
@pytest.mark.parametrize("to_file", [False, True])
def test_what_was_answered_before_a_stop_is_kept(
    *,
    stop: type[BaseException],
    form: str,
    to_file: bool,
    ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    def end(apollo: Apollo, question: str) -> list[str]:
        if question == "two?":
            raise stop("stopped")
        return []

    monkeypatch.setattr(Apollo, "remarks", end)
    output = tmp_path / "answers"
    to = ("-o", output) if to_file else ()
    done = ask(CLIP, "-q", "one?", "-q", "two?", "--format", form, *to)
    assert done.code == (130 if stop is KeyboardInterrupt else 3)
    text = output.read_text() if to_file else done.out
    assert "one?" in text and "two?" not in text


START = {"csv": "video,question,", "jsonl": "{", "srt": "1\n0", "md": "**", "text": "Q: "}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("name", "asked", "form"),
    [
        ("b.csv", None, "csv"),
        ("b.json", None, "jsonl"),
        ("B.JSONL", None, "jsonl"),
        ("b.srt", None, "srt"),
        ("b.md", None, "md"),
        ("b.out", None, "text"),
        ("b", None, "text"),
        ("b.out", "csv", "csv"),
        ("b.csv", "text", "text"),
    ],
)
def test_the_format_follows_the_option_else_the_ending_else_text(
    *, name: str, asked: str | None, form: str, many: bool, sound: Path, ask
):
    (sound / "vp8.webm").unlink()
    output, clip = sound / name, sound / "cfr30.mp4"
    videos = ("--videos", sound) if many else (clip,)
    options = ("--format", asked) if asked else ()
    done = ask(*videos, "-q", "one?", "-q", "two?", "--quiet", *options, "-o", output)
    assert done == (0, "", "")
    start = {"text": f"{clip}\nQ: ", "md": "## "}.get(form) if many else None
    assert output.read_text().startswith(start or START[form])
    assert output.read_text().count("two?") == 1


@pytest.mark.parametrize("form", ["text", "csv", "srt", "md"])
def test_of_many_videos_each_answer_names_its_own_and_an_error_is_no_answer(
    form: str, folder: Path, ask
):
    done = ask("--videos", folder, "one?", "--format", form)
    assert done.code == 3
    written, after = done.out.replace("\\", ""), ",one?" if form == "csv" else "\n"
    assert all(f"{folder / name}{after}" in written for name in ("cfr30.mp4", "vp8.webm"))
    assert ("error: " in written) == (form != "csv")


def test_one_answer_as_text_is_what_stdout_would_show(ask, tmp_path: Path):
    output = tmp_path / "b.txt"
    for options in ((), ("--choice", "red", "--choice", "blue")):
        assert ask(CLIP, "one?", *options, "-o", output).code == 0
        assert output.read_text() == ask(CLIP, "one?", *options).out


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_of_two_runs_on_one_output_the_second_is_refused(
    *, name: str, many: bool, sound: Path, ask
):
    output, link = sound / name, sound / "link"
    videos = ("--videos", sound) if many else (sound / "cfr30.mp4",)
    with held(output, pytest.fail):
        link.symlink_to(output)
        for path in (output, link):
            done = ask(*videos, "one?", "-o", path)
            assert done.code == 2 and str(path) in done.err
        assert not output.exists()
    link.unlink()
    assert ask(*videos, "one?", "-o", output).code == 0
    assert output.read_text().count("one?") == (2 if many else 1)
    # Nothing is left of the lock, and what is no plain file has none.
    assert {p.name for p in sound.iterdir()} == {"cfr30.mp4", "vp8.webm", name}
    assert ask(*videos, "one?", "-o", "/dev/null").code == 0


def test_a_note_is_said_once_a_run(sound: Path, ask):
    done = ask("--videos", sound, "one?", "--model", "apollo-nano")
    notes = done.err.splitlines()
    assert done.code == 0
    assert any("apollo-nano" in note for note in notes)
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize("output", ["questions.txt", "list.txt", "cfr30.mp4", "talk.srt", "a.csv"])
def test_no_file_that_is_read_or_holds_another_table_is_written_over(
    output: str, folder: Path, ask
):
    (folder / "questions.txt").write_text("one?\n")
    (folder / "list.txt").write_text("cfr30.mp4\n")
    (folder / "talk.srt").write_text("1\n00:00:01,000 --> 00:00:02,500\nhello\n")
    (folder / "a.csv").write_text("video,question,answer,error,notes\n")
    target = folder / output
    before = target.read_bytes()
    read = ("--questions-file", folder / "questions.txt", "--subtitles", folder / "talk.srt")
    many, one = ("--videos", folder / "list.txt"), (folder / "cfr30.mp4",)
    asked = {"list.txt": [many], "a.csv": [many]}.get(output, [many, one, ("--videos", folder)])
    for videos in asked:
        done = ask(*videos, *read, "-o", target)
        assert done.code == 2 and f"{target} is" in done.err
        assert target.read_bytes() == before


def test_csv_subtitles_and_markdown_hold_the_same_answers(ask):
    texts = {
        form: ask(CLIP, "-q", "one?", "-q", "two?", "--format", form).out
        for form in ("jsonl", "csv", "srt", "md")
    }
    table = csv.DictReader(io.StringIO(texts["csv"]))
    assert [row["answer"] for row in table] == [r["answer"] for r in read_rows(texts["jsonl"])]
    assert texts["srt"].startswith("1\n00:00:00,000 --> 00:00:04,000\none?\n")
    assert "**two?**" in texts["md"]


def test_choices_are_printed_with_their_probabilities(ask):
    choices = ("Which?", "--choice", "red", "--choice", "blue")
    lines = ask(CLIP, *choices).out.splitlines()
    assert lines[0] in ("A red", "B blue") and len(lines) == 3
    (row,) = ask(CLIP, *choices, "--json").rows
    assert sum(row["probabilities"].values()) == pytest.approx(1)


def test_the_blind_check_is_told_and_recorded(ask):
    done = ask(CLIP, "one?", "--blind-check", "--json")
    check = done.rows[0]["blind_check"]
    assert set(check) == {"without_video", "shuffled_clips", "verdict"}
    assert check["verdict"] in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--videos", "nowhere", "one?"), "--videos nowhere"),
        (("--videos", CASES, "a.mp4", "one?"), "one of the two"),
        (("--videos", CASES, "one?", "--fit", "auto"), "--fit auto"),
        (("--questions-file", "nowhere.txt"), "nowhere.txt"),
        ((CLIP, "one?", "--choice", "red"), "2 to 10"),
        ((CLIP, "one?", "--choice", "a", "--choice", "b", "--blind-check"), "--blind-check"),
        ((CLIP, "one?", "--ray", "1"), "--videos"),
        (("nowhere.mp4", "one?", "-o", "/no-such-folder/a.csv"), "/no-such-folder"),
    ],
)
def test_bad_combinations_are_usage_errors(arguments: tuple[object, ...], words: str, ask):
    done = ask(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_a_ray_cluster_gives_the_rows_of_a_plain_run(
    folder: Path, ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("ray", reason="needs the extra [ray]")
    # Its workers start with the code that is under test here.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    keys, found = ("video", "question", "answer", "error"), []
    for name, options in (("plain.jsonl", ()), ("spread.jsonl", ("--ray", "1"))):
        output = tmp_path / name
        asked = ("--videos", folder, "-q", "one?", "--no-cache", *options, "-o", output)
        assert ask(*asked).code == 3
        rows = read_rows(output.read_text())
        assert all("error" not in row or "answer" not in row for row in rows)
        found.append(sorted([row.get(key) or "" for key in keys] for row in rows))
    assert found[0] == found[1]
