"""Read the pictures on display at given times, streamed: never a whole video in memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError, UsageError
from apollo_cli.video import progress
from apollo_cli.video.container import DEFAULT_READING, check_unchanged, shown, unchanged
from apollo_cli.video.images import walk_image
from apollo_cli.video.info import FORMAT_CHANGES, VideoInfo
from apollo_cli.video.picture import to_rgb
from apollo_cli.video.transforms import PixelSpec, resize_square
from apollo_cli.video.walk import Walk
from apollo_cli.words import count

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
            the nearest sound one is shown in place of each.
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
    """A decoded picture.

    Attributes:
        wanted: its index. shown: index of the picture that it is; another one stands in for a
            damaged one. rgb: (H, W, 3) uint8. is_damaged: the wanted one is.
    """

    wanted: int
    shown: int
    rgb: np.ndarray
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
        damaged = _damaged_seconds(info, read)
        for position in order[first:end].tolist():
            yield Frames(position, {"rgb": read.rgb}, np.asarray(info.times[read.shown]), damaged)
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
        times: (clips, frames) wanted seconds.
        specs: what the encoders take.
        batch_clips: most clips in one batch.
        reading: as in ``read_frames``.

    Raises:
        MediaError: as ``read_frames``.
    """
    pictures = find_pictures(info, np.asarray(times, np.float64), reading.fast)
    for group in _forward_groups(pictures, batch_clips):
        stream = _read(info, pictures[group], reading)
        seconds: dict[int, float] = {}
        squares: dict[int, dict[str, np.ndarray]] = {}
        for first in range(group.start, group.stop, batch_clips):
            stop = min(first + batch_clips, group.stop)
            wanted = pictures[first:stop]
            damaged: list[float] = []
            while not set(wanted.flat) <= squares.keys():
                read = next(stream)
                damaged += _damaged_seconds(info, read)
                seconds[read.wanted] = float(info.times[read.shown])
                squares[read.wanted] = {spec.name: resize_square(read.rgb, spec) for spec in specs}
            yield Frames(
                first,
                {
                    spec.name: np.stack([squares[k][spec.name] for k in wanted.flat]).reshape(
                        *wanted.shape, 3, spec.size, spec.size
                    )
                    for spec in specs
                },
                np.array([seconds[k] for k in wanted.flat]).reshape(wanted.shape),
                tuple(damaged),
            )
            # No later batch of a group begins before the next one does.
            oldest = pictures[stop : group.stop].min(initial=np.iinfo(np.int64).max)
            squares = {key: value for key, value in squares.items() if key >= oldest}


def check_pictures(info: VideoInfo) -> list[float]:
    """Decode every picture once, without keeping any; returns the times of the damaged ones.

    Raises:
        MediaError: no picture at all can be decoded.
    """
    if info.timeline is None:
        return [s for frame in read_frames(info, info.times) for s in frame.damaged]
    walk = Walk(info.path, info.stream_index, info.timeline, info.times)
    with unchanged(info.path, info.identity), closing(walk):
        walked = walk.fetch(range(info.frame_count))
        return [float(info.times[one.picture]) for one in walked if one.shown != one.picture]


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
    first = f"{min(damaged):.2f} s"
    if len(set(damaged)) == 1:
        return f"1 of {pictures} is damaged, at {first}: the nearest sound one stands in for it"
    return (
        f"{len(set(damaged))} of {pictures} are damaged, the first at {first}: "
        "the nearest sound one stands in for each"
    )


def find_pictures(info: VideoInfo, times: np.ndarray, fast: bool) -> np.ndarray:
    """Indices of the pictures on display at each time, or of the nearest key pictures."""
    pictures = info.frames_at(times)
    return info.key_pictures(pictures) if fast else pictures


def _forward_groups(pictures: np.ndarray, batch_clips: int) -> Iterator[slice]:
    """Split clips into groups in which no batch starts before the one in front of it."""
    start, newest = 0, -1
    for first in range(0, len(pictures), batch_clips):
        earliest = int(pictures[first : first + batch_clips].min())
        if earliest < newest:
            yield slice(start, first)
            start = first
        newest = earliest
    yield slice(start, len(pictures))


def _damaged_seconds(info: VideoInfo, read: Picture) -> tuple[float, ...]:
    return (float(info.times[read.wanted]),) if read.is_damaged else ()


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
    if info.files:
        yield from _read_files(info.files, pictures)
    elif info.timeline is None:
        for picture, rgb, is_damaged in walk_image(info.path, pictures):
            yield Picture(picture, picture, rgb, is_damaged)
    elif decoder == "decord":
        reader = _open_with_decord(info)
        for picture in pictures:
            progress.advance()
            # Damaged pictures are not noticed: decord hands them out like sound ones.
            rgb = reader[picture].asnumpy()
            if (rgb.shape[1], rgb.shape[0]) != info.display_size:
                frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
                rgb = frame.reformat(*info.display_size).to_ndarray()
            yield Picture(picture, picture, rgb, False)
    else:
        with closing(Walk(info.path, info.stream_index, info.timeline, info.times)) as walk:
            for one in walk.fetch(pictures):
                rgb = to_rgb(one.frame, info.sample_aspect, info.turn)
                yield Picture(one.picture, one.shown, rgb, one.shown != one.picture)


def _read_files(files: tuple[Path, ...], pictures: list[int]) -> Iterator[Picture]:
    """One image a picture; the nearest sound image stands in for a damaged one."""
    damaged: set[int] = set()
    for picture in pictures:
        steps = (side for step in range(len(files)) for side in (picture - step, picture + step))
        for near in steps:
            if near in damaged or not 0 <= near < len(files):
                continue
            with suppress(MediaError):
                ((_, rgb, is_damaged),) = walk_image(files[near], [0])
                if not is_damaged:
                    yield Picture(picture, near, rgb, near != picture)
                    break
            damaged.add(near)


def _open_with_decord(info: VideoInfo) -> Any:
    """A reader of decord, for a file whose pictures it gives right.

    Raises:
        UsageError: it is not installed, or cannot be loaded.
        MediaError: it would give wrong pictures.
    """
    if importlib.util.find_spec("decord") is None:
        raise UsageError(
            "--decoder decord, which is not installed",
            next_step="pip install 'apollo-video-cli[decord]', or leave it out",
        )
    try:
        import decord  # type: ignore[import-not-found]
    except (ImportError, OSError, RuntimeError):
        raise UsageError(
            "--decoder decord, which is installed and cannot be loaded", next_step="leave it out"
        ) from None
    fault = _unfit_for_decord(info)
    reader = None
    if not fault:
        try:
            reader = decord.VideoReader(str(info.path), num_threads=1)
            starts = np.asarray(reader.get_frame_timestamp(range(len(reader))))[:, 0]
            if len(starts) != info.frame_count:
                fault = f"it counts {len(starts)} pictures of {info.frame_count}"
            elif np.ptp(starts - info.times) > _TIME_SLACK_SECONDS:
                fault = "its times are wrong"
        except (decord.DECORDError, RuntimeError):
            fault = "it cannot open the file"
    if fault:
        raise MediaError(
            f"{shown(info.path)} can't be read right by decord: {fault}",
            next_step="leave out --decoder decord",
        )
    return reader


def _unfit_for_decord(info: VideoInfo) -> str:
    """Why decord gives wrong pictures without an error, as measured; empty when it does not."""
    line = info.timeline
    assert line is not None
    nearest = np.searchsorted(line.keys, line.packet, side="right") - 1
    faults = {
        "it seeks wrongly in this container": line.walk != "seek",
        "it does not mirror": info.mirrored,
        "it keeps to the first format of a file": FORMAT_CHANGES in info.warnings,
        "it shows pictures outside of the edit list": len(line.packet) != len(line.pts),
        "it gives wrong pictures in open groups": bool((nearest != line.key_of).any()),
    }
    return next((fault for fault, is_there in faults.items() if is_there), "")
