"""``apollo ask``: questions about videos and images, answered on stdout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.atomic import held, write_whole
from apollo_cli.commands.asking import (
    Remark,
    Request,
    answer_all,
    introduce,
    open_sources,
    protect_inputs,
    watch,
)
from apollo_cli.commands.batch import (
    answered,
    list_videos,
    open_rows,
    run_batch,
    write_rows,
)
from apollo_cli.commands.formats import FORMATS, Writer, answer_text, choose_format, writer_for
from apollo_cli.commands.options import FILE, complete_file, fit_flag, flags_of, read_options
from apollo_cli.commands.output import once, progress, say_note, silent
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
    from apollo_cli.fit import Settings
    from apollo_cli.video.guard import GuardedReader
    from apollo_cli.video.info import VideoInfo


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
    type=click.Choice(FORMATS),
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
    output = flags["output"]
    form = choose_format(flags["form"] or ("jsonl" if flags["as_json"] else None), output)
    request = Request(
        questions=tuple(asked),
        choices=flags["choices"],
        sampling=read_options(SamplingOptions, flags),
        options=read_options(GenerationOptions, flags),
        reading=read_options(ReadingOptions, flags),
        blind=flags["blind_check"],
    )
    if request.blind and request.choices:
        raise UsageError("--blind-check with --choice", "allowed is one of the two")
    protect_inputs(output, [*files, flags["questions_file"], flags["videos"], flags["subtitles"]])
    remark = silent if flags["quiet"] else once(say_note)
    if flags["ray"] is not None and (not flags["videos"] or flags["ray"] < 1):
        raise UsageError(f"--ray {flags['ray']}", "needed are --videos and 1 model or more")
    if flags["videos"] and flags["fit"]:
        raise UsageError("--videos with --fit auto", "allowed is one of the two")
    videos = list_videos(flags["videos"], output, remark) if flags["videos"] else []
    protect_inputs(output, videos)
    with held(output, remark) if output else contextlib.nullcontext():
        if videos:
            _ask_many(videos, request, form, remark, flags)
        else:
            _ask_once(files, request, form, remark, flags)


def _ask_once(
    files: list[str], request: Request, form: str, remark: Remark, flags: dict[str, Any]
) -> None:
    from apollo_cli.video.guard import GuardedReader

    output: Path | None = flags["output"]
    with progress(flags["quiet"], at_once=True) as report, GuardedReader() as reader:
        opened = open_sources(files, request.reading, reader)
        fitted = _fit(flags, request, opened, remark)
        apollo = _load(flags, reader, report, fitted)
        memories = watch(apollo, opened, request, report)
    introduce(apollo, memories, remark)
    streamed = form == "text" and output is None
    rows = answer_all(apollo, memories, request, remark, stream_text=streamed)
    write = writer_for(form)
    if form == "text" and len(request.questions) == 1:
        write = _write_answer
    if streamed:
        for _ in rows:
            pass
    elif output is None:
        write_rows(rows, write, sys.stdout)
    else:
        _put(rows, write, output)


def _write_answer(row: dict[str, Any], number: int) -> str:
    return answer_text(row) + "\n"


def _load(
    flags: dict[str, Any], reader: GuardedReader, report: Any, settings: Settings | None = None
) -> Apollo:
    from apollo_cli.engine import load

    return load(
        **vars(read_options(ModelOptions, flags)),
        settings=settings,
        use_cache=not flags["no_cache"],
        reader=reader,
        on_progress=report,
    )


def _fit(
    flags: dict[str, Any], request: Request, opened: list[VideoInfo | str], remark: Remark
) -> Settings | None:
    """What of the request fits, where that was asked for; what is given up is said."""
    if flags["fit"] is None:
        return None
    from apollo_cli.fitting import Wish, fit_wish
    from apollo_cli.spoken import Spoken
    from apollo_cli.video.info import VideoInfo
    from apollo_cli.video.subtitles import find_subtitles

    infos = [source for source in opened if isinstance(source, VideoInfo)]
    if not infos:
        raise UsageError("--fit auto without a video", "it decides how much of a video is seen")
    wish = Wish(
        model=flags["model"],
        device=flags["device"],
        dtype=flags["dtype"],
        quant=flags["quant"],
        sampling=request.sampling,
        question_bytes=max(len(question.encode()) for question in request.questions),
        answer_tokens=request.options.max_new_tokens,
        adapter=flags["adapter"],
    )
    reading = request.reading
    spoken = [
        Spoken(find_subtitles(info, reading.subtitles), reading.subtitle_style) for info in infos
    ]
    fitted = fit_wish(wish, infos, spoken)
    remark(f"it takes about {fitted.estimate.peak / 1e9:.1f} GB")
    for sentence in fitted.given_up:
        remark(sentence)
    return fitted.settings


def _ask_many(
    videos: list[str], request: Request, form: str, remark: Remark, flags: dict[str, Any]
) -> None:
    output: Path | None = flags["output"]
    if output is not None and form != "jsonl" and output.is_file() and output.stat().st_size:
        raise UsageError(
            f"-o {output} is there already",
            f"a run with --videos goes on in a .jsonl file, not in one of the format {form}",
            "choose another name",
        )
    done = set[tuple[str, str]]()
    with contextlib.ExitStack() as stack:
        if flags["ray"]:
            from apollo_cli.commands.batch_ray import run_on_ray

            if output is not None and form == "jsonl":
                done = answered(output, request, _named(flags["model"]), remark)
            cache, workers = not flags["no_cache"], flags["ray"]
            model = vars(read_options(ModelOptions, flags))
            rows = run_on_ray(videos, request, done, model=model, use_cache=cache, workers=workers)
        else:
            from apollo_cli.video.guard import GuardedReader

            reader = stack.enter_context(GuardedReader())
            with progress(flags["quiet"], at_once=True) as report:
                apollo = _load(flags, reader, report)
            introduce(apollo, None, remark)
            if output is not None and form == "jsonl":
                done = answered(output, request, apollo.describe(), remark)
            rows = run_batch(apollo, videos, request, done, remark)
        file = sys.stdout if output is None else stack.enter_context(open_rows(output))
        write_rows(rows, writer_for(form), file)


def _named(model: str) -> dict[str, Any]:
    """What answers must tell of a model that is not loaded here; nothing where it is chosen."""
    from apollo_cli.weights.locate import AUTO
    from apollo_cli.weights.registry import resolve

    return {} if model == AUTO else {"name": resolve(model).name}


def _put(rows: Iterator[dict[str, Any]], write: Writer, output: Path) -> None:
    """Write a file in one step, with what was answered by then also where a run is stopped."""
    texts: list[str] = []
    try:
        for number, row in enumerate(rows, start=1):
            texts.append(write(row, number))
    finally:
        try:
            if texts:
                write_whole(output, "".join(texts))
        except OSError as error:
            raise UsageError(f"-o {output}: {error.strerror}") from error


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
    asked = [_read_stdin() if question == "-" else question for question in asked]
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


def _read_stdin() -> str:
    if sys.stdin is None:
        raise UsageError("the question should come from stdin, which is closed")
    return sys.stdin.read()
