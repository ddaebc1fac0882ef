"""The questions of ``apollo ask``, and how the files of one request are watched and answered."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.atomic import scratch_folder
from apollo_cli.commands.formats import answer_text
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions
from apollo_cli.errors import UsageError

if TYPE_CHECKING:
    from apollo_cli.engine import Apollo
    from apollo_cli.planner import Spoken
    from apollo_cli.video.guard import GuardedReader
    from apollo_cli.video.info import VideoInfo
    from apollo_cli.video_memory import VideoMemory

Remark = Callable[[str], None]
_MOST_STDIN_BYTES = 20_000_000_000


@dataclass(frozen=True)
class Request:
    """What is asked of each set of files.

    Attributes:
        questions: at least one. choices: options that are scored, or none.
        sampling, reading, options: as the flags say.
        blind: whether each answer is checked against one without the video.
    """

    questions: tuple[str, ...]
    choices: tuple[str, ...]
    sampling: SamplingOptions
    options: GenerationOptions
    reading: ReadingOptions
    blind: bool


def open_sources(
    files: list[str], reading: ReadingOptions, reader: GuardedReader
) -> list[VideoInfo | str]:
    """Look at files before a model is loaded: what is wrong with them is told at once.

    Files of ``apollo remember`` stay names, since only their model can say whether they fit.
    The name ``-`` is a video on stdin.
    """
    from apollo_cli.memory_record import SUFFIX, read_record

    seen: list[VideoInfo | str] = []
    for name in files:
        file = _save_stdin() if name == "-" else name
        if Path(file).suffix == SUFFIX:
            read_record(Path(file))
            seen.append(file)
        else:
            seen.append(reader.probe(file, reading))
    return seen


def _save_stdin() -> str:
    """Keep what comes on stdin in a temporary file, since a decoder looks back and forth.

    Raises:
        UsageError: stdin is closed, a terminal, or holds more than the limit.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("- stands for a video on stdin", next_step="pipe one, or name a file")
    from apollo_cli.video.container import STDIN_FOLDER

    kept = contextlib.ExitStack()
    atexit.register(kept.close)
    target, size = kept.enter_context(scratch_folder(STDIN_FOLDER)) / "standard input", 0
    with target.open("wb") as file:
        while block := sys.stdin.buffer.read(1 << 20):
            size += len(block)
            if size > _MOST_STDIN_BYTES:
                raise UsageError(
                    f"the video on stdin has more than {_MOST_STDIN_BYTES / 1e9:.0f} GB",
                    next_step="save it to a file first",
                )
            file.write(block)
    return str(target)


def protect_inputs(output: Path | None, files: Iterable[str | None]) -> None:
    """Never write over a file that is read.

    Raises:
        UsageError: the output is one of the files.
    """
    if (
        output is not None
        and output.exists()
        and any(file and Path(file).exists() and output.samefile(file) for file in files)
    ):
        raise UsageError(
            f"{output} is a file that is asked about or read", next_step="choose another"
        )


def watch(
    apollo: Apollo,
    sources: list[VideoInfo | str],
    request: Request,
    report: Callable[[str, int, int], None],
    spoken: list[Spoken] | None = None,
) -> list[VideoMemory]:
    """Watch the files of one request, with room left for its longest question."""
    longest = max(len(apollo.prompts.suffix_ids(question)) for question in request.questions)
    return apollo.watch_all(
        sources,
        request.sampling,
        reserve_tokens=longest + request.options.max_new_tokens,
        spare_tokens=apollo.planner.spare_for(longest),
        reading=request.reading,
        spoken=spoken,
        on_progress=report,
    )


def answer_all(
    apollo: Apollo,
    memories: list[VideoMemory],
    request: Request,
    remark: Remark,
    stream_text: bool,
) -> Iterator[dict[str, Any]]:
    """Answer each question; with ``stream_text`` the text is written to stdout as it comes.

    Yields:
        The record of each answer.
    """
    for question in request.questions:
        if stream_text and len(request.questions) > 1:
            click.echo(f"Q: {question}\nA: ", nl=False)
        remarks: list[str] = []
        if request.choices:
            from apollo_cli.scoring import choose

            row = choose(apollo, memories, question, request.choices).to_dict()
            row |= {"model": apollo.describe(), "videos": [m.describe() for m in memories]}
            if stream_text:
                click.echo(answer_text(row))
        else:
            stream = apollo.stream(memories, question, request.options)
            for piece in stream:
                if stream_text:
                    click.echo(piece, nl=False)
                    sys.stdout.flush()
            if stream_text:
                click.echo()
            answer = stream.finish()
            row = answer.to_dict()
            remarks += answer.remarks
            if request.blind:
                from apollo_cli.scoring import blind_check

                check = blind_check(apollo, memories, answer, request.options)
                row["blind_check"] = check.to_dict()
                remarks += check.describe()
        warnings = apollo.remarks(question)
        for text in [*remarks, *warnings]:
            remark(text)
        yield row | {"notes": [*row.get("notes", ()), *warnings]}


def introduce(apollo: Apollo, memories: list[VideoMemory] | None, remark: Remark) -> None:
    """Say which model answers and what it has seen; None where each video comes later."""
    if apollo.located.chosen and apollo.located.is_toy:
        remark(
            "no downloaded model fits, so the embedded apollo-nano answers; "
            "for a real one: apollo models list"
        )
    for note in apollo.network.config.notes:
        remark(f"{apollo.located.name}: {note}")
    if memories == []:
        remark("no video was given: the answer rests on the question alone")
    for memory in memories or ():
        if memory.kind == "video":
            again = "remembered, " if memory.remembered else ""
            remark(f"{memory.path.name}: {again}{memory.plan.describe()}")
        for note in memory.warnings:
            remark(f"{memory.path.name}: {note}")
