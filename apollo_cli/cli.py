"""The command ``apollo``: a table of commands loaded when used, and errors to exit codes."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from apollo_cli._version import __version__
from apollo_cli.errors import ApolloError
from apollo_cli.harmless import clean_streams

INTERRUPTED = 130
PIPE_CLOSED = 141


class PipeClosed(Exception):
    """The reader of our output has left, as ``head`` does."""


@dataclass(frozen=True)
class LazyCommand:
    """Where a command lives, and its line on the help page of the group.

    Attributes:
        target: ``module:attribute``, imported when the command is used.
        help: one line; a test holds it equal to the command's own.
    """

    target: str
    help: str


COMMANDS = {
    "ask": LazyCommand("apollo_cli.commands.ask:ask", "Ask one or more questions of a video."),
    "chat": LazyCommand("apollo_cli.commands.chat:chat", "Talk about a video in the terminal."),
    "ui": LazyCommand(
        "apollo_cli.commands.ui:ui",
        "Open a local page to ask about videos and see what the model saw.",
    ),
    "check": LazyCommand(
        "apollo_cli.commands.check:check",
        "Tell which video files can be trusted, and what is odd about the others.",
    ),
    "frames": LazyCommand(
        "apollo_cli.commands.frames:frames",
        "Write the pictures that the model sees, each with its real time in its name.",
    ),
    "remember": LazyCommand(
        "apollo_cli.commands.remember:remember",
        "Watch all of a video once and keep what the model saw in a file.",
    ),
    "cache": LazyCommand(
        "apollo_cli.commands.remember:cache",
        "List and clear the memories that are found again by themselves.",
    ),
    "plan": LazyCommand(
        "apollo_cli.commands.plan:plan",
        "Show what a video takes, before anything is fetched or loaded.",
    ),
    "models": LazyCommand(
        "apollo_cli.commands.models:models", "List, fetch, inspect, verify and remove models."
    ),
    "finetune": LazyCommand(
        "apollo_cli.commands.finetune:finetune", "Train a model on your own videos."
    ),
    "doctor": LazyCommand(
        "apollo_cli.commands.doctor:doctor", "Show what this machine can run, and what is missing."
    ),
}


class LazyGroup(click.Group):
    """A group whose help page costs no import of its commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        module, attribute = row.target.split(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table, without importing what it names."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.help) for name, row in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a closed pipe passes click by, which would call it a failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeClosed from error


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 usage, 3 video, 4 does not fit, 5 weights, 6 device, 7 data, "
    "130 interrupted.",
)
@click.version_option(__version__, prog_name="apollo", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the whole traceback of an error.")
def cli(debug: bool) -> None:
    """Ask questions of long local videos, on one machine.

    Answers go to stdout, everything else to stderr.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: None takes those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # A descriptor that the caller closed is written to nowhere.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not become a crash.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with clean_streams():
            code = _run(arguments)
            sys.stdout.flush()
    except (PipeClosed, BrokenPipeError):
        # Python would complain at exit, when it flushes what nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments[: _first_command(arguments)]
    try:
        # Of our commands none returns a value, so an integer is the code of an early exit.
        code = cli.main(arguments, prog_name="apollo", standalone_mode=False)
    except click.ClickException as error:
        command = (
            error.ctx.command_path
            if isinstance(error, click.UsageError) and error.ctx
            else "apollo"
        )
        reason = " ".join(error.format_message().split()).rstrip(".")
        _show(f"{reason}; {command} --help shows what is allowed", debug)
        return error.exit_code
    except ApolloError as error:
        _show(error.message, debug)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except PipeClosed:
        raise
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        _show(f"{error.strerror or error}{place}", debug)
        return 1
    except Exception as error:  # noqa: BLE001 - the edge: no user should meet a traceback
        what = f"unexpected {type(error).__name__}: {' '.join(str(error).split())}"
        _show(what if debug else f"{what}; run again with apollo --debug for the traceback", debug)
        return 1
    return code if isinstance(code, int) else 0


def _first_command(arguments: list[str]) -> int:
    return next((i for i, text in enumerate(arguments) if text in COMMANDS), len(arguments))


def _show(message: str, debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exc()
    click.echo(f"error: {message}", err=True)
