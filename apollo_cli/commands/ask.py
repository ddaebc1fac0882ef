"""``apollo ask``: questions about videos and images, answered on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.atomic import held
from apollo_cli.commands.batch import answered, list_videos, run_batch, run_on_ray
from apollo_cli.commands.formats import (
    WRITERS,
    answer_text,
    choose_format,
    open_output,
    write_rows,
)
from apollo_cli.commands.options import FILE, complete_file, fit_flag, flags_of, read_options
from apollo_cli.commands.output import once, progress, say_note, silent
from apollo_cli.commands.request import (
    Remark,
    Request,
    answer_all,
    introduce,
    open_sources,
    protect_inputs,
    watch,
)
from apollo_cli.config import (
    GenerationOptions,
    ModelOptions,
    ReadingOptions,
    SamplingOptions,
    check_question,
)
from apollo_cli.errors import UsageError

if TYPE_CHECKING:
    from apollo_cli.engine import Apollo
    from apollo_cli.loaded_model import FoundModel
    from apollo_cli.memory_plan import Settings
    from apollo_cli.planner import Spoken
    from apollo_cli.video.info import VideoInfo
    from apollo_cli.video_memory import VideoMemory


@click.command()
@click.argument("sources", nargs=-1, metavar="FILE... QUESTION", shell_complete=complete_file)
@click.option("-q", "--question", "questions", multiple=True, help="A question; may be repeated.")
@click.option(
    "--questions-file",
    type=click.Path(readable=False, allow_dash=True),
    show_default="none",
    help="Text file with a question on each line.",
)
@click.option("--choice", "choices", multiple=True, help="An option to score; may be repeated.")
@click.option("--blind-check", is_flag=True, help="Ask again without the video: was it needed?")
@click.option(
    "--videos",
    type=click.Path(readable=False),
    show_default="none",
    help="Ask about each video of a folder, or of a list in a text file.",
)
@click.option(
    "--ray",
    type=int,
    metavar="N",
    show_default="one model here",
    help="With --videos: N models on a Ray cluster.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(list(WRITERS)),
    show_default="as the ending of -o says: .jsonl or .json, .csv, .srt, .md; else text",
    help="How answers are written; jsonl is one JSON object a line.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@click.option(
    "-o",
    "--output",
    type=FILE,
    show_default="stdout",
    help="Write to this file. With --videos, an existing .jsonl file is continued.",
)
@flags_of(ModelOptions, SamplingOptions, ReadingOptions, GenerationOptions)
@fit_flag
@click.option("--no-cache", is_flag=True, help="Neither use nor keep what was seen before.")
@click.option("--quiet", is_flag=True, help="No progress and no remarks on stderr.")
def ask(sources: tuple[str, ...], **flags: Any) -> None:
    """Ask one or more questions of a video.

    FILE is any video or image; several are shown to the model together. Without -q, the last
    argument is the question; "-" reads it from stdin. As a FILE, "-" is a video on stdin. With -q
    and no file, text alone is asked.

    The answer goes to stdout, everything else to stderr.
    """
    files, asked = split_arguments(sources, flags)
    request = Request(
        questions=tuple(asked),
        choices=flags["choices"],
        sampling=read_options(SamplingOptions, flags),
        options=read_options(GenerationOptions, flags),
        reading=read_options(ReadingOptions, flags),
        blind=flags["blind_check"],
    )
    output: Path | None = flags["output"]
    form = choose_format(flags["form"] or ("jsonl" if flags["as_json"] else None), output)
    if request.blind and request.choices:
        raise UsageError("--blind-check with --choice", "allowed is one of the two")
    if flags["ray"] is not None and (not flags["videos"] or flags["ray"] < 1):
        raise UsageError(f"--ray {flags['ray']}", "needed are --videos and 1 model or more")
    if flags["videos"] and flags["fit"]:
        raise UsageError("--videos with --fit auto", "allowed is one of the two")
    protect_inputs(output, [*files, flags["questions_file"], flags["videos"], flags["subtitles"]])
    remark = silent if flags["quiet"] else once(say_note)
    videos = list_videos(flags["videos"], output, remark) if flags["videos"] else []
    protect_inputs(output, videos)
    if videos and output and form != "jsonl" and output.is_file() and output.stat().st_size:
        raise UsageError(
            f"-o {output} is there already",
            f"only a .jsonl file is continued by a run with --videos, no {form} file",
            "choose another name",
        )
    write, is_streamed = WRITERS[form], form == "text" and not output and not videos
    if is_streamed:
        write = _write_nothing
    elif form == "text" and not videos and len(request.questions) == 1:
        write = _write_answer
    with ExitStack() as stack:
        if output:
            stack.enter_context(held(output, remark))
        if videos:
            rows = _answer_videos(videos, request, remark, flags, stack)
        else:
            apollo, memories = _watch_files(files, request, remark, flags, stack)
            rows = answer_all(apollo, memories, request, remark, is_streamed)
        write_rows(rows, write, stack.enter_context(open_output(output, append=bool(videos))))


def _watch_files(
    files: list[str],
    request: Request,
    remark: Remark,
    flags: dict[str, Any],
    stack: ExitStack,
) -> tuple[Apollo, list[VideoMemory]]:
    """Load the model and watch the files of one request; what is wrong with one is told first."""
    from apollo_cli.video.guard import GuardedReader

    model, reader = read_options(ModelOptions, flags), stack.enter_context(GuardedReader())
    with progress(flags["quiet"], at_once=True) as report:
        opened = open_sources(files, request.reading, reader)
        from apollo_cli.engine import load_found
        from apollo_cli.loaded_model import find_model
        from apollo_cli.planner import read_spoken
        from apollo_cli.video.info import VideoInfo

        found, settings, spoken = find_model(**vars(model)), None, None
        if flags["fit"]:
            infos = [source for source in opened if isinstance(source, VideoInfo)]
            spoken = [read_spoken(info, request.reading) for info in infos]
            settings = _fit(found, request, infos, spoken, remark)
        apollo = load_found(
            found,
            settings=settings,
            use_cache=not flags["no_cache"],
            reader=reader,
            on_progress=report,
        )
        memories = watch(apollo, opened, request, report, spoken)
    introduce(apollo, memories, remark)
    return apollo, memories


def _answer_videos(
    videos: list[str],
    request: Request,
    remark: Remark,
    flags: dict[str, Any],
    stack: ExitStack,
) -> Iterator[dict[str, Any]]:
    """The rows of a run with --videos, without those that its file holds already."""
    model, cache, apollo = read_options(ModelOptions, flags), not flags["no_cache"], None
    if flags["ray"]:
        from apollo_cli.weights.registry import resolve
        from apollo_cli.weights.store import AUTO

        # The model is loaded by the workers only: where they choose it, its name is not compared.
        facts = {} if model.model == AUTO else {"name": resolve(model.model).name}
    else:
        from apollo_cli.engine import load
        from apollo_cli.video.guard import GuardedReader

        reader = stack.enter_context(GuardedReader())
        with progress(flags["quiet"], at_once=True) as report:
            apollo = load(**vars(model), use_cache=cache, reader=reader, on_progress=report)
        introduce(apollo, None, remark)
        facts = apollo.describe()
    done = set[tuple[str, str]]()
    if flags["output"] is not None:
        done = answered(flags["output"], request, facts, remark)
    if apollo is None:
        return run_on_ray(videos, request, done, model=model, use_cache=cache, workers=flags["ray"])
    return run_batch(apollo, videos, request, done, remark)


def _write_answer(row: dict[str, Any], number: int) -> str:
    return answer_text(row) + "\n"


def _write_nothing(row: dict[str, Any], number: int) -> str:
    """The answer is on stdout already, piece by piece."""
    return ""


def _fit(
    found: FoundModel,
    request: Request,
    infos: list[VideoInfo],
    spoken: list[Spoken],
    remark: Remark,
) -> Settings:
    """Choose settings with which the request fits the free memory; say what was reduced."""
    from apollo_cli.memory_plan import fit_videos
    from apollo_cli.weights.checkpoint import stored_kind

    if not infos:
        raise UsageError("--fit auto without a video", "it decides how much of a video is seen")
    fitted = fit_videos(
        found.planner,
        found.hardware,
        infos,
        request.sampling,
        spoken=spoken,
        question_bytes=max(len(question.encode()) for question in request.questions),
        answer_tokens=request.options.max_new_tokens,
        quant=found.quant,
        stored=stored_kind(found.located.checkpoint),
    )
    remark(f"it takes about {fitted.estimate.peak / 1e9:.1f} GB")
    for sentence in fitted.given_up:
        remark(sentence)
    return fitted.settings


def split_arguments(sources: tuple[str, ...], flags: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Tell files from questions.

    Raises:
        UsageError: there is no question, or an empty one.
    """
    files, asked = list(sources), list(flags["questions"])
    if flags["questions_file"] is not None:
        asked += _read_questions(flags["questions_file"])
    if not asked and flags["videos"] and len(files) == 1:
        asked = [files.pop()]
    if flags["videos"] and files:
        raise UsageError(f"--videos and {files[0]!r}", "allowed is one of the two")
    if not asked:
        if len(files) < 2:
            got = f"only {files[0]!r}" if files else "nothing"
            raise UsageError(
                f"{got} was given",
                "needed are a file and a question",
                'write: apollo ask video.mp4 "What happens?" (or -q "..." for text alone)',
            )
        asked = [files.pop()]
    if "-" in asked and sys.stdin is None:
        raise UsageError("the question should come from stdin, which is closed")
    asked = [sys.stdin.read() if question == "-" else question for question in asked]
    return files, [check_question(question) for question in asked]


def _read_questions(name: str) -> list[str]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--questions-file {name} cannot be read ({error})") from error
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise UsageError(f"--questions-file {name} holds no question")
    return found
