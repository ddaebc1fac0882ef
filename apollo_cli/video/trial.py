"""Decode the first pictures of a stream: what they look like, and which never come."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from apollo_cli.errors import MediaError
from apollo_cli.video.container import shown
from apollo_cli.video.feed import Feed
from apollo_cli.video.packets import NO_TIME, PacketScan
from apollo_cli.video.picture import Turn, read_turn, turn_angle
from apollo_cli.video.timeline import leading_packets
from apollo_cli.video.tonemap import is_hdr

_PACKETS = 6
_MOST_PACKETS = 300


@dataclass(frozen=True)
class FirstPictures:
    """What decoding the start of a stream has shown.

    Attributes:
        size: stored width and height.
        pixel_format: FFmpeg's name.
        turn: from the display matrix.
        odd_angle: degrees of a turn that is no right angle, else 0.
        interlaced, hdr: flags of the first picture.
        reorders: the decoder holds pictures back, to put them into another order.
        undecodable: (packets,) bool: in front of the first key packet, or behind it and built on
            pictures that are not in the file.
    """

    size: tuple[int, int]
    pixel_format: str
    turn: Turn
    odd_angle: float
    interlaced: bool
    hdr: bool
    reorders: bool
    undecodable: np.ndarray


def decode_first(path: Path, stream_index: int, scan: PacketScan) -> FirstPictures:
    """Decode from the first key packet on, until the pictures that lead it have had their chance.

    Raises:
        MediaError: nothing comes out.
    """
    keys = np.flatnonzero(scan.is_key)
    start = int(keys[0]) if len(keys) else 0
    undecodable = np.zeros(len(scan.pts), dtype=bool)
    undecodable[:start] = True
    leads = np.zeros_like(undecodable)
    leads[leading_packets(scan.pts, keys, start)] = True
    leads &= scan.is_shown
    last = int(np.flatnonzero(leads)[-1]) if leads.any() else start
    stop = min(start + _MOST_PACKETS, last + _PACKETS)
    came: set[int] = set()
    first: av.VideoFrame | None = None
    pictures: list[tuple[int, av.VideoFrame]] = []
    is_sound = True
    feed = Feed(path, stream_index)
    try:
        feed.skip_to(start)
        while first is None or feed.number < stop:
            packet = feed.read()
            pictures = feed.drain() if packet is None else feed.decode(packet)
            came.update(number for number, _ in pictures)
            is_sound &= not feed.is_broken
            if first is None and pictures:
                first = pictures[0][1]
            if packet is None:
                break
        came.update(number for number, _ in feed.drain())
    finally:
        feed.close()
    if first is None:
        raise MediaError(f"{shown(path)}: no picture can be decoded", "it may be damaged")
    numbers = np.arange(len(scan.pts))
    undecodable |= leads & ~np.isin(numbers, list(came))
    if is_sound and came and (shown_first := scan.pts[min(came)]) != NO_TIME:
        # Where no picture stands alone, the decoder holds back all until the whole is refreshed.
        undecodable |= (numbers < min(came)) & (scan.pts < shown_first)
    found = FirstPictures(
        size=(first.width, first.height),
        pixel_format=first.format.name,
        turn=read_turn(first),
        odd_angle=angle if abs((angle := turn_angle(first)[0]) / 90 % 1 - 0.5) < 0.49 else 0.0,
        interlaced=first.interlaced_frame,
        hdr=is_hdr(first),
        reorders=feed.stream.codec_context.has_b_frames,
        undecodable=undecodable,
    )
    # Asked for its side data, a picture of PyAV refers to itself: nothing else would free it soon.
    del first, pictures
    gc.collect(1)
    return found
