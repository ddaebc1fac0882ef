"""Hostile text on a terminal: nothing that it would act on, whichever command writes it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from apollo_cli.cli import main
from apollo_cli.commands.formats import WRITERS
from apollo_cli.commands.output import progress, say, say_note, write_facts, write_table
from apollo_cli.conversation import last_talk
from apollo_cli.text import clean_streams
from tests import tiny

pty = pytest.importorskip("pty")

CLIP = Path(__file__).parent / "cases" / "cfr30.mp4"
# A title, a cleared screen, red and blinking, a control sequence of one character, turned text.
EVIL = "a\x1b]0;owned\x07b\x1b[2J\x1b[31;5mc\x9b2Jd\x85\u202ee\u2066f\u200f\u2028g\u061c\x7fh"
# Colours, and what a bar needs to be drawn again and taken away.
DRAWN = re.compile(r"\x1b\[(?:(?!31;5m)[0-9;]*m|\?25[lh]|2K|1A)|\r")
ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

Shown = Callable[[Callable[[], object]], str]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Run something with stdout and stderr on a terminal; returns what that was sent."""

    def run(call: Callable[[], object]) -> str:
        owner, end = pty.openpty()
        sent: list[bytes] = []

        def read() -> None:
            # A terminal whose other end is closed is an error, not an end.
            try:
                while piece := os.read(owner, 1 << 16):
                    sent.append(piece)
            except OSError:
                pass

        reader = threading.Thread(target=read)
        reader.start()
        with open(end, "w", encoding="utf-8") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            monkeypatch.setattr(sys, "stderr", stream)
            call()
            stream.flush()
        monkeypatch.undo()
        reader.join(30)
        os.close(owner)
        return b"".join(sent).decode("utf-8", "backslashreplace")

    monkeypatch.setenv("TERM", "xterm-256color")
    return run


def assert_harmless(text: str) -> None:
    assert "owned" in text
    assert not ACTIVE.search(DRAWN.sub("", text)), DRAWN.sub("", text)
    assert "\\x1b" in text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that says an escape character, again and again."""
    from safetensors.torch import load_file, save_file

    folder = tiny.save(tmp_path_factory.mktemp("evil") / "checkpoint")
    weights = load_file(folder / "llm" / "model.safetensors")
    # All tokens are equally likely then, and the first one is taken.
    name = next(key for key in weights if key.endswith("model.norm.weight"))
    weights[name].zero_()
    save_file(weights, folder / "llm" / "model.safetensors")
    place = folder / "llm" / "vocab.json"
    ids = json.loads(place.read_text("utf-8"))
    # How byte pairs write the byte 0x1b.
    first = next(token for token, number in ids.items() if number == 0)
    ids[first], ids["\u011b"] = ids["\u011b"], 0
    place.write_text(json.dumps(ids), "utf-8")
    return str(folder)


def evil_recipe(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(f"{json.dumps(EVIL)} = 1\n", "utf-8")
    return path


def evil_file(folder: Path) -> Path:
    return Path(shutil.copy(CLIP, folder / f"{EVIL}.mp4"))


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "check": lambda folder: ["check", str(evil_file(folder))],
    "check a folder": lambda folder: ["check", str(evil_file(folder).parent)],
    "check text": lambda folder: ["check", str(shutil.copy(__file__, folder / f"{EVIL}.mp4"))],
    "frames": lambda folder: ["frames", str(evil_file(folder)), "-o", str(folder / f"{EVIL}d")],
    "plan": lambda folder: ["plan", str(evil_file(folder))],
    "no file": lambda folder: ["ask", str(folder / EVIL), "What is it?"],
    "no model": lambda folder: ["models", "show", EVIL],
    "no command": lambda folder: [EVIL],
    "no option": lambda folder: ["ask", f"--{EVIL}"],
    "debug": lambda folder: ["--debug", "check", str(folder / EVIL)],
    "recipe": lambda folder: ["finetune", "check", str(evil_recipe(folder))],
    "no recipe": lambda folder: ["finetune", "check", str(folder / EVIL)],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_sends_a_terminal_what_it_would_act_on(
    terminal: Shown, tmp_path: Path, name: str
):
    (tmp_path / "files").mkdir()
    arguments = COMMANDS[name](tmp_path / "files")
    assert_harmless(terminal(lambda: main(arguments)))


def test_an_answer_is_escaped_as_it_is_written(terminal: Shown, checkpoint: str, tmp_path: Path):
    options = ("--model", checkpoint, "--max-new-tokens", "4", "--device", "cpu")
    path = evil_file(tmp_path)
    shown = terminal(lambda: main(["ask", str(path), EVIL, *options]))
    assert_harmless(shown)
    assert "\\x1b" * 4 in shown


def test_a_talk_is_escaped(
    terminal: Shown, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = ("--model", checkpoint, "--max-new-tokens", "4", "--device", "cpu")
    path = evil_file(tmp_path)
    told = []
    for start in ([str(path)], ["--continue"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{EVIL}?\n/{EVIL}\n/frames\n"))
        told.append(terminal(lambda start=start: main(["chat", *start, *options])))
        assert_harmless(told[-1])
    assert last_talk().is_file()
    assert "\\x1b" * 4 in told[0]
    assert told[1].count("\\x1b" * 4) > told[0].count("\\x1b" * 4)


def test_a_table_lines_and_a_bar_are_escaped_and_still_drawn(terminal: Shown):
    def write() -> None:
        with clean_streams():
            write_table(["NAME"], [[EVIL], ["plain"]])
            write_facts([("name", EVIL)])
            with progress() as report:
                report("watch", 1, 3)
                say(EVIL)
                say_note(EVIL)
                click.echo(EVIL, err=True)
                click.secho("green", fg="green", err=True)
                report("watch", 3, 3)
            sys.stderr.writelines([EVIL, "\n"])

    shown = terminal(write)
    assert_harmless(shown)
    assert "watching" in shown
    assert "\x1b[?25l" in shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_no_encoding_is_a_way_around(monkeypatch: pytest.MonkeyPatch, encoding: str):
    told = io.BytesIO()
    stream = io.TextIOWrapper(told, encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["check", EVIL]) == 3
    stream.flush()
    assert not ACTIVE.search(told.getvalue().decode(encoding).replace("\r", ""))


def test_data_on_a_pipe_stays_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = evil_file(tmp_path)
    assert main(["check", "--json", str(path)]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)[0]["path"] == str(path)
    assert not ACTIVE.search(told.err)


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("<b>x</b>", "<\u2060b>x<\u2060/b>"),
        ("a < b and c > d", "a <\u2060 b and c > d"),
        ("{\\an8}x", "{\u2060\\an8}x"),
        ("2 < 3 {", "2 < 3 {"),
    ],
)
def test_a_player_of_subtitles_shows_what_looks_like_a_tag(said: str, written: str):
    text = WRITERS["srt"]({"question": "What?", "answer": said}, 1)
    assert text.splitlines()[2:] == ["What?", written, ""]


ROWS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "<img src=x onerror=alert(1)>", "[a](b)"]


@pytest.mark.parametrize("said", ROWS)
@pytest.mark.parametrize("form", sorted(set(WRITERS) - {"text", "jsonl", "srt"}))
def test_answers_in_files_are_text(form: str, said: str):
    row = {"video": said, "question": said, "answer": said, "error": said}
    text = WRITERS[form](row, 2)
    if form == "csv":
        cells = next(csv.reader(io.StringIO(text, newline="")))
        assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    else:
        assert not re.search(r"(?<!\\)[<\[]", text)
