"""What is known about a video or image before any of it is read. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from apollo_cli.video.sampler import FrameGrid

# Time stamp of a packet that has none.
NO_TIME = np.iinfo(np.int64).min

# A warning that the reader acts on.
FORMAT_CHANGES = "the picture's size or format changes on the way"


@dataclass(frozen=True)
class Timeline:
    """Which packet holds which picture, and how the reader may move among them.

    Attributes:
        pts: (packets,) time stamps in ticks, NO_TIME where the file gives none.
        packet: (pictures,) number of the packet that holds the picture.
        keys: numbers of all key packets, ascending; damage ends there.
        key_of: (pictures,) position in ``keys`` of the last one that gives the picture right.
        damaged: spans of packets, from the first up to before the last, known to be damaged.
        walk: ``seek`` may jump in the file; ``skip`` reads on but leaves out packets; ``straight``
            decodes everything from the start; ``count`` does so too, and knows a picture only by
            its place among those that come out.
    """

    pts: np.ndarray
    packet: np.ndarray
    keys: np.ndarray
    key_of: np.ndarray
    damaged: tuple[tuple[int, int], ...]
    walk: Literal["seek", "skip", "straight", "count"]

    @property
    def enters_anywhere(self) -> bool:
        """Whether decoding may start at any key packet."""
        return self.walk in ("seek", "skip")

    def group_end(self, number: int) -> int:
        """The first key packet behind a packet; the number of packets where none is left."""
        return next_key(self.keys, number, len(self.pts))

    def leading(self, key: int) -> np.ndarray:
        """Packets behind a key packet whose pictures are shown before that of the key packet."""
        return leading_packets(self.pts, self.keys, key)


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
        identity: of the file that was probed, see ``container.identify``; empty for a folder.
        files: one image a picture, for a folder of images; else empty.
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
    identity: tuple[int, ...] = field(default=(), repr=False)
    files: tuple[Path, ...] = field(default=(), repr=False)

    @property
    def frame_count(self) -> int:
        """Number of pictures shown."""
        return len(self.times)

    def frames_at(self, seconds: np.ndarray) -> np.ndarray:
        """Indices of the pictures on display then, in the shape of ``seconds``.

        Before the start it is the first, after the end the last. Times are compared up to half a
        tick of the container, since it rounds its own to ticks.
        """
        slack = max(min(self.tick_seconds / 2, typical_step(self.times) / 4), 1e-6)
        found = np.searchsorted(self.times, np.asarray(seconds, np.float64) + slack, side="right")
        return np.clip(found - 1, 0, len(self.times) - 1)

    @cached_property
    def grid(self) -> FrameGrid:
        """What a sampler may follow."""
        line = self.timeline
        keys = np.arange(self.frame_count)
        if line is not None and line.enters_anywhere:
            keys = np.flatnonzero(np.isin(line.packet, line.keys))
        return FrameGrid(self.times, self.source_fps if self.constant_rate else None, keys)

    def nearest_keys(self, pictures: np.ndarray) -> np.ndarray:
        """The key picture nearest in time to each picture, before or after it."""
        keys = self.grid.keys
        if not len(keys):
            return pictures
        after = np.clip(np.searchsorted(keys, pictures), 0, len(keys) - 1)
        before = np.maximum(after - 1, 0)
        seconds = self.times[pictures]
        is_before = np.abs(self.times[keys[before]] - seconds) <= np.abs(
            self.times[keys[after]] - seconds
        )
        return np.where(is_before, keys[before], keys[after])


def typical_step(ticks: np.ndarray) -> float:
    """The median distance of two pictures that are not shown at once; 0 for fewer than two."""
    steps = np.diff(ticks)
    steps = steps[steps > 0]
    return float(np.median(steps)) if len(steps) else 0.0


def leading_packets(pts: np.ndarray, keys: np.ndarray, key: int) -> np.ndarray:
    """Packets behind a key packet whose pictures are shown before it, and need the group before."""
    if key >= len(pts):
        return np.empty(0, dtype=np.int64)
    end = next_key(keys, key, len(pts))
    return key + np.flatnonzero((pts[key:end] < pts[key]) & (pts[key:end] != NO_TIME))


def next_key(keys: np.ndarray, number: int, packets: int) -> int:
    """The first key packet behind a packet; the number of packets where none is left."""
    return int(min([*keys[np.searchsorted(keys, number, side="right") :][:1], packets]))
