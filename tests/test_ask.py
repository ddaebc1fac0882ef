"""``apollo ask`` as a user types it: answer on stdout, all else on stderr, the right exit code."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from apollo_cli.cli import main
from tests import tiny
from tests.command import Done, apollo
from tests.tiny import Tiny

CASES = Path(__file__).parent / "cases"
CLIP = str(CASES / "cfr30.mp4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("ask") / "checkpoint"))


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))

    def call(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return apollo(*arguments)

    return call


@pytest.fixture
def ask(run: Run, checkpoint: str) -> Run:
    fixed = ("--model", checkpoint, "--max-new-tokens", "6")
    return lambda *arguments, stdin="": run("ask", *fixed, *arguments, stdin=stdin)


def test_the_answer_is_on_stdout_and_everything_else_on_stderr(ask: Run):
    done = ask(CLIP, "What is it?")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) >= 1
    assert "cfr30.mp4: 2 clips, every moment seen" in done.stderr
    quiet = ask(CLIP, "What is it?", "--quiet")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_json_has_one_object_a_line_for_each_question(ask: Run):
    done = ask(CLIP, "-q", "one?", "-q", "two?", "--json")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert [first["question"], second["question"]] == ["one?", "two?"]
    assert first["videos"][0]["clip_times"] == [[0.0, 0.5, 1.0, 1.5], [2.0, 2.5, 3.0, 3.5]]
    assert first["tokens"]["visual"] == 16
    assert {"load", "decode", "encode", "prefill", "generate"} == set(first["seconds"])
    assert set(first) == {
        "question", "answer", "stop", "model", "videos", "tokens", "seconds", "notes", "cited",
    }  # fmt: skip


def test_a_question_is_read_from_stdin_and_a_window_in_seconds_or_minutes(ask: Run):
    window = ("--from", "0:01", "--to", "3.5", "--json")
    typed = ask(CLIP, "What is it?", *window)
    piped = ask(CLIP, "-", *window, stdin="What is it?\n")
    first, second = (json.loads(done.stdout) for done in (typed, piped))
    assert first["answer"] == second["answer"]
    assert first["videos"][0]["window_seconds"] == [1.0, 3.5]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nowhere.mp4", "one?"), 3, "nowhere.mp4"),
        ((str(CASES), "one?"), 3, "folder"),
        ((str(CASES / "empty.mp4"), "one?"), 3, "empty"),
        ((str(CASES / "html_page.mp4"), "one?"), 3, "html_page.mp4"),
        ((CLIP, ""), 2, "question is empty"),
        ((CLIP,), 2, "a file and a question"),
        ((), 2, "a file and a question"),
        ((CLIP, "one?", "--from", "10"), 2, "ends at 4.0 s"),
        ((CLIP, "one?", "--from", "3", "--to", "2"), 2, "--to must be later"),
        ((CLIP, "one?", "--from", "soon"), 2, "is not a time"),
        ((CLIP, "one?", "--fps", "0"), 2, "--fps"),
        ((CLIP, "one?", "--frames", "3"), 2, "--sampling uniform"),
        ((CLIP, "one?", "--temperature", "-1"), 2, "--temperature"),
        ((CLIP, "one?", "--fps", "1e-300"), 2, "0.001"),
        (
            (CLIP, "one?", "--temperature", "0.0002"),
            2,
            "--temperature 0.0002; allowed is 0, or 0.001",
        ),
        ((CLIP, "one?", "--seed", "-1"), 2, "--seed -1; allowed is 0 to 9,223,372,036,854,775,807"),
        ((CLIP, "one?", "--max-hours", "nan"), 2, "--max-hours"),
        ((CLIP, "one?", "--image-fps", "nan"), 2, "--image-fps"),
        ((CLIP, "one?", "--repetition-penalty", "nan"), 2, "--repetition-penalty"),
        ((CLIP, "one?", "--temperature", "1e-320"), 2, "0, or 0.001"),
        ((CLIP, "one?", "--temperature", "nan"), 2, "0, or 0.001"),
        ((CLIP, "one?", "--temperature", "1", "--top-p", "1e-300"), 2, "0.0001"),
        ((CLIP, "one?", "--template", "llama"), 2, "qwen_1_5"),
        ((CLIP, "one?", "--device", "cuda"), 6, "--device cpu"),
        ((CLIP, "one?", "--dtype", "int3"), 6, "bfloat16"),
        ((CLIP, "why " * 5000), 4, "holds 4096"),
        ((CLIP, "one?", "--adapter", "/nowhere"), 5, "/nowhere"),
        ((CLIP, "one?", "--model", "apollo-99b"), 5, "apollo-3b"),
        ((CLIP, "one?", "--model", "apollo-3b"), 5, "apollo models pull"),
        ((CLIP, "one?", "--model", "/nowhere/at/all"), 5, "/nowhere/at/all"),
    ],
)
def test_bad_input_is_one_line_with_its_exit_code(
    arguments: tuple[str, ...], code: int, words: str, ask: Run
):
    done = ask(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error")]
    assert len(errors) == 1


def test_a_checkpoint_that_lacks_tensors_lists_them(tmp_path: Path, run: Run):
    from safetensors.torch import load_file, save_file

    folder = tiny.save(tmp_path / "broken", Tiny())
    file = folder / "mm_connector" / "model.safetensors"
    tensors = load_file(file)
    del tensors["proj.0.bias"], tensors["resampler.norm.wheight"]
    save_file(tensors, file)
    done = run("ask", CLIP, "one?", "--model", str(folder))
    assert done.returncode == 5
    assert "proj.0.bias" in done.stderr
    assert "resampler.norm.wheight" in done.stderr


@pytest.mark.parametrize(
    ("command", "words"), [("ask", ["why?"]), ("chat", []), ("remember", ["-o", "x.apollo"])]
)
@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_shows_a_word_before_anything_is_read_or_loaded(
    command: str, words: list[str], quiet: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return not quiet

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.chdir(tmp_path)
    # The word comes first; what is wrong with the file or the model is known later.
    assert main([command, "nowhere.mp4", *words, "--model", "apollo-nano"]) == 3
    told = screen.getvalue()
    assert ("loading" in told) != quiet
    assert quiet or told.index("loading") < told.index("nowhere.mp4")


def test_an_interrupt_leaves_with_130(
    checkpoint: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The signal comes while the command waits for its question."""

    class Typed(io.StringIO):
        def __next__(self) -> str:
            signal.raise_signal(signal.SIGINT)
            return ""

        def read(self, *size: object) -> str:
            return next(self)

    monkeypatch.setattr(sys, "stdin", Typed())
    assert main(["ask", CLIP, "-", "--model", checkpoint]) == 130
    out, err = capfd.readouterr()
    assert (out, err.strip()) == ("", "interrupted")
