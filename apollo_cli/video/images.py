"""Single images and animations (GIF, APNG, WebP) through Pillow."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from apollo_cli.errors import MediaError
from apollo_cli.video import progress
from apollo_cli.video.limits import Limits
from apollo_cli.video.opening import shown
from apollo_cli.video.picture import over_black

# What Pillow raises on broken files, depending on where the parsing stops.
_DAMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    struct.error,
    Image.DecompressionBombError,
)

# Browsers show faster animation frames for a tenth of a second.
_SHORTEST_FRAME_MS = 11
_DEFAULT_FRAME_MS = 100


@dataclass(frozen=True)
class ImageFacts:
    """What an image file holds.

    Attributes:
        frames: number of pictures; more than one is an animation.
        seconds: (frames + 1,) start of each picture, and the end of the last one.
        stored_size, display_size: width and height before and after the EXIF turn.
        codec: Pillow's name of the format, in lower case.
    """

    frames: int
    seconds: np.ndarray
    stored_size: tuple[int, int]
    display_size: tuple[int, int]
    codec: str


@contextmanager
def _open_image(path: Path, limits: Limits) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings():
            # The size is checked below, against our own limit.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path)
    except _DAMAGE as error:
        too_large = isinstance(error, Image.DecompressionBombError)
        reason = "too many pixels" if too_large else "damaged or of an unknown kind"
        raise MediaError(f"{shown(path)} is not a readable image ({reason})") from None
    with image:
        limits.check_size(path, *image.size)
        try:
            yield image
        except _DAMAGE as error:
            raise MediaError(f"{shown(path)} is a damaged image ({error})") from None


def read_image_facts(path: Path, limits: Limits) -> ImageFacts:
    """Open an image or animation and count its pictures.

    Raises:
        MediaError: damaged, of an unknown kind, or too large.
    """
    with _open_image(path, limits) as image:
        frames = getattr(image, "n_frames", 1) if _may_move(image) else 1
        milliseconds = [0.0]
        for index in range(frames if frames > 1 else 0):
            progress.advance()
            image.seek(index)
            # Pillow tells a WebP frame's duration only once it is loaded.
            image.load()
            shown_ms = float(image.info.get("duration") or 0)
            too_short = shown_ms < _SHORTEST_FRAME_MS
            milliseconds.append(milliseconds[-1] + (_DEFAULT_FRAME_MS if too_short else shown_ms))
        image.seek(0)
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        width, height = image.size
        return ImageFacts(
            frames=frames,
            seconds=np.array(milliseconds if frames > 1 else [0.0, 0.0]) / 1000,
            stored_size=(width, height),
            display_size=(height, width) if turned else (width, height),
            codec=(image.format or "image").lower(),
        )


def _may_move(image: Image.Image) -> bool:
    # The pages of a TIFF or the cameras of an MPO photo are not a film.
    return image.format in ("GIF", "PNG", "WEBP", "AVIF")


def walk_image(path: Path, pictures: list[int], limits: Limits) -> Iterator[tuple[int, np.ndarray]]:
    """Yield ``(picture, (H, W, 3) uint8 RGB)`` for ascending pictures; alpha lies over black."""
    with _open_image(path, limits) as image:
        for index in pictures:
            progress.advance()
            image.seek(index)
            upright = ImageOps.exif_transpose(image)
            if upright.mode in ("I;16", "I", "F"):
                levels = np.asarray(upright, dtype=np.float64)
                # Deep gray images hold 16 bits, whatever Pillow calls them.
                scaled = np.clip(levels / 257, 0, 255).astype(np.uint8)
                yield index, np.repeat(scaled[..., None], 3, axis=2)
            elif upright.mode == "RGB":
                yield index, np.array(upright)
            else:
                yield index, over_black(np.array(upright.convert("RGBA")))
