"""``apollo ask``: questions about videos and images, answered on stdout."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.config import GenerationOptions, SamplingOptions
from apollo_cli.errors import UsageError

if TYPE_CHECKING:
    from apollo_cli.answer import Answer, AnswerStream
    from apollo_cli.engine import Apollo, Progress
    from apollo_cli.video_memory import VideoMemory

STAGES = {"load": "loading", "decode": "decoding", "encode": "encoding"}


class Moment(click.ParamType):
    """A time in a video: seconds (83.2) or minutes and hours (12:30, 1:02:03.5)."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Turn text into seconds."""
        if isinstance(value, int | float):
            return float(value)
        if not re.fullmatch(r"(\d+:){0,2}\d+(\.\d*)?", value):
            self.fail(f"{value!r} is not a time; write 83.2, 12:30 or 1:02:03", param, ctx)
        seconds = 0.0
        for part in value.split(":"):
            seconds = seconds * 60 + float(part)
        return seconds


@click.command()
@click.argument("sources", nargs=-1, metavar="FILE... QUESTION")
@click.option("-q", "--question", "questions", multiple=True, help="A question; may be repeated.")
@click.option("--model", default="auto", help="Known name, folder or owner/repository[@revision].")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each question.")
@click.option("--from", "start", type=Moment(), default=0.0, help="Start of the part to look at.")
@click.option("--to", "end", type=Moment(), help="End of the part to look at.")
@click.option("--fps", type=float, help="Frames a second inside a clip.")
@click.option(
    "--sampling",
    type=click.Choice(["fps", "uniform"]),
    default="fps",
    help="Constant rate in clips, or frames spread evenly.",
)
@click.option("--frames", type=int, help="Number of frames for --sampling uniform.")
@click.option("--max-clips", type=int, help="Look at no more clips than this.")
@click.option(
    "--short",
    type=click.Choice(["repeat", "stretch", "error"]),
    default="repeat",
    help="What a video shorter than one clip does with its frames.",
)
@click.option("--max-new-tokens", type=int, default=256, help="Longest answer, in tokens.")
@click.option("--temperature", type=float, default=0.0, help="0 is greedy and repeatable.")
@click.option("--top-p", type=float, default=1.0, help="Share of probability to sample from.")
@click.option("--seed", type=int, default=0, help="Seed of the sampling.")
@click.option("--repetition-penalty", type=float, help="Default: the checkpoint's own.")
@click.option("--template", help="Chat template: qwen_2 or qwen_1_5. Default: the checkpoint's.")
@click.option("--device", help="cpu, cuda, cuda:1 or mps. Default: the best there is.")
@click.option("--dtype", help="bfloat16, float16 or float32. Default: what the device does best.")
@click.option("--quiet", is_flag=True, help="No progress and no remarks on stderr.")
def ask(
    sources: tuple[str, ...],
    questions: tuple[str, ...],
    *,
    model: str,
    as_json: bool,
    quiet: bool,
    template: str | None,
    device: str | None,
    dtype: str | None,
    **flags: Any,
) -> None:
    """Ask one or more questions of a video.

    FILE is any video or image; several are shown to the model together. Without -q, the last
    argument is the question; "-" reads it from stdin. With -q and no file, text alone is asked.

    The answer goes to stdout, everything else to stderr.
    """
    files, asked = split_arguments(sources, questions)
    sampling, options = read_options(flags)
    from apollo_cli.video.probe import probe

    # Files are looked at before the model is loaded: what is wrong with them is told at once.
    infos = [probe(file) for file in files]
    from apollo_cli.engine import load

    with progress(quiet) as report:
        apollo = load(model, device=device, dtype=dtype, template=template, on_progress=report)
        longest = max(len(apollo.prompts.suffix_ids(question)) for question in asked)
        reserve = longest + options.max_new_tokens
        memories = apollo.watch_all(infos, sampling, reserve_tokens=reserve, on_progress=report)
    remark = _silent if quiet else _remark
    _introduce(apollo, memories, remark)
    for question in asked:
        stream = apollo.stream(memories, question, options)
        label = question if len(asked) > 1 else None
        answer = _write_json(stream) if as_json else _write_text(stream, label)
        for note in (*answer.notes, *apollo.remarks(question)):
            remark(note)
        if answer.stop == "length":
            remark(f"the answer was cut at {options.max_new_tokens} tokens (--max-new-tokens)")


def read_options(flags: dict[str, Any]) -> tuple[SamplingOptions, GenerationOptions]:
    """Put the flags into their places.

    Raises:
        UsageError: a value is out of its range.
    """
    sampling = SamplingOptions(
        mode=flags["sampling"],
        fps=flags["fps"],
        frames=flags["frames"],
        max_clips=flags["max_clips"],
        start_seconds=flags["start"],
        end_seconds=flags["end"],
        short=flags["short"],
    )
    fields = ("max_new_tokens", "temperature", "top_p", "seed", "repetition_penalty")
    return sampling, GenerationOptions(**{field: flags[field] for field in fields})


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


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A bar for each stage on stderr, where that is a terminal."""
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
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, Any] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(STAGES[stage], total=total)
        bars.update(tasks[stage], completed=done, total=total)

    with bars:
        yield report


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


def _introduce(apollo: Apollo, memories: list[VideoMemory], remark: Any) -> None:
    """Say which model answers and what it has seen."""
    if apollo.located.chosen and apollo.located.is_toy:
        remark(
            "no downloaded model fits, so the embedded apollo-nano answers; "
            "for a real one: apollo models list"
        )
    for memory in memories:
        if memory.info.kind == "video":
            remark(f"{memory.info.path.name}: {memory.plan.describe()}")
        for warning in (*memory.info.warnings, *memory.notes):
            remark(f"{memory.info.path.name}: {warning}")


def _remark(text: str) -> None:
    click.echo(f"note: {' '.join(text.split())}", err=True)


def _silent(text: str) -> None:
    """Say nothing."""
