"""From packet time stamps to the times at which pictures are shown. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from apollo_cli.video.packets import NO_TIME, PacketScan

# A time stamp that falls back by more than this starts a new recording in the same file.
_RESTART_SECONDS = 0.5

# No more pictures than this are stored out of their order, and so many packets are compared to
# tell that from a new recording.
_REORDER_PICTURES, _REORDER_LOOK = 16, 1000


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
        return _next_key(self.keys, number, len(self.pts))

    def leading(self, key: int) -> np.ndarray:
        """Packets behind a key packet whose pictures are shown before it: see there."""
        return leading_packets(self.pts, self.keys, key)


def build_timeline(
    scan: PacketScan,
    order: np.ndarray,
    *,
    may_seek: bool,
    in_order: bool,
    reorders: bool,
) -> Timeline:
    """Choose how the reader may move, and where it must start for each picture.

    Args:
        order: (pictures,) packet numbers in display order.
        may_seek: the container has a true index of its key packets and one time line.
        in_order: the decoder needs every packet from the start on.
        reorders: the decoder gives pictures in another order than the file. If the time stamps
            know nothing of that, as in AVI and ASF, they are decoding times.
    """
    keys = np.flatnonzero(scan.is_key)
    shown_pts = scan.pts[order]
    has_times = not (shown_pts == NO_TIME).any() and not (scan.pts[keys] == NO_TIME).any()
    has_times &= not (reorders and (np.diff(order) > 0).all())
    key_of = np.maximum(np.searchsorted(keys, order, side="right") - 1, 0)
    if in_order or not has_times or not len(keys):
        walk = "straight" if has_times else "count"
    else:
        walk = "seek" if may_seek and len(np.unique(scan.pts)) == len(scan) else "skip"
        # Pictures that are stored behind a key packet and shown before it need the group before.
        key_of -= (scan.pts[keys[key_of]] > shown_pts) & (key_of > 0)
    return Timeline(scan.pts, order, keys, key_of, damaged_spans(scan), walk)


def order_times(
    scan: PacketScan, is_shown: np.ndarray, tick_seconds: float
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Put the shown packets into display order and give each a time.

    A time line that starts again is continued behind its first part; missing times are taken
    from the decoding times where a file has no others, and from their neighbours otherwise.

    Returns:
        Times of the pictures in ticks, float64, ascending; their packet numbers; how often the
        time stamps start again; how many pictures had none.
    """
    numbers = np.flatnonzero(is_shown)
    pts = scan.pts[numbers].astype(np.float64)
    no_pts = scan.pts[numbers] == NO_TIME
    untimed = int(no_pts.sum())
    if untimed == len(numbers) and not (scan.dts[numbers] == NO_TIME).any():
        # AVI stores none: there the k-th picture shown has the k-th decoding time.
        pts, untimed = np.sort(scan.dts[numbers].astype(np.float64)), 0
    elif untimed:
        pts = _fill_missing(pts, no_pts)
    restarts = _restarts(pts, scan.is_key[numbers], _RESTART_SECONDS / tick_seconds)
    order = np.empty(0, dtype=np.int64)
    ticks = np.empty(0)
    for part in np.split(np.arange(len(numbers)), restarts):
        ranked = part[np.argsort(pts[part], kind="stable")]
        shift = 0.0
        if len(ticks) and len(ranked):
            shift = max(0.0, ticks[-1] + typical_step(ticks) - pts[ranked[0]])
        ticks = np.concatenate([ticks, pts[ranked] + shift])
        order = np.concatenate([order, numbers[ranked]])
    return ticks, order, len(restarts), untimed


def typical_step(ticks: np.ndarray) -> float:
    """The median distance of two pictures that are not shown at once; 0 for fewer than two."""
    steps = np.diff(ticks)
    steps = steps[steps > 0]
    return float(np.median(steps)) if len(steps) else 0.0


def leading_packets(pts: np.ndarray, keys: np.ndarray, key: int) -> np.ndarray:
    """Packets behind a key packet whose pictures are shown before it, and need the group before."""
    if key >= len(pts):
        return np.empty(0, dtype=np.int64)
    end = _next_key(keys, key, len(pts))
    return key + np.flatnonzero((pts[key:end] < pts[key]) & (pts[key:end] != NO_TIME))


def damaged_spans(scan: PacketScan) -> tuple[tuple[int, int], ...]:
    """Packets that are built on lost data: behind each gap, up to the next key packet."""
    keys = np.flatnonzero(scan.is_key)
    spans: list[tuple[int, int]] = []
    for gap in scan.gaps:
        # At a splice a key packet follows at once, and nothing is damaged.
        end = _next_key(keys, gap - 1, len(scan))
        if scan.is_shown[gap:end].any() and not (spans and gap < spans[-1][1]):
            spans.append((gap, end))
    return tuple(spans)


def _next_key(keys: np.ndarray, number: int, packets: int) -> int:
    return int(min([*keys[np.searchsorted(keys, number, side="right") :][:1], packets]))


def _restarts(pts: np.ndarray, is_key: np.ndarray, slack: float) -> list[int]:
    """Places at which the time line starts again.

    Only showing times are compared: decoding times, which many demuxers make up, say nothing
    where pictures are far apart. A picture may be shown before some that are stored in front of
    it, but a key picture never is, and no picture before more than a few.
    """
    found: list[int] = []
    start = 0
    while start < len(pts):
        latest = np.maximum.accumulate(pts[start:])
        early = start + 1 + np.flatnonzero(pts[start + 1 :] < latest[:-1] - slack)
        for place in early.tolist():
            before = pts[max(start, place - _REORDER_LOOK) : place]
            if is_key[place] or (before > pts[place]).sum() > _REORDER_PICTURES:
                found.append(place)
                break
        else:
            break
        start = found[-1]
    return found


def _fill_missing(pts: np.ndarray, missing: np.ndarray) -> np.ndarray:
    known = np.flatnonzero(~missing)
    index = np.arange(len(pts))
    if not len(known):
        return index.astype(np.float64)
    step = typical_step(np.sort(pts[known]))
    filled = np.interp(index, known, pts[known])
    # Matroska can't tell times below 0: those pictures are all shown before the others.
    before = missing & (index < known[0] + _REORDER_PICTURES) & missing[0]
    after = index > known[-1]
    filled[before] = pts[known].min() - step * np.arange(before.sum(), 0, -1)
    filled[after] = pts[known].max() + step * (index[after] - known[-1])
    return np.where(missing, filled, pts)
