"""``apollo chat``: a talk about videos in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.commands.formats import WRITERS, choose_format
from apollo_cli.commands.options import complete_file, flags_of, read_options
from apollo_cli.commands.output import progress, say_note
from apollo_cli.commands.request import introduce, protect_inputs
from apollo_cli.config import (
    GenerationOptions,
    ModelOptions,
    ReadingOptions,
    SamplingOptions,
    parse_moment,
)
from apollo_cli.errors import ApolloError, UsageError

if TYPE_CHECKING:
    from apollo_cli.conversation import Conversation
    from apollo_cli.watcher import Progress

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
@click.option("--continue", "go_on", is_flag=True, help="Continue the last talk.")
@flags_of(ModelOptions, SamplingOptions, ReadingOptions, GenerationOptions)
def chat(files: tuple[str, ...], go_on: bool, **flags: Any) -> None:
    """Talk about a video in the terminal.

    The model watches the video once; each question then costs its own tokens only. Lines that
    start with / are commands; /help lists them. The talk is saved; --continue resumes it.
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


def _lines() -> Iterator[str]:
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
    """Do what a line that starts with / asks for."""
    name, *arguments = line.split()
    rest = line.removeprefix(name).strip()
    match name:
        case "/help":
            click.echo(HELP, err=True)
        case "/video" if arguments:
            # One file may have spaces in its name.
            files = [rest] if Path(rest).expanduser().exists() else arguments
            _look(
                talk, lambda report: talk.watch([str(Path(f).expanduser()) for f in files], report)
            )
        case "/from" if talk.files and len(arguments) in (1, 2):
            start, end = [*map(parse_moment, arguments), None][:2]
            _look(talk, lambda report: talk.look_at(start or 0.0, end, report))
        case "/frames":
            for memory in talk.memories:
                click.echo(f"{memory.path.name}: {memory.plan.describe()}", err=True)
                for number, times in enumerate(memory.times, start=1):
                    seconds = ", ".join(f"{float(t):.2f}" for t in times)
                    click.echo(f"  clip {number}: {seconds} s", err=True)
        case "/blind":
            for text in talk.check_blind().describe():
                say_note(text)
        case "/save" if arguments:
            _save(talk, Path(rest).expanduser().absolute())
        case "/clear":
            talk.turns.clear()
            say_note("the turns are forgotten")
        case "/video" | "/from" | "/save":
            allowed = next(text for text in HELP.splitlines() if text.startswith(name))
            with_video = ", with a video in view" if name == "/from" else ""
            raise UsageError(name, f"write {' '.join(allowed.split())}{with_video}")
        case _:
            raise UsageError(name, "/help lists the commands")


def _look(talk: Conversation, watch: Callable[[Progress], None]) -> None:
    """Watch other files or another window, and say what was seen."""
    with progress() as report:
        watch(report)
    introduce(talk.apollo, talk.memories, say_note)


def _save(talk: Conversation, path: Path) -> None:
    """Write the talk in the format that the ending of the file names."""
    protect_inputs(path, talk.files)
    form, text = choose_format(None, path), None
    if form == "md":
        text = talk.to_markdown()
    elif path.suffix.lower() != ".json":
        # Answers of an earlier talk are known by their files only.
        given = {(answer.question, answer.text): answer.to_dict() for answer in talk.answers}
        text = ""
        for number, turn in enumerate(talk.turns, start=1):
            row = given.get((turn.question, turn.answer)) or {
                "question": turn.question,
                "answer": turn.answer,
                "video": " ".join(getattr(turn, "files", ())),
            }
            notes = [*row.get("notes", ()), *talk.apollo.remarks(turn.question)]
            text += WRITERS[form](row | {"notes": notes}, number)
    talk.save(path, text)
    say_note(f"saved to {path}")
