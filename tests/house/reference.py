"""Writes what is generated: docs/cli.md, the frozen options and the map in AGENTS.md.

python -m tests.house.reference           # says what is out of date
python -m tests.house.reference --write   # brings it up to date
"""

import ast
import sys
from collections.abc import Callable, Iterator

import click

from tests.house.repo import ROOT, python_files, syntax_tree

WIDTH = 88
MAP_HEADING = "## Every Python file\n"


def walk(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Every command of the tree in the order of the help page, with its context."""
    yield context.command_path, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None, name
            if not child.hidden:
                yield from walk(child, _context(child, name, context))


def command_tree() -> list[tuple[str, click.Context]]:
    """The whole tree under ``apollo``."""
    from apollo_cli.cli import cli

    return list(walk(cli, _context(cli, "apollo", None)))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(
        command, parent, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH
    )


def cli_pages() -> str:
    """docs/cli.md: the help page of every command."""
    parts = [
        "# Command reference\n",
        "The help page of every command, written by `python -m tests.house.reference --write`.",
        "Answers go to stdout, everything else to stderr.\n",
    ]
    for path, context in command_tree():
        page = context.command.get_help(context).rstrip()
        parts.append(f"## {path}\n\n```text\n{page}\n```\n")
    return "\n".join(parts)


def options() -> str:
    """Each option and argument of each command, one a line."""
    lines = []
    for path, context in command_tree():
        for parameter in context.command.get_params(context):
            if isinstance(parameter, click.Argument):
                lines.append(f"{path}: {parameter.make_metavar(context)}")
            elif isinstance(parameter, click.Option) and not parameter.hidden:
                names = [*parameter.opts, *parameter.secondary_opts]
                lines.append(f"{path}: {' '.join(names)}")
    return "\n".join(lines) + "\n"


def file_map() -> str:
    """AGENTS.md: its hand-written part, then a line for every Python file from its docstring."""
    head = (ROOT / "AGENTS.md").read_text(encoding="utf-8").split(MAP_HEADING)[0]
    lines = [f"- `{path.as_posix()}`: {first_sentence(path)}" for path in python_files()]
    return f"{head}{MAP_HEADING}\n" + "\n".join(lines) + "\n"


def first_sentence(path) -> str:
    """The first line of a module's docstring, which each file must have."""
    docstring = ast.get_docstring(syntax_tree(path))
    assert docstring, f"{path} has no docstring"
    return docstring.split("\n\n")[0].replace("\n", " ").rstrip(".")


GENERATED: dict[str, Callable[[], str]] = {
    "AGENTS.md": file_map,
    "docs/cli.md": cli_pages,
    "tests/house/options.txt": options,
}


def main() -> int:
    """Compares, or writes with --write; returns the exit code."""
    stale = 0
    for name, build in GENERATED.items():
        path, text = ROOT / name, build()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if "--write" in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{name}: written\n")
        else:
            stale = 1
            sys.stdout.write(f"{name}: out of date\n")
    return stale


if __name__ == "__main__":
    sys.exit(main())
