"""The command line: what it costs to start, where it writes, and which exit code it ends with."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import copyfile

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
from tests.command import apollo

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests" / "golden" / "tiny-checkpoint"
CUT_SHARD = ROOT / "tests" / "cases_weights" / "cut_shard"


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

        monkeypatch.setitem(cli.COMMANDS, "fail", "Fail.")
        module = type(sys)("apollo_cli.commands.fail")
        module.fail = fail  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "apollo_cli.commands.fail", module)

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
    failing, kind: type[ApolloError], code: int
):
    failing(kind("this\nhappened", "that is allowed", "do this"))
    assert apollo("fail") == (code, "", "error: this happened; that is allowed; do this\n")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (click.exceptions.Exit(6), 6, ""),
        (
            ZeroDivisionError("by\nzero"),
            1,
            "error: unexpected ZeroDivisionError: by zero; run again with --debug for the "
            "traceback\n",
        ),
    ],
)
def test_any_other_end_has_its_code_and_at_most_one_line(
    failing, error: BaseException, code: int, told: str
):
    failing(error)
    assert apollo("fail") == (code, "", told)


@pytest.mark.parametrize("error", [ZeroDivisionError("zero"), MediaError("broken")])
@pytest.mark.parametrize("arguments", [["--debug", "fail"], ["fail", "--debug"], ["fail"]])
def test_debug_shows_the_traceback(
    failing, capsys, monkeypatch: pytest.MonkeyPatch, error: Exception, arguments: list[str]
):
    failing(error)
    if "--debug" not in arguments:
        monkeypatch.setenv("APOLLO_DEBUG", "1")
    assert cli.main(arguments) == getattr(error, "exit_code", 1)
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "error: " in err


@pytest.mark.parametrize("arguments", [[], ["models"], ["finetune"], ["cache"]])
def test_a_group_alone_shows_its_help_page_on_stdout(arguments: list[str]):
    done = apollo(*arguments)
    assert done == apollo(*arguments, "--help")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") > 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nope", "apollo --help"),
        ("--nope", "apollo --help"),
        ("models nope", "apollo models --help"),
        ("models show", "apollo models show --help"),
        ("aks", "'ask'"),
        ("models shwo", "'show'"),
        ("finetune rnu", "'run'"),
        ("ask --modle x", "'--model'"),
        ("models pull --revison x", "'--revision'"),
    ],
)
def test_wrong_usage_is_one_line_with_the_page_or_word_that_is_near(arguments: str, words: str):
    done = apollo(*arguments.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_a_name_that_begins_with_a_dash_stands_after_two(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    copyfile(ROOT / "tests" / "cases" / "cfr30.mp4", tmp_path / "-x.mp4")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "-x.mp4"]) == 2
    assert "after --" in capsys.readouterr().err
    assert cli.main(["check", "--", "-x.mp4"]) == 0
    assert "-x.mp4" in capsys.readouterr().out
    # Behind it, what looks like an option is a name as well.
    assert cli.main(["check", "--", "--debug"]) == 3
    assert "Traceback" not in capsys.readouterr().err


ALL_VARIABLES = {"APOLLO_MODEL": "no-a", "APOLLO_FRAMES_MODEL": "no-b"}


@pytest.mark.parametrize(
    ("variables", "arguments", "code", "words"),
    [
        ({"APOLLO_MODEL": "no-a"}, [], 5, ["'no-a'", "APOLLO_MODEL"]),
        (ALL_VARIABLES, [], 5, ["'no-b'", "APOLLO_FRAMES_MODEL"]),
        (ALL_VARIABLES, ["--model", "no-c"], 5, ["'no-c'"]),
        ({"APOLLO_FRAMES_FPS": "0"}, [], 2, ["--fps 0", "APOLLO_FRAMES_FPS"]),
        ({"APOLLO_FRAMES_MAX_CLIPS": "x"}, [], 2, ["'x'", "APOLLO_FRAMES_MAX_CLIPS"]),
        ({"APOLLO_FRAMES_FROM": "soon"}, [], 2, ["'soon'", "APOLLO_FRAMES_FROM"]),
        ({"APOLLO_FRAMES_SHORT": "cut"}, [], 2, ["'cut'", "APOLLO_FRAMES_SHORT"]),
        ({"APOLLO_FRAMES_FPS": "x"}, ["--fps", "0"], 2, ["--fps 0"]),
        ({"APOLLO_ASK_FPS": "x", "APOLLO_VERSION": "x", "APOLLO_FRAMES_HELP": "x"}, [], 0, []),
    ],
)
def test_variables_set_options_and_are_named_when_they_are_wrong(
    *,
    variables: dict[str, str],
    arguments: list[str],
    code: int,
    words: list[str],
    capsys,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    clip = str(ROOT / "tests" / "cases" / "cfr30.mp4")
    assert cli.main(["frames", clip, "-o", str(tmp_path), "--sheet", *arguments]) == code
    err = capsys.readouterr().err
    assert [word for word in words if word not in err] == []
    if not any(word.startswith("APOLLO_") for word in words):
        assert "APOLLO_" not in err


@pytest.mark.parametrize(
    ("shell", "typed", "wanted"),
    [
        ("bash", "apollo mod", "plain,models"),
        ("bash", "apollo ask --mod", "plain,--model"),
        ("bash", "apollo ask --model apollo-n", "plain,apollo-nano"),
        ("bash", "apollo models show apollo-n", "plain,apollo-nano"),
        ("bash", "apollo ask --model ./mo", "dir,./mo"),
        ("bash", "apollo ask clip.m", "file,clip.m"),
        ("bash", "apollo ask --subtitles tal", "file,tal"),
        ("bash", "apollo remember clip.m", "file,clip.m"),
        ("bash", "apollo finetune run sf", "file,sf"),
        ("zsh", "apollo mod", "models"),
        ("fish", "apollo mod", "models"),
    ],
)
def test_shells_complete_commands_options_files_and_models(
    capsys, monkeypatch: pytest.MonkeyPatch, shell: str, typed: str, wanted: str
):
    monkeypatch.setenv("_APOLLO_COMPLETE", f"{shell}_complete")
    last = typed.rsplit(maxsplit=1)[-1] if shell == "fish" else str(len(typed.split()) - 1)
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", last)
    with pytest.raises(SystemExit):
        cli.main([])
    assert wanted in capsys.readouterr().out


def test_the_version_is_the_one_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"apollo {__version__}\n"


@pytest.mark.parametrize("address", ["http://[::", "http://x:99999999/"])
@pytest.mark.parametrize("command", ["doctor", "ask a.mp4 one?", "models pull apollo-3b"])
def test_a_hub_address_that_is_none_is_told_with_its_variable(
    capsys, monkeypatch: pytest.MonkeyPatch, command: str, address: str
):
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert cli.main(command.split()) == 2
    assert f"HF_ENDPOINT={address} " in capsys.readouterr().err


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
    command = cli.cli.get_command(click.Context(cli.cli), name)
    assert command is not None and command.help is not None
    assert command.help.split("\n\n")[0].replace("\n", " ").strip() == cli.COMMANDS[name]


def test_models_list_names_every_known_model_and_its_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path))
    rows = {row["name"]: row for row in json.loads(apollo("models", "list", "--json").stdout)}
    assert rows["apollo-nano"]["state"] == "embedded"
    assert "no commercial use" in rows["apollo-3b"]["entry"]["licence"]
    lines = apollo("models", "list").stdout.splitlines()
    assert lines[0].split("\t") == ["NAME", "STATE", "SIZE", "WHAT IT IS"]
    assert len(lines) == 1 + len(rows)


def test_models_show_counts_what_a_folder_holds():
    facts = json.loads(apollo("models", "show", TINY, "--json").stdout)
    assert (facts["tokens_per_clip"], facts["parameters"]["llm"]) == (8, 152128)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "apollo-3b"], 0, ["Qwen Research License", "label on the", "check before use"]),
        (["verify", TINY], 0, ["complete, no hashes were kept"]),
        (["verify", CUT_SHARD], 5, ["100 bytes, its header says 120"]),
        (["show", "apollo-4b"], 5, ["did you mean"]),
        (["pull", "apollo-nano"], 5, ["is on this machine already"]),
        (["rm", "apollo-nano", "--yes"], 5, ["is part of the program"]),
    ],
)
def test_models_tells_facts_on_stdout_and_what_cannot_be_done_on_stderr(
    arguments: list[object], code: int, words: list[str]
):
    done = apollo("models", *arguments)
    assert done.returncode == code
    told, other = (done.stderr, done.stdout) if code else (done.stdout, done.stderr)
    assert other == ""
    assert [word for word in words if word not in told] == []
