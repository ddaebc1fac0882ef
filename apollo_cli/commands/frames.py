"""``apollo frames``: the very pictures that the model sees, as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.commands.asking import start_reader
from apollo_cli.commands.options import (
    Moment,
    read_reading,
    read_sampling,
    reading_flags,
    sampling_flags,
)
from apollo_cli.commands.output import progress, say_note
from apollo_cli.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_SHEET_WIDTH, _SHEET_COLUMNS, _CAPTION_HEIGHT = 240, 8, 16


@click.command()
@click.argument("video", metavar="VIDEO")
@click.option("--at", "moments", type=Moment(), multiple=True, help="A moment; may be repeated.")
@click.option("-o", "--output", type=Path, default=Path(), help="Folder. Default: this one.")
@click.option("--sheet", is_flag=True, help="One contact sheet instead of single pictures.")
@click.option("--model", default="auto", help="Whose sampling is used, without --at.")
@sampling_flags
@reading_flags
def frames(
    video: str, moments: tuple[float, ...], output: Path, sheet: bool, model: str, **flags: Any
) -> None:
    """Write the pictures that the model sees, each with its real time in its name.

    Without --at these are the pictures of the clips that the model would be shown.
    """
    sampling, reading = read_sampling(flags), read_reading(flags)
    with start_reader(reading) as reader, progress() as report:
        info = reader.probe(video, stream=reading.stream, image_fps=reading.image_fps)
        if moments:
            wanted: Any = list(moments)
            if max(wanted) > info.duration_seconds:
                raise UsageError(
                    f"--at {max(wanted):g}", f"the video ends at {info.duration_seconds:.2f} s"
                )
        else:
            from apollo_cli.planning import load_planner
            from apollo_cli.weights.checkpoint import read_checkpoint
            from apollo_cli.weights.locate import locate_model

            planner = load_planner(read_checkpoint(locate_model(model).folder))
            wanted = planner.plan([info], sampling)[0].times.ravel()
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"-o {output} is no folder ({error.strerror})") from error
        pictures: list[tuple[float, np.ndarray]] = []
        count = 0
        for frame in reader.read_frames(info, wanted, reading):
            count += 1
            if sheet:
                pictures.append((frame.seconds, _thumbnail(frame.rgb)))
            else:
                click.echo(_save(frame.rgb, output, info.path.stem, frame.seconds))
            report("decode", count, len(wanted))
    if sheet:
        target = output / f"{info.path.stem}-sheet.png"
        _contact_sheet(pictures).save(target)
        click.echo(target)
    say_note(f"{count} pictures of {info.path.name}")


def _save(rgb: np.ndarray, folder: Path, stem: str, seconds: float) -> Path:
    from PIL import Image

    target = folder / f"{stem[:120]}-{seconds:09.3f}.png"
    try:
        Image.fromarray(rgb).save(target)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise UsageError(f"{target} cannot be written ({error.strerror or error})") from error
    return target


def _thumbnail(rgb: np.ndarray) -> np.ndarray:
    import numpy as np
    from PIL import Image

    height = max(1, round(rgb.shape[0] * _SHEET_WIDTH / rgb.shape[1]))
    return np.asarray(Image.fromarray(rgb).resize((_SHEET_WIDTH, height)))


def _contact_sheet(pictures: list[tuple[float, np.ndarray]]) -> Image:
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
