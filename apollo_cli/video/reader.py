"""Read the pictures on display at given times, streamed: never a whole video in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError
from apollo_cli.video.backends import read_pictures
from apollo_cli.video.container import shown, unchanged
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.transforms import PixelSpec, resize_square
from apollo_cli.video.walk import Walk
from apollo_cli.words import count

DEFAULT_READING = ReadingOptions()


@dataclass(frozen=True)
class Frame:
    """A picture for one wanted time.

    Attributes:
        position: index of the wanted time among those that were asked for.
        wanted_seconds: that time.
        seconds: when the picture really appears, on the same clock.
        rgb: (H, W, 3) uint8, upright, in display proportions.
    """

    position: int
    wanted_seconds: float
    seconds: float
    rgb: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class ClipBatch:
    """A few clips, ready for the encoders.

    Attributes:
        first_clip: index of the first of them.
        pixels: encoder name to (B, frames, 3, size, size) uint8, not normalised.
        times: (B, frames) float64 seconds, when the pictures really appear.
    """

    first_clip: int
    pixels: dict[str, np.ndarray] = field(repr=False)
    times: np.ndarray


@dataclass
class ReadReport:
    """What a reader found while it decoded; it is filled in as reading goes on.

    Attributes:
        pictures: number of different pictures that were wanted.
        damaged_seconds: times of those that are damaged, where a neighbour stands in.
        kept: how many of them are shown as they are, since an image has no neighbour.
    """

    pictures: int = 0
    damaged_seconds: list[float] = field(default_factory=list)
    kept: int = 0

    def describe(self) -> str:
        """One sentence for the user, empty when all is well."""
        if not self.damaged_seconds:
            return ""
        if self.kept:
            return "the picture is damaged: parts of it may be wrong"
        pictures, first = count(self.pictures, "picture"), f"{self.damaged_seconds[0]:.2f} s"
        damaged = len(self.damaged_seconds)
        told, each = f"are damaged, the first at {first}", "each"
        if damaged == 1:
            told, each = f"is damaged, at {first}", "it"
        return f"{damaged} of {pictures} {told}: the nearest sound one stands in for {each}"


def read_frames(
    info: VideoInfo,
    times: Sequence[float] | np.ndarray,
    reading: ReadingOptions = DEFAULT_READING,
    *,
    report: ReadReport | None = None,
) -> Iterator[Frame]:
    """Yield the picture on display at each time, in ascending order of time.

    Args:
        times: seconds, in any order; a picture wanted twice is decoded once.
        reading: its ``strict``, ``fast`` and ``decoder`` count. Unless it is strict, the nearest
            sound neighbour stands in for a damaged picture. A decoder other than PyAV belongs
            into the child of ``guard``.
        report: is filled with what was found.

    Raises:
        MediaError: nothing can be decoded, or ``strict`` and a picture is damaged.
    """
    wanted = np.asarray(times, dtype=np.float64).reshape(-1)
    pictures = find_pictures(info, wanted, reading.fast)
    order = np.argsort(pictures, kind="stable")
    ascending = pictures[order]
    at = 0
    for picture, seconds, rgb in _read(info, pictures, reading, report):
        while at < len(order) and ascending[at] == picture:
            position = int(order[at])
            yield Frame(position, float(wanted[position]), seconds, rgb)
            at += 1


def check_pictures(info: VideoInfo) -> ReadReport:
    """Decode every picture once, without keeping any, and say which are damaged.

    Raises:
        MediaError: no picture at all can be decoded.
    """
    report = ReadReport()
    if info.timeline is None:
        for _ in read_frames(info, info.times, report=report):
            pass
        return report
    report.pictures = info.frame_count
    walk = Walk(info.path, info.stream_index, info.timeline, info.times)
    try:
        with unchanged(info.path, info.identity):
            for walked in walk.fetch(range(info.frame_count)):
                if walked.shown != walked.picture:
                    report.damaged_seconds.append(float(info.times[walked.picture]))
    finally:
        walk.close()
    return report


def read_clips(
    info: VideoInfo,
    times: np.ndarray,
    specs: Sequence[PixelSpec],
    reading: ReadingOptions = DEFAULT_READING,
    *,
    batch_clips: int = 4,
    report: ReadReport | None = None,
) -> Iterator[ClipBatch]:
    """Yield clips in their own order, a few at a time, each picture resized once an encoder.

    Args:
        times: (clips, frames) wanted seconds.
        specs: what the encoders take.
        batch_clips: most clips in one batch.
        reading, report: as in ``read_frames``.

    Raises:
        MediaError: as ``read_frames``.
    """
    times = np.asarray(times, dtype=np.float64)
    pictures = find_pictures(info, times, reading.fast)
    for group in _forward_groups(pictures, batch_clips):
        walk = _read(info, pictures[group], reading, report)
        squares: dict[int, tuple[float, dict[str, np.ndarray]]] = {}
        for first in range(group.start, group.stop, batch_clips):
            chosen = pictures[first : min(first + batch_clips, group.stop)]
            while not set(chosen.flat) <= squares.keys():
                found = next(walk, None)
                if found is None:
                    raise MediaError(f"{shown(info.path)}: no sound picture is left to show")
                picture, seconds, rgb = found
                made = {spec.name: resize_square(rgb, spec) for spec in specs}
                squares[picture] = (seconds, made)
            yield _batch(first, chosen, squares, specs)
            # Later batches of a group never look back behind this one's first picture.
            oldest = pictures[first + batch_clips : group.stop]
            keep = oldest.min() if oldest.size else np.inf
            squares = {key: value for key, value in squares.items() if key >= keep}


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


def _batch(
    first: int,
    chosen: np.ndarray,
    squares: dict[int, tuple[float, dict[str, np.ndarray]]],
    specs: Sequence[PixelSpec],
) -> ClipBatch:
    shape = chosen.shape
    pixels = {}
    for spec in specs:
        stacked = np.stack([squares[int(p)][1][spec.name] for p in chosen.flat])
        pixels[spec.name] = stacked.reshape(*shape, 3, spec.size, spec.size)
    seconds = np.array([squares[int(p)][0] for p in chosen.flat])
    return ClipBatch(first, pixels, seconds.reshape(shape))


def find_pictures(info: VideoInfo, times: np.ndarray, fast: bool) -> np.ndarray:
    """Indices of the pictures on display at each time, or of the nearest key pictures."""
    pictures = info.frames_at(times)
    return info.key_pictures(pictures) if fast else pictures


def _read(
    info: VideoInfo,
    pictures: np.ndarray,
    reading: ReadingOptions,
    report: ReadReport | None,
) -> Iterator[tuple[int, float, np.ndarray]]:
    """Yield (picture, seconds, upright RGB) for each different picture, ascending."""
    report = ReadReport() if report is None else report
    wanted = np.unique(pictures).tolist()
    report.pictures += len(wanted)
    count = 0
    for read in read_pictures(info, wanted, reading.decoder):
        count += 1
        if read.shown != read.picture or read.damaged:
            report.kept += read.damaged
            seconds = float(info.times[read.picture])
            report.damaged_seconds.append(seconds)
            if reading.strict:
                raise MediaError(
                    f"{shown(info.path)}: the picture at {seconds:.2f} s is damaged",
                    next_step="leave out --strict to let a neighbour stand in",
                )
        yield read.picture, float(info.times[read.shown]), read.rgb
    if count < len(wanted):
        raise MediaError(f"{shown(info.path)}: no picture can be decoded", "it is damaged")
