"""Single images, animations (GIF, APNG, WebP, AVIF) and folders of images, through Pillow."""

from __future__ import annotations

import os
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.codec.context import CodecContext
from av.error import FFmpegError, InvalidDataError
from PIL import Image, ImageOps

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError
from apollo_cli.video.container import (
    advance,
    check_length,
    check_size,
    resolve_file,
    shown,
    sniff,
)
from apollo_cli.video.info import VideoInfo, typical_step
from apollo_cli.video.picture import over_black

# What Pillow raises on broken files, depending on where the parsing stops.
_DAMAGE = (
    *(OSError, ValueError, LookupError, EOFError, SyntaxError, OverflowError),
    *(struct.error, Image.DecompressionBombError),
)

# The pages of a TIFF or the cameras of an MPO photo are not a film.
_ANIMATIONS = ("GIF", "PNG", "WEBP", "AVIF")

# Browsers show faster animation frames for a tenth of a second.
_SHORTEST_FRAME_MS, _DEFAULT_FRAME_MS = 11, 100

# Tags of EXIF and TIFF.
_ORIENTATION, _PHOTOMETRIC, _SAMPLE_FORMAT = 0x0112, 262, 339
_MOST_PAGES = 1 << 20

# Pictures are converted in strips of about so many pixels, so that memory holds one copy of them.
_STRIP_PIXELS = 1 << 20

_MOST_JPEG_BYTES = 256 << 20

_VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".avi", ".webm", ".m4v", ".ts")
_FOLDER_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif")


def probe_image(path: Path, reading: ReadingOptions) -> VideoInfo:
    """Open an image, or decode an animation to count its pictures.

    Raises:
        MediaError: damaged, of an unknown kind, or too large.
    """
    faults = []
    with warnings.catch_warnings(record=True) as remarks, _open_image(path) as image:
        warnings.simplefilter("always")
        check_size(path, image.size, reading)
        kind = image.format or "image"
        if image.mode in ("I", "F") or _tag(image, _SAMPLE_FORMAT) not in (None, 1, (1,)):
            raise MediaError(
                f"{shown(path)} has gray levels without a fixed range",
                "8 and 16 bits without a sign are read",
                "convert it to PNG",
            )
        if kind == "PNG":
            # Its orientation may stand behind the pixels.
            image.load()
        stored = display = image.size
        orientation = _orientation(image)
        if orientation is None:
            faults.append("its EXIF data is damaged: it is taken to be upright")
        elif orientation > 4:
            # Pillow gives the size of a TIFF as it is shown, of all others as it is stored.
            turned = (image.height, image.width)
            stored, display = (turned, image.size) if kind == "TIFF" else (image.size, turned)
        if kind == "GIF" and not path.read_bytes().rstrip(b"\0").endswith(b";"):
            faults.append("cut: its last pictures are lost")
        pages, first = _count_pages(image), _first_page(image)
        milliseconds = []
        if kind not in _ANIMATIONS and pages > 1:
            faults.append(f"{pages} pages: the first is read")
        elif pages - first > 1:
            milliseconds, is_cut = _read_durations(image, range(first, pages))
            faults += ["cut: its last pictures are lost"] if is_cut else []
            if _is_damaged(path, kind):
                faults.append("damaged: parts of pictures may be wrong")
        faults += [" ".join(str(remark.message).split()) for remark in remarks]
    if path.suffix.lower() in _VIDEO_SUFFIXES:
        faults.append(f"an image ({kind.lower()}) under the name of a video")
    is_video = len(milliseconds) > 1
    starts = np.concatenate([[0.0], np.cumsum(milliseconds if is_video else [0.0])]) / 1000
    return VideoInfo(
        path=path,
        kind="video" if is_video else "image",
        times=starts[:-1],
        duration_seconds=float(starts[-1]),
        stored_size=stored,
        display_size=display,
        codec=kind.lower(),
        container=kind.lower(),
        source_fps=len(milliseconds) / float(starts[-1]) if is_video else None,
        constant_rate=bool(np.allclose(np.diff(starts), typical_step(starts))),
        tick_seconds=0.001,
        warnings=tuple(dict.fromkeys(faults)),
    )


def _read_durations(image: Image.Image, pages: range) -> tuple[list[float], bool]:
    """How long each picture of an animation is shown, and whether the file breaks off."""
    milliseconds: list[float] = []
    for index in pages:
        advance()
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
    return milliseconds, False


def probe_folder(path: Path, reading: ReadingOptions) -> VideoInfo:
    """Take the images of a folder, in the order of their numbers, as pictures of a video.

    Every image is opened, so that a wrong one is found before anything is read. Files with
    other suffixes and hidden ones are left out.

    Raises:
        MediaError: no images, one that can't be read, or more than the limits allow.
    """
    assert reading.image_fps is not None

    def by_number(name: str) -> list[tuple[int, str]]:
        """Sort picture2 before picture10."""
        parts = re.split(r"(\d+)", name.lower())
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    names = [name for name in sorted(os.listdir(path), key=by_number) if name[0] != "."]
    names = [name for name in names if name.lower().endswith(_FOLDER_SUFFIXES)]
    if not names:
        raise MediaError(
            f"{shown(path)} is a folder without images", f"read are {', '.join(_FOLDER_SUFFIXES)}"
        )
    seconds = len(names) / reading.image_fps
    check_length(path, len(names), seconds, reading)
    images = []
    for name in names:
        file = resolve_file(path / name)
        sniff(file)
        images.append(probe_image(file, reading))
    faults = {fault: image.path.name for image in images for fault in image.warnings}
    return VideoInfo(
        path=path,
        kind="video",
        times=np.arange(len(names)) / reading.image_fps,
        duration_seconds=seconds,
        stored_size=images[0].stored_size,
        display_size=images[0].display_size,
        codec=images[0].codec,
        container="folder",
        source_fps=reading.image_fps,
        warnings=tuple(f"{shown(name)}: {fault}" for fault, name in faults.items()),
        files=tuple(image.path for image in images),
    )


def read_images(info: VideoInfo, pictures: list[int]) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Yield pictures of an image, an animation or a folder of images, by ascending index.

    Yields:
        The index; (H, W, 3) uint8, upright, with alpha laid over black; whether it is damaged in
        a way that Pillow passes over.

    Raises:
        MediaError: damaged, of an unknown kind, or with pixels that are no picture.
    """
    if not info.files:
        with _open_image(info.path) as image:
            # The probe has reported damage of animations.
            is_damaged = info.kind == "image" and _is_damaged(info.path, image.format or "")
            for picture in pictures:
                yield picture, _read_picture(image, picture), is_damaged
    for picture in pictures if info.files else ():
        path = info.files[picture]
        with _open_image(path) as image:
            yield picture, _read_picture(image, 0), _is_damaged(path, image.format or "")


@contextmanager
def _open_image(path: Path) -> Iterator[Image.Image]:
    what = "is not a readable image"
    try:
        # Given a path, Pillow maps the file, which ends the process if the file is cut meanwhile,
        # and garbles turned TIFF files.
        with path.open("rb") as file:
            with warnings.catch_warnings():
                # The probe checks the size against our own limit.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(file)
            what = "is a damaged image"
            with image:
                yield image
    except _DAMAGE as error:
        unknown = isinstance(error, Image.UnidentifiedImageError)
        reason = "damaged, cut or of an unknown kind" if unknown else error
        raise MediaError(f"{shown(path)} {what} ({reason})") from None


def _tag(image: Image.Image, number: int) -> Any:
    """A tag of a TIFF; None where there is none."""
    return getattr(image, "tag_v2", {}).get(number)


def _orientation(image: Image.Image) -> int | None:
    """As EXIF numbers it, 1 is upright; None where it cannot be read."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except (*_DAMAGE, TypeError):
        return None


def _count_pages(image: Image.Image) -> int:
    """How many pictures there are; where the file breaks off, as many as nobody has."""
    try:
        return getattr(image, "n_frames", 1)
    except _DAMAGE:
        return _MOST_PAGES


def _first_page(image: Image.Image) -> int:
    """1 where an APNG has a picture for programs that know no animations, else 0."""
    return int(getattr(image, "default_image", False) and getattr(image, "n_frames", 1) > 1)


def _is_damaged(path: Path, kind: str) -> bool:
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

    def decode(detection: str) -> list[av.VideoFrame]:
        context = CodecContext.create("mjpeg", "r")
        assert isinstance(context, av.VideoCodecContext)
        # All of the code is read, but only each eighth pixel is made of it.
        context.options = {"err_detect": detection, "lowres": "3"}
        context.thread_count = 1
        return [*context.decode(av.Packet(data)), *context.decode(None)]

    try:
        decode("explode")
    except InvalidDataError:
        with suppress(FFmpegError):
            # What FFmpeg cannot decode at all it may just not know.
            return bool(decode("ignore_err"))
    except FFmpegError:
        pass
    return False


def _read_picture(image: Image.Image, index: int) -> np.ndarray:
    """One picture as (H, W, 3) uint8, upright, with alpha laid over black."""
    advance()
    image.seek(_first_page(image) + index)
    image.load()
    if _orientation(image) not in (None, 1):
        image = ImageOps.exif_transpose(image)
    has_alpha = image.has_transparency_data or image.mode in ("LA", "PA", "RGBA", "La", "RGBa")
    width, height = image.size
    is_deep = image.mode.startswith("I;16")
    # The three planes of a gray picture share memory.
    is_gray = is_deep or (image.mode in ("1", "L") and not has_alpha)
    pixels = np.empty((height, width, 1 if is_gray else 3), dtype=np.uint8)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height)))
        if is_deep:
            values = np.asarray(strip)
            gray = (values // 257).astype(np.uint8)
            # Zero is white in some TIFFs.
            gray = 255 - gray if _tag(image, _PHOTOMETRIC) == 0 else gray
            gray[values == image.info.get("transparency")] = 0
            pixels[top : top + rows] = gray[..., None]
        elif is_gray:
            pixels[top : top + rows] = np.asarray(strip.convert("L"))[..., None]
        elif has_alpha:
            pixels[top : top + rows] = over_black(np.asarray(strip.convert("RGBA")))
        else:
            pixels[top : top + rows] = np.asarray(strip.convert("RGB"))
    return np.broadcast_to(pixels, (height, width, 3))
