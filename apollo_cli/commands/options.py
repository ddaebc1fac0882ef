"""Flags that several commands share; each maps onto one field of ``apollo_cli.config``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.shell_completion import CompletionItem

from apollo_cli.config import (
    Decoder,
    GenerationOptions,
    ReadingOptions,
    SamplingMode,
    SamplingOptions,
    ShortPolicy,
    SubtitleStyle,
    parse_moment,
)
from apollo_cli.errors import ApolloError, UsageError

Command = TypeVar("Command", bound=Callable[..., Any])
MOMENTS = "seconds (83.2), 12:30 or 1:02:03"
FILE = click.Path(readable=False, path_type=Path)
_SAMPLING, _READING, _GENERATION = SamplingOptions(), ReadingOptions(), GenerationOptions()


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


def _flags(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


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


model_flag = click.option(
    "--model",
    default="auto",
    envvar="APOLLO_MODEL",
    shell_complete=complete_model,
    help="Known name, folder, owner/repository[@rev], or auto: the best fetched one that fits.",
)

model_flags = _flags(
    model_flag,
    click.option("--device", show_default="the best there is", help="cpu, cuda, cuda:1 or mps."),
    click.option("--dtype", show_default="the device's best", help="bfloat16, float16 or float32."),
    click.option(
        "--quant",
        type=click.Choice(["4bit", "8bit"]),
        show_default="as the model is stored",
        help="Fewer bits for the language model's weights.",
    ),
    click.option("--template", show_default="the model's own", help="qwen_2 or qwen_1_5."),
    click.option(
        "--adapter",
        type=click.Path(readable=False),
        show_default="none",
        help="Result folder of apollo finetune run, put on its model.",
    ),
)

sampling_flags = _flags(
    click.option(
        "--from",
        "start",
        type=Moment(),
        default=0.0,
        show_default="the start",
        help=f"Start of the part to see: {MOMENTS}.",
    ),
    click.option(
        "--to",
        "end",
        type=Moment(),
        show_default="the end",
        help=f"End of the part to see: {MOMENTS}.",
    ),
    click.option(
        "--fps", type=float, show_default="the model's own", help="Frames a second inside a clip."
    ),
    click.option(
        "--sampling",
        type=click.Choice(get_args(SamplingMode)),
        default=_SAMPLING.mode,
        help="Constant rate in clips, or frames spread evenly.",
    ),
    click.option(
        "--frames",
        type=int,
        show_default="as many as the model holds",
        help="Number of frames for --sampling uniform.",
    ),
    click.option(
        "--max-clips",
        type=int,
        show_default="as many as the model holds",
        help="Look at no more clips than this.",
    ),
    click.option(
        "--short",
        type=click.Choice(get_args(ShortPolicy)),
        default=_SAMPLING.short,
        help="What a video shorter than one clip does with its frames.",
    ),
)

reading_flags = _flags(
    click.option(
        "--stream",
        type=int,
        show_default="the main one",
        help="Number of the picture stream in the file.",
    ),
    click.option(
        "--decoder",
        type=click.Choice(get_args(Decoder)),
        default=_READING.decoder,
        help="Who decodes the pictures.",
    ),
    click.option("--fast", is_flag=True, help="Key pictures only: cheap, and approximate."),
    click.option("--strict", is_flag=True, help="A damaged picture is an error, not a note."),
    click.option(
        "--image-fps",
        type=float,
        show_default="folders are refused",
        help="A folder of images is a video at this rate.",
    ),
    click.option(
        "--subtitles",
        default=_READING.subtitles,
        shell_complete=complete_file,
        help="none, auto (beside the video or inside of it), or a file (srt, vtt, ass).",
    ),
    click.option(
        "--subtitle-style",
        type=click.Choice(get_args(SubtitleStyle)),
        default=_READING.subtitle_style,
        help="Before the question, or with the clips.",
    ),
    click.option(
        "--max-pixels", type=int, default=_READING.max_pixels, help="Largest picture to open."
    ),
    click.option(
        "--max-hours", type=float, default=_READING.max_hours, help="Longest video to open."
    ),
    click.option(
        "--max-pictures", type=int, default=_READING.max_pictures, help="Most pictures of a video."
    ),
)

fit_flag = click.option(
    "--fit",
    type=click.Choice(["auto"]),
    show_default="take all, or stop",
    help="auto: look at less, or take fewer bits, so that it fits the free memory.",
)

generation_flags = _flags(
    click.option(
        "--max-new-tokens",
        type=int,
        default=_GENERATION.max_new_tokens,
        help="Longest answer, in tokens.",
    ),
    click.option(
        "--temperature",
        type=float,
        default=_GENERATION.temperature,
        help="0 is greedy and repeatable.",
    ),
    click.option(
        "--top-p", type=float, default=_GENERATION.top_p, help="Share of probability to draw from."
    ),
    click.option("--seed", type=int, default=_GENERATION.seed, help="Seed of the sampling."),
    click.option(
        "--repetition-penalty",
        type=float,
        show_default="the model's own",
        help="Above 1, words that were used already become less likely.",
    ),
)


def read_sampling(flags: dict[str, Any]) -> SamplingOptions:
    """Put the flags of ``sampling_flags`` into their places.

    Raises:
        UsageError: a value is out of its range.
    """
    return SamplingOptions(
        mode=flags["sampling"],
        fps=flags["fps"],
        frames=flags["frames"],
        max_clips=flags["max_clips"],
        start_seconds=flags["start"],
        end_seconds=flags["end"],
        short=flags["short"],
    )


def read_reading(flags: dict[str, Any]) -> ReadingOptions:
    """Put the flags of ``reading_flags`` into their places.

    Raises:
        UsageError: a value is out of its range.
    """
    return ReadingOptions(**{field.name: flags[field.name] for field in fields(ReadingOptions)})


def read_generation(flags: dict[str, Any]) -> GenerationOptions:
    """Put the flags of ``generation_flags`` into their places.

    Raises:
        UsageError: a value is out of its range.
    """
    own = fields(GenerationOptions)
    return GenerationOptions(**{field.name: flags[field.name] for field in own})


def read_model(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of ``model_flags`` as arguments of ``engine.load``."""
    names = ("model", "device", "dtype", "quant", "template", "adapter")
    return {name: flags[name] for name in names}
