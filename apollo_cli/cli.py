"""The command ``apollo``: a table of commands loaded when used, and errors to exit codes."""

from __future__ import annotations

import errno
import importlib
import io
import itertools
import os
import re
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

import click

from apollo_cli._version import __version__
from apollo_cli.errors import ApolloError, UsageError
from apollo_cli.text import clean_streams

INTERRUPTED = 130
PIPE_CLOSED = 141
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PipeClosed(Exception):
    """The reader of our output has left, as ``head`` does."""


# Each command and its line on the help page, which a test holds equal to the command's own.
COMMANDS = {
    "ask": "Ask one or more questions of a video.",
    "chat": "Talk about a video in the terminal.",
    "ui": "Open a local page to ask about videos and see what the model saw.",
    "check": "Tell which video files can be trusted, and what is odd about the others.",
    "frames": "Write the pictures that the model sees, each with its real time in its name.",
    "remember": "Watch all of a video once and keep what the model saw in a file.",
    "cache": "List and clear the memories of videos that apollo keeps by itself.",
    "plan": "Show what a video takes, before anything is fetched or loaded.",
    "models": "List, fetch, inspect, verify and remove models.",
    "finetune": "Train a model on your own videos.",
    "doctor": "Show what this machine can run, and what is missing.",
}
# Commands that live in the module of another one.
_MODULES = {"cache": "remember"}


class LazyGroup(click.Group):
    """A group whose help page costs no import of its commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module = f"apollo_cli.commands.{_MODULES.get(cmd_name, cmd_name)}"
        command = getattr(importlib.import_module(module), cmd_name)
        _name_variables(command, f"APOLLO_{cmd_name}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for a mistyped one, the error names those that are near."""
        if args[0] in COMMANDS:
            return super().resolve_command(ctx, args)
        raise click.NoSuchCommand(args[0], possibilities=COMMANDS, ctx=ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table, without importing what it names."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a closed pipe passes click by, which would call it a failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeClosed from error


def _name_variables(command: click.Command, path: str) -> None:
    """Let each option be set by a variable: APOLLO_ASK_MAX_CLIPS is ``apollo ask --max-clips``."""
    for option in command.params:
        # A variable with spaces in it cannot tell where one of several values ends.
        if isinstance(option, click.Option) and not option.multiple:
            own = f"{path}_{max(option.opts, key=len).lstrip('-')}".upper().replace("-", "_")
            shared = {option.envvar} if isinstance(option.envvar, str) else option.envvar or ()
            option.envvar = list(dict.fromkeys([own, *shared]))
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            _name_variables(child, f"{path}_{name}")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Variables set options: APOLLO_ASK_MAX_CLIPS is --max-clips of apollo ask, and "
    "APOLLO_MODEL is --model of all commands that look at videos.\n\n"
    "Exit codes: 0 done, 2 usage, 3 video, 4 does not fit, 5 weights, 6 device, 7 data, "
    "130 interrupted.",
)
@click.version_option(__version__, prog_name="apollo", message="%(prog)s %(version)s")
@click.option(
    "--debug", is_flag=True, envvar="APOLLO_DEBUG", help="Show the whole traceback of an error."
)
@click.pass_obj
def cli(seen: dict[str, bool], debug: bool) -> None:
    """Ask questions of long local videos, on one machine.

    Answers go to stdout, everything else to stderr.
    """
    seen["debug"] = debug
    endpoint = os.environ.get("HF_ENDPOINT", "")
    try:
        # The library that fetches models reads the variable while it is imported.
        _ = urlsplit(endpoint).port
    except ValueError:
        raise UsageError(
            f"HF_ENDPOINT={endpoint} is no web address",
            "allowed are addresses such as https://hub.example.org",
            "set it right, or unset it",
        ) from None


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
            _settle_home()
            code = _run(arguments)
            sys.stdout.flush()
    except (PipeClosed, BrokenPipeError):
        # Python would complain at exit, when it flushes what nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        # What waits to be written is given up: Python would try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _say(f"error: the output cannot be written ({error.strerror})")
        return 1
    return code


def _run(arguments: list[str]) -> int:
    # It may stand behind the command too; what follows -- is a name.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    seen = {"debug": "--debug" in arguments[:end]}
    rest = [text for text in arguments[:end] if text != "--debug"] + arguments[end:]
    try:
        # Of our commands none returns a value, so an integer is the code of an early exit.
        code = cli.main(
            ["--debug"] * seen["debug"] + rest, "apollo", standalone_mode=False, obj=seen
        )
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help())
        return 0
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return INTERRUPTED
    except PipeClosed:
        raise
    except Exception as error:  # noqa: BLE001 - the edge: no user should meet a traceback
        if seen["debug"]:
            import traceback

            traceback.print_exc()
        code, message = _describe(error, arguments)
        more = "" if seen["debug"] else "; run again with --debug for the traceback"
        _say(f"error: {message}{more if message.startswith('unexpected ') else ''}")
        return code


def _describe(error: Exception, arguments: list[str]) -> tuple[int, str]:
    """The exit code of an error, and its one line for the user."""
    if isinstance(error, click.ClickException):
        message = error.format_message()
        return error.exit_code, _usage(error) + _variables(message, arguments)
    if isinstance(error, ApolloError):
        return _exit_code(error), error.message + _variables(error.message, arguments)
    if isinstance(error, OSError):
        is_output = error.errno in _DISK_FULL and not error.filename
        place = f": {error.filename or 'the output'}" if error.filename or is_output else ""
        return 1, f"{error.strerror or error}{place}"
    return 1, f"unexpected {type(error).__name__}: {' '.join(str(error).split())}"


def _usage(error: click.ClickException) -> str:
    """A mistake in the arguments on one line, with the page that tells more."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "apollo"
    reason = " ".join(error.format_message().split()).replace(". Did you", "; did you")
    hint = ""
    if isinstance(error, click.NoSuchOption) and context and context.command.params:
        hint = "; a name that begins with - is written after --"
    return f"{reason.rstrip('.')}; {command} --help shows what is allowed{hint}"


def _variables(message: str, arguments: list[str]) -> str:
    """The variables of the environment that set what a message is about, if any."""
    found = []
    paths = ["APOLLO", *("_".join(["APOLLO", *arguments[:n]]).upper() for n in (1, 2))]
    for path, (name, value) in itertools.product(paths, os.environ.items()):
        flag = "--" + name.removeprefix(f"{path}_").lower().replace("_", "-")
        if name.startswith(f"{path}_") and value and flag not in arguments:
            is_meant = re.search(rf"{flag}(?![\w-])", message) or repr(value) in message
            found += [name] if is_meant and name not in found else []
    return f"; set by the variable {' and '.join(found)}" if found else ""


def _say(text: str) -> None:
    from apollo_cli.commands.output import say

    say(text)


def _exit_code(error: ApolloError) -> int:
    """The code of an error; a full disk has that of any other failure, whatever was written."""
    cause: BaseException | None = error
    while cause is not None:
        is_full = isinstance(cause, OSError) and cause.errno in _DISK_FULL
        # safetensors tells it in words only.
        if is_full or "No space left" in str(cause):
            return 1
        cause = cause.__cause__ or cause.__context__
    return error.exit_code


def _settle_home() -> None:
    """Give a process without a home, as in a container, one among temporary files, and say so."""
    if os.path.expanduser("~") != "~":
        return
    from apollo_cli.weights.files import homeless_folder

    os.environ["HOME"] = str(homeless_folder())
    os.environ.setdefault("USER", "nobody")
    _say(f"note: this user has no home folder, so files are kept in {os.environ['HOME']}")
