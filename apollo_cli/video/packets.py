"""Read every packet of a picture stream once, without decoding."""

from __future__ import annotations

import re
from dataclasses import dataclass

import av
import av.container
import av.video.stream
import numpy as np
from av.error import FFmpegError

from apollo_cli.video.feed import silence_other_streams

NO_TIME = np.iinfo(np.int64).min

# In these a packet of zeros can only be a hole in the file.
_NEVER_ZERO = ("h264", "hevc", "vvc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mjpeg")

# These never hold three zeros in a row, but for the lengths in front of each part.
_ESCAPED = ("h264", "hevc", "vvc")
_HOLE_BYTES = 8

_SEQUENCE_HEADER = {
    "h264": re.compile(rb"\x00\x00\x01[\x07\x27\x47\x67](.{4,64}?)\x00\x00", re.DOTALL),
    "hevc": re.compile(rb"\x00\x00\x01\x42\x01(.{4,96}?)\x00\x00\x01", re.DOTALL),
    "mpeg2video": re.compile(rb"\x00\x00\x01\xb3(.{4})", re.DOTALL),
    "mpeg1video": re.compile(rb"\x00\x00\x01\xb3(.{4})", re.DOTALL),
}


@dataclass(frozen=True)
class PacketScan:
    """All packets of one stream in file order.

    Attributes:
        pts, dts: time stamps in ticks, NO_TIME where the file gives none.
        durations: ticks, 0 where unknown.
        is_key: a decoder may start here.
        is_shown: the packet holds a picture that a player shows; packets outside of the edit
            list, hidden reference pictures and packets without content are not.
        formats: how many different picture formats the sequence headers name.
        gaps: numbers of the packets from which on data is missing.
        cut_short: the last packet is incomplete: the file ends early.
        blank: number of packets with a hole of zeros.
        encrypted: the content is protected.
    """

    pts: np.ndarray
    dts: np.ndarray
    durations: np.ndarray
    is_key: np.ndarray
    is_shown: np.ndarray
    formats: int
    gaps: list[int]
    cut_short: bool
    blank: int
    encrypted: bool


def scan_packets(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream
) -> PacketScan:
    """Demux a whole stream once. Damage ends the scan where the container can't be followed."""
    silence_other_streams(container, stream)
    codec = stream.codec_context.name
    is_transport = container.format.name == "mpegts"
    never_zero = codec in _NEVER_ZERO
    has_lengths = codec in _ESCAPED and container.format.name.startswith(("mov", "matroska"))
    rows: list[tuple[int, int, int, bool, bool]] = []
    formats: set[bytes] = set()
    gaps: list[int] = []
    blank = 0
    last_corrupt = encrypted = False
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except FFmpegError:
            last_corrupt = True
            break
        if packet is None:
            break
        if packet.size == 0:
            continue
        if not rows:
            encrypted = packet.has_sidedata("encryption_info")
        is_blank = _has_hole(packet, never_zero, has_lengths)
        blank += is_blank
        key = packet.is_keyframe
        if key:
            formats |= _picture_format(codec, packet)
        pts, dts = packet.pts, packet.dts
        rows.append(
            (
                NO_TIME if pts is None else pts,
                NO_TIME if dts is None else dts,
                packet.duration or 0,
                key and not is_blank,
                not (packet.is_discard or is_blank or _is_hidden(codec, packet)),
            )
        )
        last_corrupt = packet.is_corrupt
        if is_blank:
            gaps.append(len(rows) - 1)
        # Other containers mark the last packet only, when the file ends inside of it.
        if last_corrupt and is_transport:
            # The mark of a transport stream comes up to one picture early.
            gaps.append(len(rows) + 1)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    is_shown = columns[4].astype(bool)
    cut_short = last_corrupt and not is_transport
    if cut_short and len(is_shown):
        is_shown[-1] = False
    return PacketScan(
        pts=columns[0],
        dts=columns[1],
        durations=columns[2],
        is_key=columns[3].astype(bool),
        is_shown=is_shown,
        formats=len(formats),
        gaps=gaps,
        cut_short=cut_short,
        blank=blank,
        encrypted=encrypted,
    )


def _has_hole(packet: av.Packet, never_zero: bool, has_lengths: bool) -> bool:
    data = memoryview(packet)
    return never_zero and not (any(data[:64]) and (not has_lengths or any(data[-_HOLE_BYTES:])))


def _is_hidden(codec: str, packet: av.Packet) -> bool:
    """Whether a packet only holds a reference picture that is never shown (VP8 and VP9)."""
    if codec not in ("vp8", "vp9"):
        return False
    data = memoryview(packet)
    first = data[0]
    if codec == "vp8":
        return not first >> 4 & 1
    is_superframe = data[-1] & 0xE0 == 0xC0
    profile = (first >> 5 & 1) | (first >> 4 & 1) << 1
    shift = 3 if profile < 3 else 2
    shows_existing = first >> shift & 1
    shows_itself = first >> (shift - 2) & 1
    return not (is_superframe or shows_existing or shows_itself)


def _picture_format(codec: str, packet: av.Packet) -> set[bytes]:
    """The part of a key packet that fixes size and format, where the codec repeats it there."""
    if codec == "vp8":
        return {bytes(memoryview(packet)[6:10])}
    if codec == "vp9":
        return {bytes(memoryview(packet)[4:9])}
    pattern = _SEQUENCE_HEADER.get(codec)
    found = pattern.search(bytes(memoryview(packet)[:2048])) if pattern else None
    return {found[1]} if found else set()
