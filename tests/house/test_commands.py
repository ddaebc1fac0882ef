"""Every command that a document or a docstring names is there, and takes what is written."""

import ast
import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from apollo_cli.errors import ApolloError
from tests.house.reference import command_tree
from tests.house.repo import ROOT, project_files, read, syntax_tree

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SPAN = re.compile(r"(`{1,2})([^`]+)\1")
OF_SHELL = re.compile(r"(?:bash|pytest|ruff \w+) ([\w.]+/[\w./]*)")
OURS = ("apollo_cli", "lab", "tests", "benchmarks")
OF_PYTHON = re.compile(r"python3? (?:-m )?(?P<program>[\w./]+)(?P<arguments>[^`|&;#>\n]*)")
WILD = re.compile("-|[A-Z]+$")
# Its changes speak of what was, too.
HISTORY = Path("CHANGELOG.md")


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, DOCUMENTED):
            yield ast.get_docstring(node) or ""


def texts() -> Iterator[tuple[Path, str]]:
    """What people read: pages, docstrings, and the files that run commands for us."""
    for path in project_files():
        if path.suffix in (".md", ".yml", ".yaml") or path.parts[0] == ".ci":
            if path != HISTORY:
                yield path, read(str(path))
        elif path.suffix == ".py" and not path.is_symlink():
            yield from ((path, text) for text in docstrings(path))


def words_of(command: str) -> list[str]:
    """A command's words as they are typed: without marks of a usage line and comments."""
    return shlex.split(re.sub(r"[][]|\.\.\.", " ", command), comments=True)


def typed_commands(text: str) -> Iterator[tuple[list[str], bool]]:
    """The ``apollo`` commands of a text without their first word, and whether each is a whole line.

    A whole line is what somebody copies; within a sentence, what is left out is understood.
    """
    for line in text.splitlines():
        if match := re.match(r"(?: {4}|\$ )?(?:.* && )?(apollo [a-z-].*)", line):
            yield words_of(match[1])[1:], True
    for match in SPAN.finditer(text):
        inside = " ".join(match[2].split())
        if inside.startswith("apollo "):
            yield words_of(inside)[1:], False


@cache
def commands() -> dict[str, click.Context]:
    """Each command by the words that name it."""
    return dict(command_tree())


def faults(words: list[str], whole: bool) -> list[str]:
    """What is wrong with a written ``apollo`` command."""
    tree, path, left = commands(), "apollo", list(words)
    # A word in capitals stands for any.
    while isinstance(tree[path].command, click.Group) and left and not WILD.match(left[0]):
        path = f"{path} {left.pop(0)}"
        if path not in tree:
            return [f"no command {path}"]
    context = tree[path]
    if whole and not isinstance(context.command, click.Group):
        try:
            context.command.make_context(str(context.info_name), [*left], context.parent)
        except (click.ClickException, ApolloError) as error:
            return [str(error)]
    known = {
        name for p in context.command.get_params(context) for name in p.opts + p.secondary_opts
    }
    options = [word.split("=")[0].rstrip(".,:;)") for word in left if word.startswith("--")]
    return [f"no option {name}" for name in options if name not in known]


def test_every_apollo_command_that_is_written_can_be_typed():
    found = [
        (path, words, whole) for path, text in texts() for words, whole in typed_commands(text)
    ]
    assert len(found) > 60
    wrong = {f"{path}: {' '.join(w)}": f for path, w, whole in found if (f := faults(w, whole))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("$ apollo ask a.mp4 b --json", ""),
        ("    apollo nothing a.mp4", "no command apollo nothing"),
        ("    apollo ask a.mp4 b --jsn", "No such option"),
        ("see `apollo cache throw`", "no command apollo cache throw"),
        ("see `apollo ask\n--jsn`", "no option --jsn"),
        ("see ``apollo ask --json``", ""),
    ],
)
def test_the_search_for_wrong_commands_finds_them(text: str, fault: str):
    ((words, whole),) = typed_commands(text)
    assert fault in "".join(faults(words, whole))
    assert bool(fault) == bool(faults(words, whole))


def python_commands() -> dict[str, set[str]]:
    """Programs of ours that ``python`` starts, and the options that are written behind each."""
    programs: dict[str, set[str]] = {}
    for _, text in texts():
        for match in OF_PYTHON.finditer(text):
            program = match["program"].rstrip(".")
            if program.split(".")[0] in OURS or program.endswith(".py"):
                options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", match["arguments"])
                programs.setdefault(program, set()).update(options)
    return programs


def source_of(program: str) -> Path:
    """The file that a module or script is run from."""
    if program.endswith(".py"):
        return ROOT / program
    spec = importlib.util.find_spec(program)
    assert spec is not None, f"there is no module {program}"
    if spec.submodule_search_locations:
        return source_of(f"{program}.__main__")
    assert spec.origin is not None
    return Path(spec.origin)


def run_program(program: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a program as ``python`` would, in this process; what it exits with."""
    source = source_of(program)
    monkeypatch.setattr(sys, "argv", [str(source), *arguments])
    monkeypatch.setattr(sys, "path", [str(source.parent), *sys.path])
    try:
        runpy.run_path(str(source), run_name="__main__")
    except SystemExit as stop:
        return stop.code
    return None


PROGRAMS = python_commands()


def test_the_programs_of_this_project_are_found():
    assert len(PROGRAMS) > 15


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_every_program_that_is_written_is_there_and_has_its_options(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    source = source_of(program)
    text = source.read_text("utf-8")
    assert "__main__" in text
    if "argparse" in text:
        assert run_program(program, "--help", monkeypatch=monkeypatch) in (0, None)
        text = capsys.readouterr().out
    elif program != "apollo_cli":
        assert set(re.findall(r"[\"'](--[a-z-]+)[\"']", text)) >= PROGRAMS[program]
    assert {option for option in PROGRAMS[program] if option not in text} == set()


@pytest.mark.slow
def test_apollo_nano_is_measured_as_its_card_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    program = "lab.evaluate"
    few = ("--videos", "1", "--per-kind", "1")
    assert run_program(program, *few, monkeypatch=monkeypatch) is None
    assert capsys.readouterr().out.startswith("| kind | questions |")


def test_scripts_that_are_written_are_there():
    written = {match[1].rstrip(".") for _, text in texts() for match in OF_SHELL.finditer(text)}
    assert written
    assert {name for name in written if not (ROOT / name).exists()} == set()
