"""``apollo ask``: questions about videos and images, answered on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.commands.options import (
    generation_flags,
    model_flags,
    read_generation,
    read_model,
    read_sampling,
    sampling_flags,
)
from apollo_cli.commands.output import progress, say_note, silent
from apollo_cli.errors import UsageError

if TYPE_CHECKING:
    from apollo_cli.answer import Answer, AnswerStream
    from apollo_cli.engine import Apollo
    from apollo_cli.video.probe import VideoInfo
    from apollo_cli.video_memory import VideoMemory


@click.command()
@click.argument("sources", nargs=-1, metavar="FILE... QUESTION")
@click.option("-q", "--question", "questions", multiple=True, help="A question; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each question.")
@model_flags
@sampling_flags
@generation_flags
@click.option("--quiet", is_flag=True, help="No progress and no remarks on stderr.")
def ask(
    sources: tuple[str, ...],
    questions: tuple[str, ...],
    *,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Ask one or more questions of a video.

    FILE is any video or image; several are shown to the model together. Without -q, the last
    argument is the question; "-" reads it from stdin. With -q and no file, text alone is asked.

    The answer goes to stdout, everything else to stderr.
    """
    files, asked = split_arguments(sources, questions)
    sampling, options = read_sampling(flags), read_generation(flags)
    sources_seen = open_sources(files)
    from apollo_cli.engine import load

    with progress(quiet) as report:
        apollo = load(**read_model(flags), on_progress=report)
        longest = max(len(apollo.prompts.suffix_ids(question)) for question in asked)
        reserve = longest + options.max_new_tokens
        memories = apollo.watch_all(
            sources_seen,
            sampling,
            reserve_tokens=reserve,
            strict=flags["strict"],
            on_progress=report,
        )
    remark = silent if quiet else say_note
    introduce(apollo, memories, remark)
    for question in asked:
        stream = apollo.stream(memories, question, options)
        label = question if len(asked) > 1 else None
        answer = _write_json(stream) if as_json else _write_text(stream, label)
        for note in (*answer.notes, *apollo.remarks(question)):
            remark(note)
        if answer.stop == "length":
            remark(f"the answer was cut at {options.max_new_tokens} tokens (--max-new-tokens)")


def open_sources(files: list[str]) -> list[VideoInfo | str]:
    """Look at files before a model is loaded: what is wrong with them is told at once.

    Files of ``apollo remember`` stay names, since only their model can say whether they fit.
    """
    from apollo_cli.memory_file import SUFFIX, read_record
    from apollo_cli.video.probe import probe

    seen: list[VideoInfo | str] = []
    for file in files:
        if Path(file).suffix == SUFFIX:
            read_record(Path(file))
            seen.append(file)
        else:
            seen.append(probe(file))
    return seen


def split_arguments(
    sources: tuple[str, ...], questions: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Tell files from questions.

    Raises:
        UsageError: there is no question, or an empty one.
    """
    files, asked = list(sources), list(questions)
    if not asked:
        if len(files) < 2:
            got = f"only {files[0]!r}" if files else "nothing"
            raise UsageError(
                f"{got} was given",
                "needed are a file and a question",
                'write: apollo ask video.mp4 "What happens?" (or -q "..." for text alone)',
            )
        asked = [files.pop()]
    asked = [sys.stdin.read() if question == "-" else question for question in asked]
    if not all(question.strip() for question in asked):
        raise UsageError("the question is empty", next_step="ask something")
    return files, [question.strip() for question in asked]


def _write_text(stream: AnswerStream, question: str | None) -> Answer:
    if question is not None:
        click.echo(f"Q: {question}\nA: ", nl=False)
    for piece in stream:
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
    return stream.finish()


def _write_json(stream: AnswerStream) -> Answer:
    answer = stream.finish()
    click.echo(json.dumps(answer.to_dict(), ensure_ascii=False))
    return answer


def introduce(apollo: Apollo, memories: list[VideoMemory], remark: Any) -> None:
    """Say which model answers and what it has seen."""
    if apollo.located.chosen and apollo.located.is_toy:
        remark(
            "no downloaded model fits, so the embedded apollo-nano answers; "
            "for a real one: apollo models list"
        )
    for memory in memories:
        if memory.kind == "video":
            again = "remembered, " if memory.remembered else ""
            remark(f"{memory.path.name}: {again}{memory.plan.describe()}")
        for note in memory.notes:
            remark(f"{memory.path.name}: {note}")
