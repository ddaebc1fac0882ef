"""``apollo frames``: the very pictures that the model sees, as files."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.atomic import make_whole
from apollo_cli.commands.options import FILE, Moment, flags_of, read_options
from apollo_cli.commands.output import progress, say_note
from apollo_cli.config import ModelOptions, ReadingOptions, SamplingOptions
from apollo_cli.errors import UsageError
from apollo_cli.text import count

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as Picture

_SHEET_WIDTH, _SHEET_COLUMNS, _CAPTION_HEIGHT = 240, 8, 16
_MOST_SHEET_HEIGHT = 4 * _SHEET_WIDTH


@click.command()
@click.argument("video", metavar="VIDEO", type=click.Path(readable=False))
@click.option(
    "--at",
    "moments",
    type=Moment(),
    multiple=True,
    help="A moment, as with --from; may be repeated.",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    default=Path(),
    show_default="this folder",
    help="Folder for the pictures.",
)
@click.option("--sheet", is_flag=True, help="One contact sheet instead of single pictures.")
@flags_of(ModelOptions, only="model")
@flags_of(SamplingOptions, ReadingOptions)
def frames(
    video: str, moments: tuple[float, ...], output: Path, sheet: bool, model: str, **flags: Any
) -> None:
    """Write the pictures that the model sees, each with its real time in its name.

    Without --at these are the pictures of the clips that the model would be shown, so that --model
    says how they are chosen.
    """
    import numpy as np
    from PIL import Image

    from apollo_cli.video.guard import GuardedReader
    from apollo_cli.video.reader import describe_damage, find_pictures

    sampling, reading = read_options(SamplingOptions, flags), read_options(ReadingOptions, flags)
    with GuardedReader() as reader, progress() as report:
        info = reader.probe(video, reading)
        if moments:
            wanted: Any = list(moments)
            if max(wanted) > info.duration_seconds:
                raise UsageError(
                    f"--at {max(wanted):g}", f"the video ends at {info.duration_seconds:.2f} s"
                )
        else:
            from apollo_cli.planner import load_planner
            from apollo_cli.weights.store import locate_model

            planner = load_planner(locate_model(model).checkpoint)
            wanted = planner.plan([info], sampling)[0].plan.times.ravel()
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"-o {output} is no folder ({error.strerror})") from error
        for warning in info.warnings:
            say_note(f"{info.path.name}: {warning}")
        # A name has 255 bytes at most.
        stem = os.fsencode(info.path.stem)[:120].decode(errors="ignore")
        thumbnails: list[tuple[float, np.ndarray]] = []
        taken = Counter[str]()
        # A short video shows a picture several times in a clip; one file is enough.
        pictures = np.unique(find_pictures(info, np.asarray(wanted, np.float64), reading.fast))
        damaged: list[float] = []
        for frame in reader.read_frames(info, info.times[pictures], reading):
            damaged += frame.damaged
            if sheet:
                thumbnails.append((float(frame.seconds), _thumbnail(frame.rgb)))
            else:
                name = f"{stem}-{frame.seconds:09.3f}"
                taken[name] += 1
                name += f"-{taken[name]}" if taken[name] > 1 else ""
                click.echo(_save(Image.fromarray(frame.rgb), output / f"{name}.png"))
            report("decode", frame.position + 1, len(pictures))
    if sheet:
        click.echo(_save(_contact_sheet(thumbnails), output / f"{stem}-sheet.png"))
    if damaged:
        told = describe_damage(info, damaged, info.times[pictures], reading)
        say_note(f"{info.path.name}: {told}")
    say_note(f"{count(len(pictures), 'picture')} of {info.path.name}")


def _save(picture: Picture, target: Path) -> Path:
    try:
        make_whole(target, lambda fresh: picture.save(fresh, format="PNG"))
    except OSError as error:
        raise UsageError(f"{target} cannot be written ({error.strerror or error})") from error
    return target


def _thumbnail(rgb: np.ndarray) -> np.ndarray:
    import numpy as np
    from PIL import Image

    height, width = rgb.shape[:2]
    scale = min(_SHEET_WIDTH / width, _MOST_SHEET_HEIGHT / height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(Image.fromarray(rgb).resize(size))


def _contact_sheet(pictures: list[tuple[float, np.ndarray]]) -> Picture:
    """All pictures in rows, each above its time."""
    from PIL import Image, ImageDraw

    height = max(picture.shape[0] for _, picture in pictures) + _CAPTION_HEIGHT
    columns = min(_SHEET_COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * _SHEET_WIDTH, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (seconds, picture) in enumerate(pictures):
        left, top = number % columns * _SHEET_WIDTH, number // columns * height
        sheet.paste(Image.fromarray(picture), (left, top))
        draw.text((left + 4, top + height - _CAPTION_HEIGHT + 2), f"{seconds:.2f} s", fill="black")
    return sheet
