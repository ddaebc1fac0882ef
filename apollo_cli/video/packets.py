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

from apollo_cli.video.coding import length_bytes, parameter_sets
from apollo_cli.video.feed import filled_packets, picture_streams, silence_other_streams

NO_TIME = np.iinfo(np.int64).min

# In these a packet of zeros can only be a hole in the file.
_NEVER_ZERO = ("h264", "hevc", "vvc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mjpeg")

_HOLE_BYTES = 16

# Bytes from one unit of a transport stream to the next, of the kinds that there are.
_TRANSPORT_STEPS = (188, 192, 204)

# Parameter sets of each codec, by kind of NAL unit; the first kind fixes the picture's format.
_PARAMETER_SETS = {"h264": (7, 8), "hevc": (33, 32, 34)}
_HEADER_BYTES = 2048

_SEQUENCE_HEADERS = {
    "mpeg1video": re.compile(rb"\x00\x00\x01\xb3(.{4})", re.DOTALL),
    "mpeg2video": re.compile(rb"\x00\x00\x01\xb3(.{4})", re.DOTALL),
    "mjpeg": re.compile(rb"\xff[\xc0-\xc2]\x00[\x0b\x11\x14]\x08(.{4})", re.DOTALL),
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
        needs_all: a header changes on the way and is not repeated, so nothing may be left out.
        gaps: numbers of the packets from which on data is missing.
        cut_short: the last packet is incomplete: the file ends early.
        blank: number of packets with a hole of zeros.
        late_streams: further streams appear on the way.
        elsewhere: first and last decoding time, in seconds, of each other picture stream.
        encrypted: the content is protected.
    """

    pts: np.ndarray
    dts: np.ndarray
    durations: np.ndarray
    is_key: np.ndarray
    is_shown: np.ndarray
    formats: int
    needs_all: bool
    gaps: list[int]
    cut_short: bool
    blank: int
    late_streams: bool
    elsewhere: dict[int, tuple[float, float]]
    encrypted: bool


class _Columns:
    """What is kept of each packet, in a few bytes: a day of video has millions of them."""

    def __init__(self, stream: av.video.stream.VideoStream, container: str) -> None:
        context = stream.codec_context
        self._codec = context.name
        self._never_zero = self._codec in _NEVER_ZERO
        self._lengths = length_bytes(self._codec, context.extradata)
        self._is_transport = container == "mpegts"
        self._header = context.extradata or b""
        self._is_changed = False
        self._zero_tails: list[int] = []
        self._place = -1
        self._steps = _TRANSPORT_STEPS
        self.stamps = array("q")
        self.flags = bytearray()
        self.formats: set[bytes] = set()
        self.needs_all = False
        self.gaps: list[int] = []
        self.blank = 0
        self.late_streams = False
        self.elsewhere: dict[int, tuple[float, float]] = {}
        self.encrypted = False
        self.ends_broken = False

    def add(self, packet: av.Packet) -> None:
        number = len(self.flags)
        if number == 0:
            self.encrypted = packet.has_sidedata("encryption_info")
        data = memoryview(packet)
        is_blank = self._never_zero and not any(data[:_HOLE_BYTES])
        is_key = packet.is_keyframe and not is_blank
        is_hidden = packet.is_discard or is_blank or _is_hidden(self._codec, data)
        pts, dts = packet.pts, packet.dts
        self.stamps.append(NO_TIME if pts is None else pts)
        self.stamps.append(NO_TIME if dts is None else dts)
        self.stamps.append(packet.duration or 0)
        self.flags.append(is_key | (not is_hidden) << 1)
        if is_key:
            if packet.has_sidedata("new_extradata"):
                self._note_header(bytes(packet.get_sidedata("new_extradata")))
            self._note_formats(data)
        if is_blank:
            if self._zero_tails[-1:] == [number - 1]:
                self._blank_out(number - 1)
            self._blank_out(number)
        elif self._lengths and not any(data[-_HOLE_BYTES:]):
            self._zero_tails.append(number)
        if self._is_transport and packet.pos is not None:
            self._follow(number, packet.pos)
        self.ends_broken = packet.is_corrupt
        # Other containers mark the last packet only, when the file ends inside of it.
        if self.ends_broken and self._is_transport:
            # The mark of a transport stream comes up to one picture early.
            self.gaps.append(number + 2)

    def _follow(self, number: int, place: int) -> None:
        """Units of a transport stream follow each other at one distance, unless bytes are lost."""
        if self._place >= 0 and place > self._place:
            kept = tuple(s for s in self._steps if (place - self._place) % s == 0)
            if not kept:
                # The picture in front may be cut, too.
                self.gaps.append(number - 1)
            self._steps = kept or _TRANSPORT_STEPS
        self._place = place

    def note_late_stream(self) -> None:
        """Further streams have appeared on the way."""
        self.late_streams = True

    def note_elsewhere(self, packet: av.Packet) -> None:
        """A packet of a picture stream that is not read."""
        if packet.dts is not None:
            seconds = float(packet.dts * packet.time_base)
            first, _ = self.elsewhere.get(packet.stream_index, (seconds, seconds))
            self.elsewhere[packet.stream_index] = (first, seconds)

    def _blank_out(self, number: int) -> None:
        """A packet lies in a hole of the file. Zeros at the end alone may be padding."""
        self.flags[number] = 0
        self.blank += 1
        self.gaps.append(number)

    def _note_header(self, header: bytes) -> None:
        """The container gives a new header for the decoder: what it names is another format."""
        self.formats |= {self._header, header}
        self._header = header

    def _note_formats(self, data: memoryview) -> None:
        if self._codec not in _PARAMETER_SETS:
            self.formats |= _picture_format(self._codec, data)
            # Its decoder compares heights with the first picture's to tell fields from pictures.
            self.needs_all |= self._codec == "mjpeg" and len(self.formats) > 1
            return
        start = bytes(data[:_HEADER_BYTES])
        kinds = _PARAMETER_SETS[self._codec]
        sets = list(parameter_sets(self._codec, start, self._lengths, kinds))
        if sets and not self._header:
            self._header = b"".join(unit for _, unit in sets)
        for kind, unit in sets:
            if kind == kinds[0]:
                self.formats.add(unit)
            self._is_changed |= unit not in self._header
        self.needs_all |= self._is_changed and not sets

    def finish(self) -> PacketScan:
        if self._zero_tails == [len(self.flags) - 1]:
            self._blank_out(len(self.flags) - 1)
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
            needs_all=self.needs_all,
            gaps=self.gaps,
            cut_short=cut_short,
            blank=self.blank,
            late_streams=self.late_streams,
            elsewhere=self.elsewhere,
            encrypted=self.encrypted,
        )


def scan_packets(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, most: int
) -> PacketScan | None:
    """Demux a whole stream once; None when it has more than ``most`` packets.

    Damage ends the scan where the container can't be followed.
    """
    streams = [stream, *(s for s in picture_streams(container) if s.index != stream.index)]
    silence_other_streams(container, *streams)
    columns = _Columns(stream, container.format.name)
    try:
        for packet in filled_packets(container, *streams, on_late_stream=columns.note_late_stream):
            if packet.stream_index != stream.index:
                columns.note_elsewhere(packet)
                continue
            columns.add(packet)
            if len(columns.flags) > most:
                return None
    except FFmpegError:
        columns.ends_broken = True
    return columns.finish()


def _is_hidden(codec: str, data: memoryview) -> bool:
    """Whether a packet holds no picture: a reference never shown (VP8, VP9), a header (Theora)."""
    if codec == "theora":
        return data[0] >> 7 == 1
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
    pattern = _SEQUENCE_HEADERS.get(codec)
    found = pattern.search(data[:_HEADER_BYTES]) if pattern else None
    return {found[1]} if found else set()
