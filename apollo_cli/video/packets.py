"""Read every packet of a picture stream once, without decoding."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass

import av
import av.container
import av.video.stream
import numpy as np
from av.error import FFmpegError

from apollo_cli.video.feed import filled_packets, silence_other_streams

NO_TIME = np.iinfo(np.int64).min

# In these a packet of zeros can only be a hole in the file.
_NEVER_ZERO = ("h264", "hevc", "vvc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mjpeg")

# These never hold three zeros in a row, but for the lengths in front of each part.
_ESCAPED = ("h264", "hevc", "vvc")
_HOLE_BYTES = 16

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


class _Columns:
    """What is kept of each packet, in a few bytes: a day of video has millions of them."""

    def __init__(self, codec: str, container: str) -> None:
        self._codec = codec
        self._never_zero = codec in _NEVER_ZERO
        self._has_lengths = codec in _ESCAPED and container.startswith(("mov", "matroska"))
        self._is_transport = container == "mpegts"
        self.stamps = array("q")
        self.flags = bytearray()
        self.formats: set[bytes] = set()
        self.gaps: list[int] = []
        self.blank = 0
        self.encrypted = False
        self.ends_broken = False

    def add(self, packet: av.Packet) -> None:
        number = len(self.flags)
        if number == 0:
            self.encrypted = packet.has_sidedata("encryption_info")
        data = memoryview(packet)
        is_blank = self._never_zero and (
            not any(data[:_HOLE_BYTES]) or (self._has_lengths and not any(data[-_HOLE_BYTES:]))
        )
        is_key = packet.is_keyframe and not is_blank
        is_hidden = packet.is_discard or is_blank or _is_hidden(self._codec, data)
        pts, dts = packet.pts, packet.dts
        self.stamps.append(NO_TIME if pts is None else pts)
        self.stamps.append(NO_TIME if dts is None else dts)
        self.stamps.append(packet.duration or 0)
        self.flags.append(is_key | (not is_hidden) << 1)
        if is_key:
            self.formats |= _picture_format(self._codec, data)
        if is_blank:
            self.blank += 1
            self.gaps.append(number)
        self.ends_broken = packet.is_corrupt
        # Other containers mark the last packet only, when the file ends inside of it.
        if self.ends_broken and self._is_transport:
            # The mark of a transport stream comes up to one picture early.
            self.gaps.append(number + 2)

    def finish(self) -> PacketScan:
        stamps = np.frombuffer(self.stamps, dtype=np.int64).reshape(-1, 3)
        flags = np.frombuffer(self.flags, dtype=np.uint8)
        is_shown = flags & 2 > 0
        cut_short = self.ends_broken and not self._is_transport
        if cut_short:
            is_shown[-1:] = False
        return PacketScan(
            pts=stamps[:, 0].copy(),
            dts=stamps[:, 1].copy(),
            durations=stamps[:, 2].copy(),
            is_key=flags & 1 > 0,
            is_shown=is_shown,
            formats=len(self.formats),
            gaps=self.gaps,
            cut_short=cut_short,
            blank=self.blank,
            encrypted=self.encrypted,
        )


def scan_packets(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, most: int
) -> PacketScan | None:
    """Demux a whole stream once; None when it has more than ``most`` packets.

    Damage ends the scan where the container can't be followed.
    """
    silence_other_streams(container, stream)
    columns = _Columns(stream.codec_context.name, container.format.name)
    try:
        for packet in filled_packets(container, stream):
            columns.add(packet)
            if len(columns.flags) > most:
                return None
    except FFmpegError:
        columns.ends_broken = True
    return columns.finish()


def _is_hidden(codec: str, data: memoryview) -> bool:
    """Whether a packet only holds a reference picture that is never shown (VP8 and VP9)."""
    if codec not in ("vp8", "vp9"):
        return False
    first = data[0]
    if codec == "vp8":
        return not first >> 4 & 1
    is_superframe = data[-1] & 0xE0 == 0xC0
    profile = (first >> 5 & 1) | (first >> 4 & 1) << 1
    shift = 3 if profile < 3 else 2
    shows_existing = first >> shift & 1
    shows_itself = first >> (shift - 2) & 1
    return not (is_superframe or shows_existing or shows_itself)


def _picture_format(codec: str, data: memoryview) -> set[bytes]:
    """The part of a key packet that fixes size and format, where the codec repeats it there."""
    if codec == "vp8":
        return {bytes(data[6:10])}
    if codec == "vp9":
        return {bytes(data[4:9])}
    pattern = _SEQUENCE_HEADER.get(codec)
    found = pattern.search(bytes(data[:2048])) if pattern else None
    return {found[1]} if found else set()
