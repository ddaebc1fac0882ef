"""Writes what is generated: docs/cli.md, the frozen options, and the output of README's examples.

python -m tests.house.reference           # says what is out of date
python -m tests.house.reference --write   # brings it up to date
"""

import inspect
import sys
from collections.abc import Callable, Iterator

import click

from tests.house.examples import fill_examples
from tests.house.repo import ROOT


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
    return command.make_context(name, [], parent, resilient_parsing=True)


def cli_pages() -> str:
    """docs/cli.md: usage, words and options of every command.

    Laid out here and not by click, whose layout may change from one release to the next.
    """
    lines = [
        "# Command reference",
        "Written by `python -m tests.house.reference --write` from the commands themselves. "
        "`apollo COMMAND --help` says the same.",
    ]
    for path, context in command_tree():
        usage = " ".join([path, *context.command.collect_usage_pieces(context)])
        words = inspect.cleandoc(context.command.help or "").replace("\b\n", "")
        lines += [f"## {path}", f"`{usage}`", words, _parameters(context)]
        if context.command.epilog:
            lines.append(inspect.cleandoc(context.command.epilog))
    return "\n\n".join(line for line in lines if line) + "\n"


def _parameters(context: click.Context) -> str:
    records = (
        parameter.get_help_record(context)
        for parameter in context.command.get_params(context)
        if isinstance(parameter, click.Option)
    )
    return "\n".join(f"- `{record[0]}`: {record[1]}" for record in records if record)


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


GENERATED: dict[str, Callable[[], str]] = {
    "docs/cli.md": cli_pages,
    "tests/house/options.txt": options,
}


def main() -> int:
    """Compares, or writes with --write; returns the exit code."""
    stale, writes = 0, "--write" in sys.argv[1:]
    texts = {name: build() for name, build in GENERATED.items()}
    if writes:
        texts["README.md"] = fill_examples((ROOT / "README.md").read_text(encoding="utf-8"))
    for name, text in texts.items():
        path = ROOT / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if writes:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{name}: written\n")
        else:
            stale = 1
            sys.stdout.write(f"{name}: out of date\n")
    return stale


if __name__ == "__main__":
    sys.exit(main())
