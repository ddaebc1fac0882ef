"""The command line: what it costs to start, where it writes, and which exit code it ends with."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from apollo_cli import __version__, cli
from apollo_cli.errors import (
    ApolloError,
    DataError,
    DeviceError,
    FitError,
    MediaError,
    UsageError,
    WeightsError,
)

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests" / "golden" / "tiny-checkpoint"


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["-c", code] if code else ["-m", "apollo_cli"]
    return subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Put a command ``fail`` into the table that raises what it is given."""

    def install(error: BaseException) -> None:
        @click.command()
        def fail() -> None:
            raise error

        monkeypatch.setitem(cli.COMMANDS, "fail", cli.LazyCommand("fake_module:fail", "Fail."))
        module = type(sys)("fake_module")
        module.fail = fail  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_module", module)

    return install


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ApolloError, 1),
        (UsageError, 2),
        (MediaError, 3),
        (FitError, 4),
        (WeightsError, 5),
        (DeviceError, 6),
        (DataError, 7),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_one_line_on_stderr(
    failing, capsys, kind: type[ApolloError], code: int
):
    failing(kind("this\nhappened", "that is allowed", "do this"))
    assert cli.main(["fail"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: this happened; that is allowed; do this\n")


def test_an_interrupt_ends_with_130(failing, capsys):
    failing(KeyboardInterrupt())
    assert cli.main(["fail"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(failing, capsys):
    failing(ZeroDivisionError("by\nzero"))
    assert cli.main(["fail"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "unexpected ZeroDivisionError: by zero; run again with apollo --debug" in err


@pytest.mark.parametrize("error", [ZeroDivisionError("zero"), MediaError("broken")])
def test_debug_shows_the_traceback(failing, capsys, error: Exception):
    failing(error)
    assert cli.main(["--debug", "fail"]) == getattr(error, "exit_code", 1)
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "error: " in err


def test_an_early_exit_of_a_command_keeps_its_code(failing):
    failing(click.exceptions.Exit(6))
    assert cli.main(["fail"]) == 6


@pytest.mark.parametrize(
    "arguments", [["nope"], ["--nope"], ["models", "nope"], ["models", "show"]]
)
def test_wrong_usage_ends_with_2_and_writes_nothing_on_stdout(capsys, arguments: list[str]):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "apollo" in err


def test_the_version_is_the_one_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"apollo {__version__}\n"


def test_a_closed_pipe_is_no_error():
    code = (
        "import subprocess, sys\n"
        "run = subprocess.Popen([sys.executable, '-m', 'apollo_cli', 'models', 'list'],"
        " stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "run.stdout.close()\n"
        "print(run.stderr.read().decode(), run.wait())\n"
    )
    assert run(code=code).stdout.split() == ["141"]


def test_the_help_page_of_the_group_imports_no_command():
    code = (
        "import sys\n"
        "from apollo_cli.cli import main\n"
        "main(['--help'])\n"
        "print([n for n in sys.modules if n.startswith('apollo_cli.commands')"
        " or n in ('torch', 'transformers', 'av', 'numpy', 'rich', 'huggingface_hub')])\n"
    )
    assert run(code=code).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_the_table_repeats_the_first_line_of_each_command(name: str):
    row = cli.COMMANDS[name]
    module, attribute = row.target.split(":")
    command = getattr(importlib.import_module(module), attribute)
    assert command.help.split("\n\n")[0].replace("\n", " ").strip() == row.help


def test_models_list_names_every_known_model_and_its_state(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path))
    assert cli.main(["models", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["apollo-nano"]["state"] == "embedded"
    assert "no commercial use" in rows["apollo-3b"]["entry"]["licence"]
    assert cli.main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t") == ["NAME", "STATE", "SIZE", "WHAT IT IS"]
    assert len(lines) == 1 + len(rows)


def test_models_show_tells_both_sides_of_the_licence(capsys):
    assert cli.main(["models", "show", "apollo-3b"]) == 0
    out = capsys.readouterr().out
    assert "Qwen Research License" in out
    assert "label on the repository" in out
    assert "check before use" in out


def test_models_show_counts_what_a_folder_holds(capsys):
    assert cli.main(["models", "show", str(TINY), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens_per_clip"] == 8
    assert facts["parameters"]["llm"] == 152128


def test_models_verify_checks_a_folder(capsys):
    assert cli.main(["models", "verify", str(TINY)]) == 0
    assert "complete, no hashes were kept" in capsys.readouterr().out
    broken = TINY.parents[1] / "cases_weights" / "cut_shard"
    assert cli.main(["models", "verify", str(broken)]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert "100 bytes, its header says 120" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "apollo-4b"], "did you mean"),
        (["pull", "apollo-nano"], "is on this machine already"),
        (["rm", "apollo-nano", "--yes"], "is part of the program"),
    ],
)
def test_what_cannot_be_done_with_a_model_ends_with_5(capsys, arguments: list[str], message: str):
    assert cli.main(["models", *arguments]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
