"""Many questions, many videos, many formats: one run, gone on with after a failure or a stop."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from shutil import copyfile

import pytest

from apollo_cli.atomic import held
from apollo_cli.cli import main
from apollo_cli.engine import Apollo
from apollo_cli.errors import MediaError
from tests import tiny
from tests.tiny import Tiny
from tests.video.made import make_talk

CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("batch") / "checkpoint"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    videos = tmp_path / "videos"
    videos.mkdir()
    for name in ("cfr30.mp4", "empty.mp4", "vp8.webm"):
        copyfile(CASES / name, videos / name)
    return videos


def ask(checkpoint: str, *arguments: str) -> int:
    return main(["ask", *arguments, "--model", checkpoint, "--max-new-tokens", "4"])


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_folder_is_answered_and_a_broken_file_is_a_row_of_its_own(
    folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    code = ask(checkpoint, "--videos", str(folder), "-q", "one?", "-q", "two?", "--json")
    found = rows(capfd.readouterr().out)
    assert code == 3
    assert [Path(row["video"]).name for row in found] == [
        "cfr30.mp4", "cfr30.mp4", "empty.mp4", "empty.mp4", "vp8.webm", "vp8.webm",
    ]  # fmt: skip
    assert ["error" in row for row in found] == [False, False, True, True, False, False]


def test_what_is_odd_about_a_video_of_many_is_said_too(
    folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    (folder / "list.txt").write_text("odd.mp4\n")
    copyfile(CASES / "cut_middle.mp4", folder / "odd.mp4")
    assert ask(checkpoint, "--videos", str(folder / "list.txt"), "one?") == 0
    assert "odd.mp4: the file ends early" in capfd.readouterr().err


def test_whatever_is_wrong_with_one_video_the_others_are_answered(
    folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    talk = make_talk(folder / "b_talk.mkv")
    talk.write_bytes(talk.read_bytes().replace(b"<b>one</b>", b"\xff\xfe\xfd\xfc\xfb" * 2))
    (folder / "empty.mp4").write_bytes((CASES / "cut_middle.mp4").read_bytes()[:3000])
    assert ask(checkpoint, "--videos", str(folder), "one?", "--subtitles", "auto", "--json") == 3
    found = {Path(row["video"]).name: row for row in rows(capfd.readouterr().out)}
    assert "subtitle track is damaged" in found["b_talk.mkv"]["error"]
    assert found["b_talk.mkv"]["exit_code"] == 3
    assert all("answer" in found[name] for name in ("cfr30.mp4", "vp8.webm"))


def test_a_stopped_run_is_gone_on_with(folder: Path, checkpoint: str, tmp_path: Path):
    output = tmp_path / "answers.jsonl"
    (folder / "empty.mp4").unlink()
    assert ask(checkpoint, "--videos", str(folder), "one?", "-o", str(output)) == 0
    whole = output.read_text()
    first, second = whole.splitlines(keepends=True)
    output.write_text(first + second[:30])
    assert ask(checkpoint, "--videos", str(folder), "one?", "-o", str(output)) == 0
    again = rows(output.read_text())
    assert [row["answer"] for row in again] == [row["answer"] for row in rows(whole)]
    assert output.read_text().startswith(first)


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
def test_only_answers_of_the_same_model_and_settings_are_left_out_and_that_is_said(
    changed: tuple[str, ...],
    again: bool,
    folder: Path,
    checkpoint: str,
    capfd: pytest.CaptureFixture[str],
):
    output = folder / "answers.jsonl"
    (folder / "empty.mp4").unlink()
    command = ["ask", "--videos", str(folder), "one?", "-o", str(output), "--model", checkpoint]
    command += ["--max-new-tokens", "4", "--template", "qwen_2"]
    assert main(command) == 0
    assert "from before" not in capfd.readouterr().err
    if changed == ("--model", "OTHER"):
        changed = ("--model", str(tiny.save(folder.parent / "other", Tiny(seed=3))))
    assert main([*command, *changed]) == 0
    told = capfd.readouterr().err
    assert ("2 answers from before, which are not asked for again" in told) == (not again)
    assert ("2 answers of another model or with other settings" in told) == again
    assert len(output.read_text().splitlines()) == (4 if again else 2)
    assert main([*command, *changed]) == 0
    assert len(output.read_text().splitlines()) == (4 if again else 2)


EDITS = {
    "video": "5",
    "question": "[]",
    "answer": "{}",
    "model": "[1]",
    "tokens": "3",
    "probabilities": "7",
    "videos": "NaN",
}


def test_an_edited_row_is_told_and_its_question_asked_again(
    folder: Path, checkpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    for name in ("empty.mp4", "vp8.webm"):
        (folder / name).unlink()
    output = tmp_path / "answers.jsonl"
    command = ("--videos", str(folder), "one?", "-o", str(output))
    assert ask(checkpoint, *command) == 0
    (row,) = rows(output.read_text())
    spelled = [json.dumps(row | {key: "@"}).replace('"@"', raw) for key, raw in EDITS.items()] + [
        "[" * 5000,
        "3",
        "null",
    ]
    output.write_text("\n".join([json.dumps({"video": "x", "error": "e"}), *spelled]) + "\n")
    capfd.readouterr()
    assert ask(checkpoint, *command) == 0
    told = capfd.readouterr().err
    assert "line 2" in told
    assert "video is 5" in told
    assert "from before" not in told
    assert rows(output.read_text().splitlines()[-1])[0]["answer"] == row["answer"]


def test_of_a_folder_only_what_may_be_a_video_is_asked_about(
    folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    (folder / "empty.mp4").unlink()
    texts = ("cfr30.srt", "notes.TXT", "a.csv", "b.jsonl", ".hidden.mp4", "cfr30.apollo", "README")
    for name in texts:
        (folder / name).write_text("hello\n")
    (folder / "blob.bin").write_bytes(b"\x00\x01\x02\xff" * 500)
    copyfile(CASES / "no_suffix", folder / "no_suffix")
    output = folder / "answers.ndjson"
    for _ in range(2):
        assert ask(checkpoint, "--videos", str(folder), "one?", "--json", "-o", str(output)) == 0
    assert [Path(row["video"]).name for row in rows(output.read_text())] == [
        "cfr30.mp4",
        "no_suffix",
        "vp8.webm",
    ]
    told = capfd.readouterr().err
    assert "no video was given" not in told
    assert "README" in told
    assert ask(checkpoint, str(folder), "one?") == 3
    assert "--videos" in capfd.readouterr().err


def test_a_failure_of_a_later_question_takes_no_answer_back(
    folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str], monkeypatch
):
    def fail(apollo: Apollo, question: str) -> list[str]:
        if question == "two?":
            raise MediaError("gone")
        return []

    monkeypatch.setattr(Apollo, "remarks", fail)
    (folder / "empty.mp4").unlink()
    asked = ("-q", "one?", "-q", "two?", "-q", "three?")
    assert ask(checkpoint, "--videos", str(folder), *asked, "--json") == 3
    found = rows(capfd.readouterr().out)
    assert [(row["question"], "error" in row) for row in found] == [
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
    checkpoint: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def end(apollo: Apollo, question: str) -> list[str]:
        if question == "two?":
            raise stop("stopped")
        return []

    monkeypatch.setattr(Apollo, "remarks", end)
    output = tmp_path / "answers"
    arguments = [str(CASES / "cfr30.mp4"), "-q", "one?", "-q", "two?", "--format", form]
    arguments += ["-o", str(output)] if to_file else []
    assert ask(checkpoint, *arguments) == (130 if stop is KeyboardInterrupt else 3)
    text = output.read_text() if to_file else capfd.readouterr().out
    assert "one?" in text
    assert "two?" not in text


FORM_OF = {
    "b.csv": "csv", "b.json": "jsonl", "B.JSONL": "jsonl", "b.srt": "srt", "b.md": "md",
    "b.out": "text", "b": "text",
}  # fmt: skip
START = {"csv": "video,question,", "jsonl": "{", "srt": "1\n0", "md": "**", "text": "Q: "}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("name", "asked"),
    [*((name, None) for name in FORM_OF), ("b.out", "csv"), ("b.csv", "text")],
)
def test_the_format_follows_the_option_else_the_ending_else_text(
    *, name: str, asked: str | None, many: bool, folder: Path, checkpoint: str
):
    (folder / "empty.mp4").unlink()
    (folder / "vp8.webm").unlink()
    output, clip = folder / name, str(folder / "cfr30.mp4")
    videos = ["--videos", str(folder)] if many else [clip]
    options = ["--format", asked] if asked else []
    ask_ = [*videos, "-q", "one?", "-q", "two?", "--quiet", *options, "-o", str(output)]
    assert ask(checkpoint, *ask_) == 0
    text, form = output.read_text(), asked or FORM_OF[name]
    start = {"text": f"{clip}\nQ: ", "md": "## "}.get(form) if many else None
    assert text.startswith(start or START[form])
    assert text.count("two?") == 1


@pytest.mark.parametrize("form", ["text", "csv", "srt", "md"])
def test_of_many_videos_each_answer_names_its_own_and_an_error_is_no_answer(
    form: str, folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    assert ask(checkpoint, "--videos", str(folder), "one?", "--format", form) == 3
    written = capfd.readouterr().out.replace("\\", "")
    after = ",one?" if form == "csv" else "\n"
    assert all(f"{folder / name}{after}" in written for name in ("cfr30.mp4", "vp8.webm"))
    assert ("error: " in written) == (form != "csv")


def test_one_answer_as_text_is_what_stdout_would_show(
    checkpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    clip, output = str(CASES / "cfr30.mp4"), tmp_path / "b.txt"
    for options in ([], ["--choice", "red", "--choice", "blue"]):
        assert ask(checkpoint, clip, "one?", *options) == 0
        assert ask(checkpoint, clip, "one?", *options, "-o", str(output)) == 0
        assert output.read_text() == capfd.readouterr().out


def test_a_table_of_an_earlier_run_is_not_written_over(
    folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    output = folder / "out.csv"
    output.write_text("video,question,answer,error,notes\n")
    assert ask(checkpoint, "--videos", str(folder), "one?", "-o", str(output)) == 2
    assert "out.csv" in capfd.readouterr().err
    assert output.read_text() == "video,question,answer,error,notes\n"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_of_two_runs_on_one_output_the_second_is_refused(
    *, name: str, many: bool, folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    (folder / "empty.mp4").unlink()
    output = folder / name
    videos = ["--videos", str(folder)] if many else [str(folder / "cfr30.mp4")]
    with held(output, pytest.fail):
        (folder / "link").symlink_to(output)
        for path in (output, folder / "link"):
            assert ask(checkpoint, *videos, "one?", "-o", str(path)) == 2
            assert str(path) in capfd.readouterr().err
        assert not output.exists()
    (folder / "link").unlink()
    assert ask(checkpoint, *videos, "one?", "-o", str(output)) == 0
    assert output.read_text().count("one?") == (2 if many else 1)
    # Nothing is left of the lock, and what is no plain file has none.
    assert {p.name for p in folder.iterdir()} == {"cfr30.mp4", "vp8.webm", name}
    assert ask(checkpoint, *videos, "one?", "-o", "/dev/null") == 0


def test_an_output_in_a_folder_that_is_not_there_is_told_before_anything_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    output = tmp_path / "none" / "a.csv"
    assert main(["ask", "nowhere.mp4", "one?", "-o", str(output)]) == 2
    assert str(output.parent) in capfd.readouterr().err
    assert not output.parent.exists()


def test_a_note_is_said_once_a_run(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (folder / "empty.mp4").unlink()
    asked = ["--videos", str(folder), "one?", "--model", "apollo-nano", "--max-new-tokens", "2"]
    assert main(["ask", *asked]) == 0
    notes = capfd.readouterr().err.splitlines()
    assert sum("apollo-nano" in note for note in notes) >= 1
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize("output", ["questions.txt", "list.txt", "cfr30.mp4", "talk.srt"])
def test_an_output_is_never_a_file_that_is_read(
    output: str, folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    (folder / "questions.txt").write_text("one?\n")
    (folder / "list.txt").write_text("cfr30.mp4\n")
    (folder / "talk.srt").write_text("1\n00:00:01,000 --> 00:00:02,500\nhello\n")
    target = folder / output
    before = target.read_bytes()
    many = ["--videos", str(folder / "list.txt")]
    arguments = ["--questions-file", str(folder / "questions.txt"), "-o", str(target)]
    arguments += ["--subtitles", str(folder / "talk.srt")]
    for videos in (many, [str(folder / "cfr30.mp4")], ["--videos", str(folder)]):
        if videos == many or output != "list.txt":
            assert ask(checkpoint, *videos, *arguments) == 2
            assert f"{target} is" in capfd.readouterr().err
        assert target.read_bytes() == before


def test_failures_are_tried_again(folder: Path, checkpoint: str, tmp_path: Path):
    output = tmp_path / "answers.jsonl"
    assert ask(checkpoint, "--videos", str(folder), "one?", "-o", str(output)) == 3
    copyfile(CASES / "cfr30.mp4", folder / "empty.mp4")
    assert ask(checkpoint, "--videos", str(folder), "one?", "-o", str(output)) == 0
    found = rows(output.read_text())
    assert sum("answer" in row for row in found) == 3


def test_a_list_of_videos_is_relative_to_its_file(
    folder: Path, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    listed = folder / "list.txt"
    listed.write_text("# two of them\n\ncfr30.mp4\nvp8.webm\n")
    assert ask(checkpoint, "--videos", str(listed), "one?", "--json") == 0
    assert len(rows(capfd.readouterr().out)) == 2


def test_questions_come_from_a_file(
    checkpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    questions = tmp_path / "questions.txt"
    questions.write_text("one?\n\ntwo?\n", encoding="utf-8-sig")
    clip = str(CASES / "cfr30.mp4")
    assert ask(checkpoint, clip, "--questions-file", str(questions), "--json") == 0
    assert [row["question"] for row in rows(capfd.readouterr().out)] == ["one?", "two?"]


def test_csv_subtitles_and_markdown_hold_the_same_answers(
    checkpoint: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    clip = str(CASES / "cfr30.mp4")
    texts = {}
    for form in ("jsonl", "csv", "srt", "md"):
        assert ask(checkpoint, clip, "-q", "one?", "-q", "two?", "--format", form) == 0
        texts[form] = capfd.readouterr().out
    answers = [row["answer"] for row in rows(texts["jsonl"])]
    table = list(csv.DictReader(io.StringIO(texts["csv"])))
    assert [row["answer"] for row in table] == answers
    assert texts["srt"].startswith("1\n00:00:00,000 --> 00:00:04,000\none?\n")
    assert "**two?**" in texts["md"]
    target = tmp_path / "answers.md"
    assert (
        ask(checkpoint, clip, "-q", "one?", "-q", "two?", "--format", "md", "-o", str(target)) == 0
    )
    assert target.read_text() == texts["md"]


def test_choices_are_printed_with_their_probabilities(
    checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    clip = str(CASES / "cfr30.mp4")
    assert ask(checkpoint, clip, "Which?", "--choice", "red", "--choice", "blue") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] in ("A red", "B blue")
    assert len(lines) == 3
    assert ask(checkpoint, clip, "Which?", "--choice", "red", "--choice", "blue", "--json") == 0
    row = rows(capfd.readouterr().out)[0]
    assert sum(row["probabilities"].values()) == pytest.approx(1)


def test_the_blind_check_is_told_and_recorded(checkpoint: str, capfd: pytest.CaptureFixture[str]):
    clip = str(CASES / "cfr30.mp4")
    assert ask(checkpoint, clip, "one?", "--blind-check", "--json") == 0
    written = capfd.readouterr()
    check = rows(written.out)[0]["blind_check"]
    assert set(check) == {"without_video", "shuffled_clips", "verdict"}
    assert check["verdict"] in written.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--videos", "nowhere", "one?"), "--videos nowhere"),
        (("--videos", str(CASES), "a.mp4", "one?"), "one of the two"),
        (("--questions-file", "nowhere.txt"), "nowhere.txt"),
        ((str(CASES / "cfr30.mp4"), "one?", "--choice", "red"), "2 to 10"),
        ((str(CASES / "cfr30.mp4"), "one?", "--ray", "1"), "needed are --videos"),
    ],
)
def test_bad_combinations_are_usage_errors(
    arguments: tuple[str, ...], words: str, checkpoint: str, capfd: pytest.CaptureFixture[str]
):
    assert ask(checkpoint, *arguments) == 2
    assert words in capfd.readouterr().err


def test_a_ray_cluster_gives_the_rows_of_a_plain_run(
    folder: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("ray", reason="needs the extra [ray]")
    # Its workers start with the code that is under test here.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    plain, spread = tmp_path / "plain.jsonl", tmp_path / "spread.jsonl"
    asked = ("--videos", str(folder), "-q", "one?", "--no-cache")
    assert ask(checkpoint, *asked, "-o", str(plain)) == 3
    assert ask(checkpoint, *asked, "--ray", "1", "-o", str(spread)) == 3
    keys = ("video", "question", "answer", "error")
    found = [
        sorted([row.get(key) or "" for key in keys] for row in rows(file.read_text()))
        for file in (plain, spread)
    ]
    assert found[0] == found[1]
    assert all("error" not in row or "answer" not in row for row in rows(spread.read_text()))
