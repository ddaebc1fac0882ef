"""``apollo chat``: a talk about videos in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.commands.formats import WRITERS, choose_format
from apollo_cli.commands.options import Moment, complete_file, flags_of, read_options
from apollo_cli.commands.output import progress, say_note
from apollo_cli.commands.request import introduce, protect_inputs
from apollo_cli.config import GenerationOptions, ModelOptions, ReadingOptions, SamplingOptions
from apollo_cli.errors import ApolloError, UsageError

if TYPE_CHECKING:
    from apollo_cli.conversation import Conversation

HELP = """\
/video FILE...     look at other files; the talk goes on
/from TIME [TIME]  look at another part, such as /from 12:30 15:00
/frames            list the clips that the model sees
/blind             ask the last question again without the video
/save FILE         write the talk; the ending says how: .md, .json, .csv, .srt, else text
/clear             forget the turns, keep the video
/exit              leave (as Ctrl-D)"""


@click.command()
@click.argument("files", nargs=-1, metavar="FILE...", shell_complete=complete_file)
@click.option("--continue", "go_on", is_flag=True, help="Go on with the last talk.")
@flags_of(ModelOptions, SamplingOptions, ReadingOptions, GenerationOptions)
def chat(files: tuple[str, ...], go_on: bool, **flags: Any) -> None:
    """Talk about a video in the terminal.

    The video is watched once; every question is answered at the cost of its own tokens. Lines
    that start with / are commands; /help lists them. The talk is kept: --continue goes on.
    """
    if go_on and files:
        raise UsageError(f"--continue and {files[0]!r}", "allowed is one of the two")
    model = read_options(ModelOptions, flags)
    sampling, reading = read_options(SamplingOptions, flags), read_options(ReadingOptions, flags)
    options = read_options(GenerationOptions, flags)
    with progress(at_once=True) as report:
        from apollo_cli.conversation import Conversation, last_talk
        from apollo_cli.engine import load

        apollo = load(**vars(model), on_progress=report)
        talk = Conversation(apollo, options, sampling, reading)
        if go_on:
            talk.restore(last_talk(), report)
        elif files:
            talk.watch(list(files), report)
    introduce(talk.apollo, talk.memories, say_note)
    for turn in talk.turns:
        click.echo(f"> {turn.question}\n{turn.answer}", err=True)
    kept = talk.to_dict()
    for line in _lines():
        if line in ("/exit", "/quit"):
            break
        try:
            _command(talk, line) if line.startswith("/") else _question(talk, line)
            # A talk in which nothing was said does not take the place of the last one.
            if (now := talk.to_dict()) != kept:
                talk.save(last_talk())
                kept = now
        except ApolloError as error:
            click.echo(f"error: {error.message}", err=True)
        except KeyboardInterrupt:
            click.echo(err=True)
            say_note("stopped; the talk is as it was before")


def _lines() -> Any:
    """Lines that are typed, or piped; Ctrl-C drops a line, Ctrl-D ends."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # its import gives input() history and editing
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo("\n(/exit or Ctrl-D leaves)", err=True)
            continue
        if line == "" and not sys.stdin.isatty():
            return
        if line.strip():
            yield line.strip()


def _question(talk: Conversation, question: str) -> None:
    try:
        for piece in talk.ask(question):
            click.echo(piece, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        click.echo(err=True)
        say_note("stopped; this turn is not kept")
        return
    click.echo()
    for note in (*talk.answers[-1].remarks, *talk.apollo.remarks(question)):
        say_note(note)


def _command(talk: Conversation, line: str) -> None:
    name, *arguments = line.split()
    commands: dict[str, Callable[[Conversation, list[str]], None]] = {
        "/help": lambda talk, arguments: click.echo(HELP, err=True),
        "/video": _video,
        "/from": _window,
        "/frames": _frames,
        "/blind": _blind,
        "/save": _save,
        "/clear": _clear,
    }
    if name not in commands:
        raise UsageError(f"{name}", f"known are {', '.join(commands)} and /exit")
    commands[name](talk, arguments)


def _video(talk: Conversation, arguments: list[str]) -> None:
    if not arguments:
        raise UsageError("/video names no file")
    # One file may have spaces in its name.
    whole = " ".join(arguments)
    files = [whole] if Path(whole).expanduser().exists() else arguments
    with progress() as report:
        talk.watch([str(Path(file).expanduser()) for file in files], report)
    introduce(talk.apollo, talk.memories, say_note)


def _window(talk: Conversation, arguments: list[str]) -> None:
    if not talk.files or not 1 <= len(arguments) <= 2:
        raise UsageError("/from", "write /from 12:30 or /from 12:30 15:00, with a video in view")
    try:
        start, *end = (Moment().convert(argument, None, None) for argument in arguments)
    except click.UsageError as error:
        raise UsageError(error.message) from error
    with progress() as report:
        talk.look_at(start, end[0] if end else None, report)
    introduce(talk.apollo, talk.memories, say_note)


def _frames(talk: Conversation, arguments: list[str]) -> None:
    for memory in talk.memories:
        click.echo(f"{memory.path.name}: {memory.plan.describe()}", err=True)
        for number, times in enumerate(memory.times, start=1):
            seconds = ", ".join(f"{float(t):.2f}" for t in times)
            click.echo(f"  clip {number}: {seconds} s", err=True)


def _blind(talk: Conversation, arguments: list[str]) -> None:
    for text in talk.check_blind().describe():
        say_note(text)


def _save(talk: Conversation, arguments: list[str]) -> None:
    if not arguments:
        raise UsageError("/save names no file", "write /save talk.md or /save talk.json")
    path = Path(" ".join(arguments)).expanduser().absolute()
    protect_inputs(path, talk.files)
    form, text = choose_format(None, path), None
    if form == "md":
        text = talk.to_markdown()
    elif path.suffix.lower() != ".json":
        write = WRITERS[form]
        text = "".join(write(row, number) for number, row in enumerate(_rows(talk), start=1))
    talk.save(path, text)
    say_note(f"saved to {path}")


def _rows(talk: Conversation) -> Iterator[dict[str, Any]]:
    """The answers as rows of a file; those of an earlier talk name their files only."""
    given = {(answer.question, answer.text): answer.to_dict() for answer in talk.answers}
    for turn in talk.turns:
        row = given.get((turn.question, turn.answer)) or {
            "question": turn.question,
            "answer": turn.answer,
            "video": " ".join(getattr(turn, "files", ())),
        }
        yield row | {"notes": [*row.get("notes", ()), *talk.apollo.remarks(turn.question)]}


def _clear(talk: Conversation, arguments: list[str]) -> None:
    talk.turns.clear()
    say_note("the turns are forgotten")
