"""Single images and animations (GIF, APNG, WebP) through Pillow."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.codec.context import CodecContext
from av.error import FFmpegError, InvalidDataError
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from apollo_cli.errors import MediaError
from apollo_cli.video import progress
from apollo_cli.video.container import Limits, shown
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

# Numbers of EXIF and TIFF tags.
_ORIENTATION, _PHOTOMETRIC, _SAMPLE_FORMAT = 0x0112, 262, 339
_WHITE_IS_ZERO, _SIGNED = 0, 2

# Pictures are converted in strips of about so many pixels, so that memory holds one copy of them.
_STRIP_PIXELS = 1 << 20

_MOST_JPEG_BYTES = 256 << 20


@dataclass(frozen=True)
class ImageFacts:
    """What an image file holds.

    Attributes:
        frames: number of pictures; more than one is an animation.
        seconds: (frames + 1,) start of each picture, and the end of the last one.
        stored_size, display_size: width and height before and after the EXIF turn.
        codec: Pillow's name of the format, in lower case.
        warnings: one short sentence each, empty for a sound file.
    """

    frames: int
    seconds: np.ndarray
    stored_size: tuple[int, int]
    display_size: tuple[int, int]
    codec: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImagePicture:
    """One picture of an image file.

    Attributes:
        rgb: (H, W, 3) uint8, upright, alpha laid over black; of a gray picture all three planes
            are one, and may not be written to.
        damaged: a decoder reports damage that Pillow passes over.
    """

    rgb: np.ndarray
    damaged: bool


@contextmanager
def _open_image(path: Path, limits: Limits) -> Iterator[Image.Image]:
    with ExitStack() as stack:
        try:
            # Given a path, Pillow maps the file, which ends the process if the file is cut
            # meanwhile, and garbles turned TIFF files.
            file = stack.enter_context(path.open("rb"))
            with warnings.catch_warnings():
                # The size is checked below, against our own limit.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = stack.enter_context(Image.open(file))
        except _DAMAGE as error:
            too_large = isinstance(error, Image.DecompressionBombError)
            reason = "too many pixels" if too_large else "damaged, cut or of an unknown kind"
            raise MediaError(f"{shown(path)} is not a readable image ({reason})") from None
        limits.check_size(path, *image.size)
        try:
            yield image
        except _DAMAGE as error:
            raise MediaError(f"{shown(path)} is a damaged image ({error})") from None


def read_image_facts(path: Path, limits: Limits) -> ImageFacts:
    """Open an image, or decode an animation to count its pictures.

    Raises:
        MediaError: damaged, of an unknown kind, or too large.
    """
    with warnings.catch_warnings(record=True) as said, _open_image(path, limits) as image:
        warnings.simplefilter("always")
        (width, height), kind = image.size, image.format or "image"
        stored = display = width, height
        if kind == "PNG":
            # Its orientation may stand behind the pixels.
            image.load()
        orientation = _orientation(image)
        if orientation in (5, 6, 7, 8):
            # Pillow gives the size of a TIFF as it is shown, of all others as it is stored.
            stored, display = (height, width), (width, height)
            if kind != "TIFF":
                stored, display = display, stored
        faults = []
        if orientation is None:
            faults.append("its EXIF data is damaged: it is taken to be upright")
        milliseconds = []
        # The pages of a TIFF or the cameras of an MPO photo are not a film.
        if kind in ("GIF", "PNG", "WEBP", "AVIF"):
            milliseconds, is_cut = _read_durations(image)
            if is_cut or (kind == "GIF" and not _ends_as_gif(path)):
                faults.append("damaged or cut: the pictures behind the last sound one are lost")
            elif len(milliseconds) > 1 and _reports_damage(path, kind):
                faults.append("damaged or cut: parts of pictures may be wrong")
        elif kind == "TIFF" and getattr(image, "n_frames", 1) > 1:
            faults.append("several pages: the first is read")
        if image.mode in ("I", "F"):
            faults.append("its gray levels have no fixed range: the lowest is shown black")
        faults += [" ".join(str(warning.message).split()) for warning in said]
    if len(milliseconds) < 2:
        milliseconds = [0.0]
    return ImageFacts(
        frames=len(milliseconds),
        seconds=np.concatenate([[0.0], np.cumsum(milliseconds)]) / 1000,
        stored_size=stored,
        display_size=display,
        codec=kind.lower(),
        warnings=tuple(dict.fromkeys(faults)),
    )


def _read_durations(image: Image.Image) -> tuple[list[float], bool]:
    """How long each picture of an animation is shown, and whether it breaks off; empty: a still."""
    milliseconds: list[float] = []
    pages = None
    with suppress(*_DAMAGE):
        pages = getattr(image, "n_frames", 1)
    first = _first_page(image)
    if pages is not None and pages - first < 2:
        return [], False
    index = first
    while pages is None or index < pages:
        progress.advance()
        try:
            image.seek(index)
            # Pillow tells a WebP frame's duration only once it is loaded.
            image.load()
        except _DAMAGE:
            if not milliseconds:
                raise
            return milliseconds, True
        length = float(image.info.get("duration") or 0)
        milliseconds.append(_DEFAULT_FRAME_MS if length < _SHORTEST_FRAME_MS else length)
        index += 1
    return milliseconds, False


def _orientation(image: Image.Image) -> int | None:
    """As EXIF numbers it, 1 is upright; None where it cannot be read."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except (*_DAMAGE, TypeError):
        return None


def _first_page(image: Image.Image) -> int:
    """1 where an APNG has a picture for programs that know no animations, else 0."""
    return int(getattr(image, "default_image", False) and getattr(image, "n_frames", 1) > 1)


def _ends_as_gif(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read().rstrip(b"\0").endswith(b";")


def walk_image(
    path: Path, pictures: list[int], limits: Limits
) -> Iterator[tuple[int, ImagePicture]]:
    """Yield ``(index, picture)`` for ascending indices.

    Raises:
        MediaError: damaged, of an unknown kind, or with pixels that are no picture.
    """
    with _open_image(path, limits) as image:
        is_still = getattr(image, "n_frames", 1) < 2
        first = _first_page(image)
        for index in pictures:
            progress.advance()
            image.seek(first + index)
            image.load()
            upright = image
            if _orientation(image) not in (None, 1):
                upright = ImageOps.exif_transpose(image)
            # Of an animation this is told by the facts.
            damaged = is_still and _reports_damage(path, image.format or "")
            yield index, ImagePicture(_to_rgb(upright, path), damaged)


def _reports_damage(path: Path, kind: str) -> bool:
    """Whether a stricter reader finds damage where Pillow has given a picture.

    Pillow keeps the warnings of libjpeg to itself, and passes over checksums of PNG.
    """
    if kind == "PNG":
        try:
            with Image.open(path) as image:
                image.verify()
        except _DAMAGE:
            return True
    if kind not in ("JPEG", "MPO"):
        return False
    with path.open("rb") as file:
        data = file.read(_MOST_JPEG_BYTES)
    try:
        _decode_jpeg(data, "explode")
    except InvalidDataError:
        with suppress(FFmpegError):
            # What FFmpeg cannot decode at all it may just not know.
            return bool(_decode_jpeg(data, "ignore_err"))
    except FFmpegError:
        pass
    return False


def _decode_jpeg(data: bytes, detection: str) -> list[av.VideoFrame]:
    context = CodecContext.create("mjpeg", "r")
    assert isinstance(context, av.VideoCodecContext)
    # All of the code is read, but only each eighth pixel is made of it.
    context.options = {"err_detect": detection, "lowres": "3"}
    context.thread_count = 1
    return [*context.decode(av.Packet(data)), *context.decode(None)]


def _to_rgb(image: Image.Image, path: Path) -> np.ndarray:
    if image.mode.startswith("I") or image.mode == "F":
        gray = _deep_gray(image, path)
    elif image.mode in ("1", "L") and not image.has_transparency_data:
        gray = _by_strips(image, 1, lambda strip: np.asarray(strip.convert("L"))[..., None])
        if _tag(image, _SAMPLE_FORMAT) == _SIGNED:
            gray ^= 0x80
    elif image.has_transparency_data or "A" in image.mode or "a" in image.mode:
        return _by_strips(image, 3, lambda strip: over_black(np.asarray(strip.convert("RGBA"))))
    else:
        return _by_strips(image, 3, lambda strip: np.asarray(strip.convert("RGB")))
    return np.broadcast_to(gray, (*gray.shape[:2], 3))


def _by_strips(
    image: Image.Image, channels: int, convert: Callable[[Image.Image], np.ndarray]
) -> np.ndarray:
    pixels = np.empty((image.height, image.width, channels), dtype=np.uint8)
    top = 0
    for strip in _strips(image):
        pixels[top : top + strip.height] = convert(strip)
        top += strip.height
    return pixels


def _strips(image: Image.Image) -> Iterator[Image.Image]:
    width, height = image.size
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        yield image.crop((0, top, width, min(top + rows, height)))


def _deep_gray(image: Image.Image, path: Path) -> np.ndarray:
    """Gray levels of more than 8 bits as (H, W, 1) uint8.

    Unsigned 16 bits have a range of their own. All others, floats too, are stretched from their
    lowest to their highest value.
    """

    def levels(strip: Image.Image) -> np.ndarray:
        values = np.asarray(strip)
        if strip.mode == "I" and _tag(image, _SAMPLE_FORMAT) != _SIGNED:
            # Pillow takes all whole numbers of 32 bits for signed ones.
            values = values.view(np.uint32)
        return values.astype(np.float64)[..., None]

    low, high = 0.0, 65535.0
    if image.mode in ("I", "F"):
        low, high = np.inf, -np.inf
        for strip in _strips(image):
            values = levels(strip)
            finite = values[np.isfinite(values)]
            low, high = finite.min(initial=low), finite.max(initial=high)
        if low > high:
            raise MediaError(f"{shown(path)} holds no pixel that is a number")

    def squeeze(strip: Image.Image) -> np.ndarray:
        if low == high:
            return np.array(128)
        values = np.nan_to_num(levels(strip), nan=low, posinf=high, neginf=low)
        gray = ((values - low) / (high - low) * 255).astype(np.uint8)
        gray = 255 - gray if _tag(image, _PHOTOMETRIC) == _WHITE_IS_ZERO else gray
        gray[values == image.info.get("transparency")] = 0
        return gray

    return _by_strips(image, 1, squeeze)


def _tag(image: Image.Image, number: int) -> Any:
    value = image.tag_v2.get(number) if isinstance(image, TiffImageFile) else None
    return value[0] if isinstance(value, tuple) else value
