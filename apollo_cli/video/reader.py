"""Read the pictures on display at given times, streamed: never a whole video in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import av
import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError, UsageError
from apollo_cli.text import count
from apollo_cli.video.container import DEFAULT_READING, advance, check_unchanged, shown, unchanged
from apollo_cli.video.images import read_images
from apollo_cli.video.info import FORMAT_CHANGES, VideoInfo
from apollo_cli.video.picture import to_rgb
from apollo_cli.video.transforms import PixelSpec, resize_square
from apollo_cli.video.walk import Walk

# decord and our own scan may round a time differently, by less than this.
_TIME_SLACK_SECONDS = 2e-3


@dataclass(frozen=True, eq=False)
class Frames:
    """Pictures of a video: a single one, or those of a few clips.

    Attributes:
        position: index of the first of them, or of the first clip, among what was asked for.
        pixels: ``rgb`` to (H, W, 3) uint8, upright, in display proportions; or the name of each
            encoder to (clips, frames, 3, size, size) uint8, not normalised.
        seconds: () or (clips, frames) float64: when the pictures really appear.
        damaged: times of the pictures that were wanted here for the first time and are damaged;
            the nearest sound one is shown in place of each, but for images.
    """

    position: int
    pixels: dict[str, np.ndarray] = field(repr=False)
    seconds: np.ndarray
    damaged: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for array in self.pixels.values():
            assert array.dtype == np.uint8
            assert array.shape[:-3] == self.seconds.shape

    @property
    def rgb(self) -> np.ndarray:
        """(H, W, 3) uint8, of a single picture."""
        return self.pixels["rgb"]


class Picture(NamedTuple):
    """A picture as decoded: by PyAV, or already upright as (H, W, 3) uint8 RGB.

    Attributes:
        wanted: its index. shown: index of the picture that it is; another one may stand in for a
            damaged one. is_damaged: the wanted one is.
    """

    wanted: int
    shown: int
    frame: av.VideoFrame | np.ndarray
    is_damaged: bool


def read_frames(
    info: VideoInfo,
    times: Sequence[float] | np.ndarray,
    reading: ReadingOptions = DEFAULT_READING,
) -> Iterator[Frames]:
    """Yield the picture on display at each time, in ascending order of time.

    Args:
        times: seconds, in any order; a picture wanted twice is decoded once.
        reading: its ``strict``, ``fast`` and ``decoder`` count. decord is known to hang on some
            files: use it through ``guard`` only.

    Raises:
        MediaError: nothing can be decoded, the decoder would not give these pictures right, or
            ``strict`` and a picture is damaged.
        UsageError: the decoder is not installed, or cannot be loaded.
    """
    pictures = find_pictures(info, np.asarray(times, np.float64).reshape(-1), reading.fast)
    order = np.argsort(pictures, kind="stable")
    ascending = pictures[order]
    for read in _read(info, pictures, reading):
        first, end = np.searchsorted(ascending, [read.wanted, read.wanted + 1])
        pixels = {"rgb": _to_rgb(info, read.frame)}
        damaged = (float(info.times[read.wanted]),) if read.is_damaged else ()
        for position in order[first:end].tolist():
            yield Frames(position, pixels, np.asarray(info.times[read.shown]), damaged)
            damaged = ()


def read_clips(
    info: VideoInfo,
    times: np.ndarray,
    specs: Sequence[PixelSpec],
    reading: ReadingOptions = DEFAULT_READING,
    *,
    batch_clips: int = 4,
) -> Iterator[Frames]:
    """Yield clips in their own order, a few at a time, each picture resized once an encoder.

    Args:
        times: (clips, frames) wanted seconds; what clips behind want is kept, so little memory is
            needed where they ascend.
        specs: what the encoders take.
        batch_clips: most clips in one batch.
        reading: as in ``read_frames``.

    Raises:
        MediaError: as ``read_frames``.
    """
    pictures = find_pictures(info, np.asarray(times, np.float64), reading.fast)
    stream = _read(info, pictures, reading)
    seconds: dict[int, float] = {}
    squares: dict[int, dict[str, np.ndarray]] = {}
    for first in range(0, len(pictures), batch_clips):
        wanted, later = np.split(pictures[first:], [batch_clips])
        damaged: list[float] = []
        while not set(wanted.flat) <= squares.keys():
            read = next(stream)
            damaged += [float(info.times[read.wanted])] if read.is_damaged else []
            seconds[read.wanted] = float(info.times[read.shown])
            rgb = _to_rgb(info, read.frame)
            squares[read.wanted] = {spec.name: resize_square(rgb, spec) for spec in specs}
        pixels = {
            spec.name: np.stack([squares[k][spec.name] for k in wanted.flat]).reshape(
                *wanted.shape, 3, spec.size, spec.size
            )
            for spec in specs
        }
        shown_at = np.array([seconds[k] for k in wanted.flat]).reshape(wanted.shape)
        yield Frames(first, pixels, shown_at, tuple(damaged))
        oldest = later.min(initial=np.iinfo(np.int64).max)
        squares = {key: value for key, value in squares.items() if key >= oldest}


def check_pictures(info: VideoInfo) -> list[float]:
    """Decode every picture once, without keeping any; returns the times of the damaged ones.

    Raises:
        MediaError: no picture at all can be decoded.
    """
    read = _read(info, np.arange(info.frame_count), DEFAULT_READING)
    return [float(info.times[one.wanted]) for one in read if one.is_damaged]


def describe_damage(
    info: VideoInfo,
    damaged: Sequence[float],
    times: np.ndarray,
    reading: ReadingOptions = DEFAULT_READING,
) -> str:
    """One sentence on what a reading found damaged, empty when all is well.

    Args:
        damaged: times of the damaged pictures, of all ``Frames``.
        times: that were wanted.
    """
    if not damaged:
        return ""
    if info.kind == "image":
        return "the picture is damaged: parts of it may be wrong"
    pictures = count(len(np.unique(find_pictures(info, times, reading.fast))), "picture")
    single = len(set(damaged)) == 1
    which = "is damaged, at" if single else "are damaged, the first at"
    found = f"{len(set(damaged))} of {pictures} {which} {min(damaged):.2f} s"
    if info.files:
        return f"{found}: parts may be wrong"
    return f"{found}: the nearest sound one stands in for {'it' if single else 'each'}"


def find_pictures(info: VideoInfo, times: np.ndarray, fast: bool) -> np.ndarray:
    """Indices of the pictures on display at each time, or of the nearest key pictures."""
    pictures = info.frames_at(times)
    return info.nearest_keys(pictures) if fast else pictures


def _to_rgb(info: VideoInfo, frame: av.VideoFrame | np.ndarray) -> np.ndarray:
    if isinstance(frame, np.ndarray):
        return frame
    return to_rgb(frame, info.sample_aspect, info.rotation, info.mirrored)


def _read(info: VideoInfo, pictures: np.ndarray, reading: ReadingOptions) -> Iterator[Picture]:
    """Yield each different picture, ascending, as long as the file is the one that was probed."""
    wanted = np.unique(pictures).tolist()
    came = 0
    with unchanged(info.path, info.identity):
        for read in _decode(info, wanted, reading.decoder):
            check_unchanged(info.path, info.identity)
            came += 1
            if reading.strict and read.is_damaged:
                at = f"the picture at {info.times[read.wanted]:.2f} s"
                raise MediaError(
                    f"{shown(info.path)}: {at} is damaged",
                    next_step="leave out --strict to let a neighbour stand in",
                )
            yield read
    if came < len(wanted):
        raise MediaError(f"{shown(info.path)}: no picture can be decoded", "it is damaged")


def _decode(info: VideoInfo, pictures: list[int], decoder: str) -> Iterator[Picture]:
    """Images are read by Pillow, whatever the decoder."""
    if info.timeline is None:
        for picture, rgb, is_damaged in read_images(info, pictures):
            yield Picture(picture, picture, rgb, is_damaged)
    elif decoder == "decord":
        reader = _open_with_decord(info)
        for picture in pictures:
            advance()
            # Damaged pictures are not noticed: decord hands them out like sound ones.
            rgb = reader[picture].asnumpy()
            if (rgb.shape[1], rgb.shape[0]) != info.display_size:
                frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
                rgb = frame.reformat(*info.display_size).to_ndarray()
            yield Picture(picture, picture, rgb, False)
    else:
        with closing(Walk(info.path, info.stream_index, info.timeline, info.times)) as walk:
            for picture, stand_in, frame in walk.fetch(pictures):
                yield Picture(picture, stand_in, frame, picture != stand_in)


def _open_with_decord(info: VideoInfo) -> Any:
    """A reader of decord, for a file whose pictures it gives right.

    Raises:
        UsageError: it is not installed, or cannot be loaded.
        MediaError: it would give wrong pictures.
    """
    try:
        import decord  # type: ignore[import-not-found]
    except (ImportError, OSError, RuntimeError):
        raise UsageError(
            "--decoder decord, which is not installed or cannot be loaded",
            next_step="pip install 'apollo-video-cli[decord]', or leave it out",
        ) from None
    line = info.timeline
    assert line is not None
    nearest = np.searchsorted(line.keys, line.packet, side="right") - 1
    # It gives wrong pictures without an error, as measured, where it seeks by time stamps in
    # containers without an index, in mirrored pictures, after another format, outside of the edit
    # list, and in open groups.
    is_right = line.walk == "seek" and not info.mirrored and FORMAT_CHANGES not in info.warnings
    is_right &= len(line.packet) == len(line.pts) and bool((nearest == line.key_of).all())
    if is_right:
        with suppress(decord.DECORDError, RuntimeError):
            reader = decord.VideoReader(str(info.path), num_threads=1)
            starts = np.asarray(reader.get_frame_timestamp(range(len(reader))))[:, 0]
            if len(starts) == info.frame_count and (
                np.ptp(starts - info.times) <= _TIME_SLACK_SECONDS
            ):
                return reader
    raise MediaError(
        f"{shown(info.path)} can't be read right by decord", next_step="leave out --decoder decord"
    )
