"""How commands write: data on stdout, as a table, plain lines or JSON; the rest on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from apollo_cli.text import clean_streams, clean_terminal, plain_stream

STAGES = {
    "fetch": "fetching",
    "load": "loading",
    "decode": "decoding",
    "encode": "encoding",
    "check": "checking",
    "measure": "measuring",
    "watch": "watching",
    "validate": "validating",
    "merge": "merging",
}


def say(text: str) -> None:
    """Write a line for the person, on stderr; work goes on where nobody can read it."""
    try:
        click.echo(text, err=True)
    except OSError:
        # What was not written stays in the buffer, and would fail again with the next line.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def write_json(value: Any) -> None:
    """Write data on stdout as JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def write_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows on stdout: a table on a terminal, tab-separated lines elsewhere."""
    if not sys.stdout.isatty():
        for row in [headings, *rows]:
            click.echo("\t".join(row))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean_terminal(cell)) for cell in row))
    Console(file=plain_stream(sys.stdout)).print(table)


def write_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Write names and values on stdout, one pair a line."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        click.echo(f"{name.ljust(width)}  {value}")


def format_bytes(count: int | None) -> str:
    """A size as people read it, in decimal units; ``unknown`` for None."""
    if count is None:
        return "unknown"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def say_note(text: str) -> None:
    """Write a remark for the person, on one line of stderr."""
    say(f"note: {' '.join(text.split())}")


def once(remark: Callable[[str], None]) -> Callable[[str], None]:
    """The same, but nothing is said twice."""
    said = set[str]()

    def tell(text: str) -> None:
        if text not in said:
            said.add(text)
            remark(text)

    return tell


def silent(text: str) -> None:
    """Say nothing."""


@contextmanager
def progress(
    quiet: bool = False, at_once: bool = False
) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage on stderr, where that is a terminal.

    Args:
        at_once: say that something is loaded, before any stage begins.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=Console(file=plain_stream(sys.stderr)), transient=True)
    tasks: dict[str, Any] = {}
    with ExitStack() as stack:

        def report(stage: str, done: int, total: int | None) -> None:
            if not tasks:
                # A question that is asked before anything is done needs the line of the bar.
                stack.enter_context(bars)
                # Lines that are written meanwhile go to the bar's console, escaped before.
                stack.enter_context(clean_streams())
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES[stage], total=total)
            bars.update(tasks[stage], completed=done, total=total)

        if at_once:
            report("load", 0, None)
        yield report
