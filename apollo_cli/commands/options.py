"""Flags of the command line, made of the fields of the options classes in ``config``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from apollo_cli.config import Flag, Options, parse_moment
from apollo_cli.errors import ApolloError, UsageError

Command = TypeVar("Command", bound=Callable[..., Any])
Chosen = TypeVar("Chosen", bound=Options)
FILE = click.Path(readable=False, path_type=Path)


class Moment(click.ParamType):
    """A time in a video: seconds (83.2) or minutes and hours (12:30, 1:02:03.5)."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Turn text into seconds."""
        if isinstance(value, int | float):
            return float(value)
        try:
            return parse_moment(value)
        except UsageError as error:
            self.fail(error.message, param, ctx)


def complete_file(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete the name of a file."""
    return [CompletionItem(incomplete, type="file")]


def complete_model(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The known and the fetched models, and folders."""
    from apollo_cli.weights.store import list_models

    try:
        names = [row.name for row in list_models()]
    except ApolloError:
        names = []
    found = [CompletionItem(name) for name in ["auto", *names] if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="dir")]


_COMPLETES = {"": None, "file": complete_file, "model": complete_model}


def flags_of(*classes: type[Options], only: str = "") -> Callable[[Command], Command]:
    """Give a command a flag for each field of options classes.

    Args:
        only: name of the one field to take.
    """

    def decorate(command: Command) -> Command:
        owns = [own for options in classes for own in fields(options) if only in ("", own.name)]
        for own in reversed(owns):
            flag: Flag = own.metadata["flag"]
            kind = Moment() if flag.kind is parse_moment else flag.kind
            command = click.option(
                flag.name,
                own.name,
                type=click.Choice(flag.choices) if flag.choices else kind,
                is_flag=flag.kind is bool,
                default=own.default,
                show_default=flag.unset or True,
                # One variable sets the model of all commands.
                envvar="APOLLO_MODEL" if flag.name == "--model" else None,
                shell_complete=_COMPLETES[flag.completes],
                help=flag.help,
            )(command)
        return command

    return decorate


def read_options(options: type[Chosen], flags: dict[str, Any]) -> Chosen:
    """Options of one class as the flags of a command set them.

    Raises:
        UsageError: a value is out of its range, or two do not go together.
    """
    return options(**{own.name: flags[own.name] for own in fields(options)})


fit_flag = click.option(
    "--fit",
    type=click.Choice(["auto"]),
    show_default="take all, or stop",
    help="auto: look at less, or take fewer bits, so that it fits the free memory.",
)
