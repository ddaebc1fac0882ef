"""Look at a video or image once: true times, true size, and what is wrong with the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import av.container
import av.video.stream
import numpy as np

from apollo_cli.errors import MediaError
from apollo_cli.video.findings import describe_faults
from apollo_cli.video.images import read_image_facts
from apollo_cli.video.opening import open_container, resolve_file, shown, sniff
from apollo_cli.video.packets import PacketScan, scan_packets
from apollo_cli.video.picture import Turn, display_shape
from apollo_cli.video.timeline import Timeline, build_timeline, order_times, typical_step
from apollo_cli.video.trial import FirstPictures, decode_first

# 8192 x 8192: the largest picture that is decoded, about 200 MB as RGB.
MAX_PIXELS = 1 << 26

# Each of these keeps a palette from the first packet on, or is not safe to enter midway.
_STRAIGHT_CODECS = (
    "msrle",
    "msvideo1",
    "cinepak",
    "smc",
    "8bps",
    "qtrle",
    "flic",
    "zmbv",
    "rawvideo",
)
_TRUE_TIME_CONTAINERS = ("mov", "matroska", "mpegts", "mpeg", "flv", "nut")
_INDEXED_CONTAINERS = ("mov", "matroska")


@dataclass(frozen=True)
class VideoInfo:
    """What a file holds and when each of its pictures is shown.

    Attributes:
        path: absolute.
        kind: ``video`` or ``image``; an animation with more than one picture is a video.
        times: (n,) float64, seconds, ascending: when each picture appears, on the player's clock.
            mp4 and mov keep their time line as edited; others count from the container's start.
        duration_seconds: end of the last picture's display, counted from 0; 0 for an image.
        stored_size, display_size: width and height; the latter after pixel aspect and rotation.
        rotation, mirrored: the stored picture is mirrored left to right, then turned clockwise
            by ``rotation`` degrees.
        sample_aspect: width of a pixel over its height, None where it is square or not given.
        source_fps: average over the file; None when unknown.
        constant_rate: all pictures are equally far apart, up to the container's rounding.
        clock_offset_seconds: what was taken off the container's time stamps.
        tick_seconds: how finely the container stores times.
        stream_index: number of the stream among all streams of the file.
        warnings: one short sentence each, empty for a sound file.
        timeline: how the reader finds the pictures; None for images.
    """

    path: Path
    kind: Literal["video", "image"]
    times: np.ndarray = field(repr=False)
    duration_seconds: float
    stored_size: tuple[int, int]
    display_size: tuple[int, int]
    codec: str
    container: str
    rotation: int = 0
    mirrored: bool = False
    sample_aspect: Fraction | None = None
    source_fps: float | None = None
    constant_rate: bool = True
    clock_offset_seconds: float = 0.0
    tick_seconds: float = 0.0
    stream_index: int = 0
    warnings: tuple[str, ...] = ()
    timeline: Timeline | None = field(default=None, repr=False)

    @property
    def frame_count(self) -> int:
        """Number of pictures shown."""
        return len(self.times)

    @property
    def turn(self) -> Turn:
        """What makes a stored picture upright."""
        return Turn(self.rotation, self.mirrored)

    def frame_at(self, seconds: float) -> int:
        """Index of the picture on display then; the first before the start, the last after the end.

        Times are compared up to half a tick of the container, since it rounds its own to ticks.
        """
        return int(self.frames_at(np.array([seconds]))[0])

    def frames_at(self, seconds: np.ndarray) -> np.ndarray:
        """As ``frame_at``, for an array of any shape."""
        slack = max(min(self.tick_seconds / 2, typical_step(self.times) / 4), 1e-6)
        found = np.searchsorted(self.times, np.asarray(seconds, np.float64) + slack, side="right")
        return np.clip(found - 1, 0, len(self.times) - 1)


def probe(path: str | Path, *, stream: int | None = None) -> VideoInfo:
    """Read every packet of a file, decode its first pictures, and say what is in it.

    Args:
        path: a plain file; links are followed.
        stream: number of the stream among all of the file; None takes the main picture stream.

    Raises:
        MediaError: not a plain file, not a video or image, nothing to decode, or encrypted.
    """
    absolute = resolve_file(path)
    if sniff(absolute) == "image":
        return _probe_image(absolute)
    with open_container(absolute) as container:
        picked = pick_stream(container, absolute, stream)
        # Matroska loads its index at the first seek; mov has all of it when it isn't fragmented.
        is_mov = container.format.name.startswith("mov")
        has_index = len(picked.index_entries) > 0 or not is_mov
        scan = scan_packets(container, picked)
        check_content(absolute, scan)
        first = decode_first(absolute, picked.index, scan)
        may_seek = has_index and container.format.name.startswith(_INDEXED_CONTAINERS)
        return _assemble(absolute, container, picked, scan=scan, first=first, may_seek=may_seek)


def _probe_image(path: Path) -> VideoInfo:
    facts = read_image_facts(path, MAX_PIXELS)
    moves = facts.frames > 1
    step = typical_step(facts.seconds)
    misnamed = path.suffix.lower() in (".mp4", ".mov", ".mkv", ".avi", ".webm", ".m4v", ".ts")
    return VideoInfo(
        path=path,
        kind="video" if moves else "image",
        times=facts.seconds[:-1],
        duration_seconds=float(facts.seconds[-1]),
        stored_size=facts.stored_size,
        display_size=facts.display_size,
        codec=facts.codec,
        container=facts.codec,
        source_fps=facts.frames / float(facts.seconds[-1]) if moves else None,
        constant_rate=bool(np.allclose(np.diff(facts.seconds), step)),
        tick_seconds=0.001,
        warnings=(f"an image ({facts.codec}) under the name of a video",) if misnamed else (),
    )


def pick_stream(
    container: av.container.InputContainer, path: Path, index: int | None
) -> av.video.stream.VideoStream:
    """The stream of that number, or the main moving one; cover art is never taken for a video.

    Raises:
        MediaError: there is no picture stream, or none of that number.
    """
    moving = [s for s in container.streams.video if not s.disposition & s.disposition.attached_pic]
    if not moving:
        has_sound = bool(container.streams.audio)
        what = "has sound only" if has_sound else "has no picture stream"
        raise MediaError(f"{shown(path)} {what}", "a picture stream is needed")
    if index is not None:
        for candidate in moving:
            if candidate.index == index:
                return candidate
        known = ", ".join(str(s.index) for s in moving)
        raise MediaError(f"--stream {index} of {shown(path)}", f"its picture streams are {known}")
    best = container.streams.best("video")
    return best if isinstance(best, av.video.stream.VideoStream) and best in moving else moving[0]


def check_content(path: Path, scan: PacketScan) -> None:
    """Refuse a stream without anything to decode.

    Raises:
        MediaError: no packets, or protected ones.
    """
    if scan.encrypted:
        raise MediaError(f"{shown(path)} is encrypted", "an unprotected file is needed")
    if not scan.is_shown.any():
        raise MediaError(f"{shown(path)} shows no picture: its picture stream is empty")


def _assemble(
    path: Path,
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    *,
    scan: PacketScan,
    first: FirstPictures,
    may_seek: bool,
) -> VideoInfo:
    assert stream.time_base is not None
    tick = float(stream.time_base)
    is_shown = scan.is_shown & ~first.undecodable
    if not is_shown.any():
        raise MediaError(f"{shown(path)} shows no picture that can be decoded")
    times = order_times(scan, is_shown, tick)
    rate = stream.codec_context.framerate or stream.average_rate or stream.guessed_rate
    nominal_step = 1 / float(rate) / tick if rate else 0.04 / tick
    ticks = times.ticks
    if times.untimed == len(ticks):
        ticks = ticks * nominal_step
    step = typical_step(ticks) or float(scan.durations[times.order[-1]]) or nominal_step
    last = float(scan.durations[times.order[-1]])
    last = last if 0 < last < 100 * step else step
    offset = _clock_offset(container, ticks, tick)
    # Dividing last gives the nearest float to each true time.
    seconds = ticks * stream.time_base.numerator / stream.time_base.denominator - offset
    aspect = stream.sample_aspect_ratio
    aspect = None if not aspect or aspect == 1 else aspect
    width, height = first.size
    in_order = first.pixel_format == "pal8" or stream.codec_context.name in _STRAIGHT_CODECS
    return VideoInfo(
        path=path,
        kind="video",
        times=seconds,
        duration_seconds=float(seconds[-1] + last * tick),
        stored_size=(width, height),
        display_size=first.turn.size(*display_shape(width, height, aspect)),
        codec=stream.codec_context.name,
        container=container.format.name,
        rotation=first.turn.rotation,
        mirrored=first.turn.mirrored,
        sample_aspect=aspect,
        source_fps=_average_rate(seconds, stream.average_rate),
        constant_rate=_is_constant(ticks, step),
        clock_offset_seconds=offset,
        tick_seconds=tick,
        stream_index=stream.index,
        warnings=describe_faults(
            container,
            stream,
            scan=scan,
            first=first,
            times=times,
            seconds=seconds,
            offset_seconds=offset,
            aspect=aspect,
        ),
        timeline=build_timeline(
            scan,
            times,
            may_seek=may_seek,
            in_order=in_order,
            reorders=first.reorders and not container.format.name.startswith(_TRUE_TIME_CONTAINERS),
        ),
    )


def _clock_offset(
    container: av.container.InputContainer, ticks: np.ndarray, tick_seconds: float
) -> float:
    first = float(ticks[0]) * tick_seconds
    if container.format.name.startswith("mov"):
        return min(0.0, first)
    start = container.start_time
    return min(first, start / av.time_base) if start is not None else first


def _average_rate(seconds: np.ndarray, nominal: Fraction | None) -> float | None:
    if len(seconds) < 2 or seconds[-1] <= seconds[0]:
        return float(nominal) if nominal else None
    measured = (len(seconds) - 1) / float(seconds[-1] - seconds[0])
    # Coarse ticks blur the measured rate; the nominal one is exact where the two agree.
    return float(nominal) if nominal and abs(nominal / measured - 1) < 2e-3 else measured


def _is_constant(ticks: np.ndarray, step: float) -> bool:
    return bool((np.abs(np.diff(ticks) - step) <= max(1.01, 0.02 * step)).all())
