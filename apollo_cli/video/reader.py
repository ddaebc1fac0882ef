"""Read the pictures on display at given times, streamed: never a whole video in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from apollo_cli.errors import MediaError
from apollo_cli.video.images import walk_image
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.limits import Limits
from apollo_cli.video.opening import shown
from apollo_cli.video.picture import to_rgb
from apollo_cli.video.transforms import PixelSpec, resize_square
from apollo_cli.video.walk import Walk

# The probe has checked the size, under the limits that the user gave.
_UNLIMITED = Limits(max_pixels=1 << 62)


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
    """

    pictures: int = 0
    damaged_seconds: list[float] = field(default_factory=list)

    def describe(self) -> str:
        """One sentence for the user, empty when all is well."""
        if not self.damaged_seconds:
            return ""
        return (
            f"{len(self.damaged_seconds)} of {self.pictures} pictures are damaged, the first at "
            f"{self.damaged_seconds[0]:.2f} s: the nearest sound one stands in for each"
        )


def read_frames(
    info: VideoInfo,
    times: Sequence[float] | np.ndarray,
    *,
    strict: bool = False,
    fast: bool = False,
    report: ReadReport | None = None,
) -> Iterator[Frame]:
    """Yield the picture on display at each time, in ascending order of time.

    Args:
        times: seconds, in any order; a picture wanted twice is decoded once.
        strict: a damaged picture is an error; otherwise its nearest sound neighbour stands in.
        fast: give the key picture nearest to each time instead, which costs about a tenth.
        report: is filled with what was found.

    Raises:
        MediaError: nothing can be decoded, or ``strict`` and a picture is damaged.
    """
    wanted = np.asarray(times, dtype=np.float64).reshape(-1)
    pictures = info.frames_at(wanted)
    pictures = info.key_pictures(pictures) if fast else pictures
    order = np.argsort(pictures, kind="stable")
    ascending = pictures[order]
    at = 0
    for picture, seconds, rgb in _walk(info, np.unique(pictures).tolist(), strict, report):
        while at < len(order) and ascending[at] == picture:
            position = int(order[at])
            yield Frame(position, float(wanted[position]), seconds, rgb)
            at += 1


def read_clips(
    info: VideoInfo,
    times: np.ndarray,
    specs: Sequence[PixelSpec],
    *,
    batch_clips: int = 4,
    strict: bool = False,
    fast: bool = False,
    report: ReadReport | None = None,
) -> Iterator[ClipBatch]:
    """Yield clips in their own order, a few at a time, each picture resized once an encoder.

    Args:
        times: (clips, frames) wanted seconds.
        specs: what the encoders take.
        batch_clips: most clips in one batch.
        strict, fast, report: as in ``read_frames``.

    Raises:
        MediaError: as ``read_frames``.
    """
    times = np.asarray(times, dtype=np.float64)
    pictures = info.frames_at(times)
    pictures = info.key_pictures(pictures) if fast else pictures
    for group in _forward_groups(pictures, batch_clips):
        walk = _walk(info, np.unique(pictures[group]).tolist(), strict, report)
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


def _walk(
    info: VideoInfo, pictures: list[int], strict: bool, report: ReadReport | None
) -> Iterator[tuple[int, float, np.ndarray]]:
    """Yield (picture, seconds, upright RGB) for ascending pictures."""
    report = ReadReport() if report is None else report
    report.pictures += len(pictures)
    if info.files:
        for picture in pictures:
            for _, rgb in walk_image(info.files[picture], [0], _UNLIMITED):
                yield picture, float(info.times[picture]), rgb
        return
    if info.timeline is None:
        for picture, rgb in walk_image(info.path, pictures, _UNLIMITED):
            yield picture, float(info.times[picture]), rgb
        return
    walk = Walk(info.path, info.stream_index, info.timeline)
    try:
        count = 0
        for walked in walk.fetch(pictures):
            count += 1
            if walked.shown != walked.picture:
                report.damaged_seconds.append(float(info.times[walked.picture]))
                if strict:
                    raise MediaError(
                        f"{shown(info.path)}: the picture at "
                        f"{info.times[walked.picture]:.2f} s is damaged",
                        next_step="leave out --strict to let a neighbour stand in",
                    )
            rgb = to_rgb(walked.frame, info.sample_aspect, info.turn)
            yield walked.picture, float(info.times[walked.shown]), rgb
        if count < len(pictures):
            raise MediaError(f"{shown(info.path)}: no picture can be decoded", "it is damaged")
    finally:
        walk.close()
