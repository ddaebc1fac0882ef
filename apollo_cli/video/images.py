"""Single images, animations (GIF, APNG, WebP, AVIF) and folders of images, through Pillow."""

from __future__ import annotations

import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.codec.context import CodecContext
from av.error import FFmpegError, InvalidDataError
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError
from apollo_cli.video.container import advance, check_length, check_size, resolve_file, shown, sniff
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.picture import over_black
from apollo_cli.video.timeline import typical_step
from apollo_cli.words import count

# What Pillow raises on broken files, depending on where the parsing stops.
_DAMAGE = (OSError, ValueError, LookupError, EOFError, SyntaxError, OverflowError, struct.error)

# Browsers show faster animation frames for a tenth of a second.
_SHORTEST_FRAME_MS = 11
_DEFAULT_FRAME_MS = 100

# Numbers of EXIF and TIFF tags.
_ORIENTATION, _PHOTOMETRIC, _SAMPLE_FORMAT = 0x0112, 262, 339
_WHITE_IS_ZERO, _UNSIGNED = 0, (None, 1)

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
    with warnings.catch_warnings(record=True) as said, _open_image(path) as image:
        warnings.simplefilter("always")
        check_size(path, image.size, reading)
        kind = image.format or "image"
        if image.mode in ("I", "F") or _tag(image, _SAMPLE_FORMAT) not in _UNSIGNED:
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
        if orientation in (5, 6, 7, 8):
            # Pillow gives the size of a TIFF as it is shown, of all others as it is stored.
            turned = (image.height, image.width)
            stored, display = (turned, image.size) if kind == "TIFF" else (image.size, turned)
        faults = []
        if orientation is None:
            faults.append("its EXIF data is damaged: it is taken to be upright")
        milliseconds = []
        # The pages of a TIFF or the cameras of an MPO photo are not a film.
        if kind in ("GIF", "PNG", "WEBP", "AVIF"):
            milliseconds, is_cut = _read_durations(image, path)
            if is_cut:
                faults.append("damaged or cut: the pictures behind the last sound one are lost")
            elif len(milliseconds) > 1 and _reports_damage(path, kind):
                faults.append("damaged or cut: parts of pictures may be wrong")
        elif kind == "TIFF" and getattr(image, "n_frames", 1) > 1:
            faults.append("several pages: the first is read")
        faults += [" ".join(str(warning.message).split()) for warning in said]
    if path.suffix.lower() in _VIDEO_SUFFIXES:
        faults.append(f"an image ({kind.lower()}) under the name of a video")
    moves = len(milliseconds) > 1
    starts = np.concatenate([[0.0], np.cumsum(milliseconds if moves else [0.0])]) / 1000
    end = float(starts[-1])
    return VideoInfo(
        path=path,
        kind="video" if moves else "image",
        times=starts[:-1],
        duration_seconds=end,
        stored_size=stored,
        display_size=display,
        codec=kind.lower(),
        container=kind.lower(),
        source_fps=len(milliseconds) / end if moves else None,
        constant_rate=bool(np.allclose(np.diff(starts), typical_step(starts))),
        tick_seconds=0.001,
        warnings=tuple(dict.fromkeys(faults)),
    )


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

    everything = [name for name in sorted(os.listdir(path), key=by_number) if name[0] != "."]
    names = [name for name in everything if name.lower().endswith(_FOLDER_SUFFIXES)]
    if not names:
        raise MediaError(
            f"{shown(path)} is a folder without images", f"read are {', '.join(_FOLDER_SUFFIXES)}"
        )
    seconds = len(names) / reading.image_fps
    check_length(path, len(names), seconds, reading)
    files = tuple(resolve_file(path / name) for name in names)
    affected: dict[str, list[str]] = {}
    sizes = []
    for name, file in zip(names, files, strict=True):
        if sniff(file) != "image":
            raise MediaError(f"{shown(file)} is not an image")
        found = probe_image(file, reading)
        sizes.append((found.stored_size, found.display_size, found.codec))
        animated = ["animated: only its first picture is taken"] if found.kind == "video" else []
        for fault in (*found.warnings, *animated):
            affected.setdefault(fault, []).append(name)
    others = [name for name in everything if name.lower().endswith((".heic", ".heif", ".gif"))]
    if others:
        affected["left out, of a kind that is not read"] = others
    faults = _odd_numbers(names)
    if len({display for _, display, _ in sizes}) > 1:
        faults.append("the images differ in size")
    for fault, these in affected.items():
        more = f" and {len(these) - 1} more" if len(these) > 1 else ""
        faults.append(f"{shown(these[0])}{more}: {fault}")
    stored, display, codec = sizes[0]
    return VideoInfo(
        path=path,
        kind="video",
        times=np.arange(len(names)) / reading.image_fps,
        duration_seconds=seconds,
        stored_size=stored,
        display_size=display,
        codec=codec,
        container="folder",
        source_fps=reading.image_fps,
        warnings=tuple(faults),
        files=files,
    )


def walk_image(path: Path, pictures: list[int]) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Yield index, picture and whether it is damaged, for ascending indices.

    A picture is (H, W, 3) uint8, upright, with alpha laid over black. The three planes of a gray
    picture share memory and are read-only. Damage that Pillow passes over is found by stricter
    decoders.

    Raises:
        MediaError: damaged, of an unknown kind, or with pixels that are no picture.
    """
    with _open_image(path) as image:
        is_still = getattr(image, "n_frames", 1) < 2
        first = _first_page(image)
        for index in pictures:
            advance()
            image.seek(first + index)
            image.load()
            upright = image
            if _orientation(image) not in (None, 1):
                upright = ImageOps.exif_transpose(image)
            # The probe has reported damage of animations.
            is_damaged = is_still and _reports_damage(path, image.format or "")
            yield index, _to_rgb(upright), is_damaged


@contextmanager
def _open_image(path: Path) -> Iterator[Image.Image]:
    with ExitStack() as stack:
        try:
            # Given a path, Pillow maps the file, which ends the process if the file is cut
            # meanwhile, and garbles turned TIFF files.
            file = stack.enter_context(path.open("rb"))
            with warnings.catch_warnings():
                # The probe checks the size against our own limit.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = stack.enter_context(Image.open(file))
        except Image.DecompressionBombError:
            raise MediaError(f"{shown(path)} has far too many pixels") from None
        except _DAMAGE:
            reason = "damaged, cut or of an unknown kind"
            raise MediaError(f"{shown(path)} is not a readable image ({reason})") from None
        try:
            yield image
        except (*_DAMAGE, Image.DecompressionBombError) as error:
            raise MediaError(f"{shown(path)} is a damaged image ({error})") from None


def _odd_numbers(names: list[str]) -> list[str]:
    """A number that is missing means a moment that is missing, and all later times are early."""
    found = [match for name in names if (match := re.fullmatch(r"(.*?)(\d+)\D*", name))]
    numbers = {int(match[2]) for match in found}
    if len(found) < len(names) or len({match[1] for match in found}) > 1:
        return []
    faults = []
    if missing := max(numbers) - min(numbers) + 1 - len(numbers):
        gaps = count(missing, "number is missing", "numbers are missing")
        faults.append(f"{gaps}: the images follow each other without a gap")
    if len(numbers) < len(names):
        faults.append("numbers occur twice: each image is a picture of its own")
    return faults


def _read_durations(image: Image.Image, path: Path) -> tuple[list[float], bool]:
    """How long each picture of an animation is shown, and whether it breaks off; empty: a still."""
    milliseconds: list[float] = []
    pages = None
    with suppress(*_DAMAGE):
        pages = getattr(image, "n_frames", 1)
    index = first = _first_page(image)
    is_cut = False
    if image.format == "GIF":
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            is_cut = not file.read().rstrip(b"\0").endswith(b";")
    if pages is not None and pages - first < 2:
        return [], is_cut
    while pages is None or index < pages:
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
        index += 1
    return milliseconds, is_cut


def _orientation(image: Image.Image) -> int | None:
    """As EXIF numbers it, 1 is upright; None where it cannot be read."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except (*_DAMAGE, TypeError):
        return None


def _first_page(image: Image.Image) -> int:
    """1 where an APNG has a picture for programs that know no animations, else 0."""
    return int(getattr(image, "default_image", False) and getattr(image, "n_frames", 1) > 1)


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


def _to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I;16"):
        is_inverted = _tag(image, _PHOTOMETRIC) == _WHITE_IS_ZERO
        hole = image.info.get("transparency")

        def squeeze(strip: Image.Image) -> np.ndarray:
            values = np.asarray(strip)[..., None]
            gray = (values // 257).astype(np.uint8)
            gray = 255 - gray if is_inverted else gray
            gray[values == hole] = 0
            return gray

        gray = _by_strips(image, 1, squeeze)
    elif image.mode in ("1", "L") and not image.has_transparency_data:
        gray = _by_strips(image, 1, lambda strip: np.asarray(strip.convert("L"))[..., None])
    elif image.has_transparency_data or "A" in image.mode or "a" in image.mode:
        return _by_strips(image, 3, lambda strip: over_black(np.asarray(strip.convert("RGBA"))))
    else:
        return _by_strips(image, 3, lambda strip: np.asarray(strip.convert("RGB")))
    return np.broadcast_to(gray, (*gray.shape[:2], 3))


def _by_strips(
    image: Image.Image, channels: int, convert: Callable[[Image.Image], np.ndarray]
) -> np.ndarray:
    width, height = image.size
    pixels = np.empty((height, width, channels), dtype=np.uint8)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        end = min(top + rows, height)
        pixels[top:end] = convert(image.crop((0, top, width, end)))
    return pixels


def _tag(image: Image.Image, number: int) -> Any:
    value = image.tag_v2.get(number) if isinstance(image, TiffImageFile) else None
    return value[0] if isinstance(value, tuple) else value


def read_images(info: VideoInfo, pictures: list[int]) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Yield pictures of an image, an animation or a folder of images as ``walk_image`` does."""
    if not info.files:
        yield from walk_image(info.path, pictures)
    for picture in pictures if info.files else ():
        ((_, rgb, is_damaged),) = walk_image(info.files[picture], [0])
        yield picture, rgb, is_damaged
