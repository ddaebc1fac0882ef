"""Read every packet of a picture stream once, without decoding, and order their times."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator

import av
import av.codec.context
import av.container
import av.video.stream
import numpy as np
from av.error import FFmpegError
from av.stream import Discard

from apollo_cli.video.container import advance
from apollo_cli.video.info import NO_TIME, Timeline, next_key, typical_step

# In these a packet of zeros can only be a hole in the file.
_NEVER_ZERO = ("h264", "hevc", "vvc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mjpeg")
_HOLE_BYTES = 16

# Bytes from one unit of a transport stream to the next, of the kinds that there are.
_TRANSPORT_STEPS = (188, 192, 204)

# A time stamp that falls back by more than this starts a new recording in the same file.
_RESTART_SECONDS = 0.5

# No more pictures than this are stored out of their order, and so many packets are compared to
# tell that from a new recording.
_REORDER_PICTURES, _REORDER_LOOK = 16, 1000

_START_CODE = b"\x00\x00\x01"
_HEADER_BYTES = 2048

# Parameter sets of each codec, by kind of NAL unit; the first kind fixes the picture's format.
_PARAMETER_SETS = {"h264": (7, 8), "hevc": (33, 32, 34)}

# Where a key packet of other codecs names size and format.
_MPEG_SEQUENCE = re.compile(rb"\x00\x00\x01\xb3(.{4})", re.DOTALL)
_FORMAT_HEADERS = {
    "mpeg1video": _MPEG_SEQUENCE,
    "mpeg2video": _MPEG_SEQUENCE,
    "mjpeg": re.compile(rb"\xff[\xc0-\xc2]\x00[\x0b\x11\x14]\x08(.{4})", re.DOTALL),
    "vp8": re.compile(rb"\A.{6}(.{4})", re.DOTALL),
    "vp9": re.compile(rb"\A.{4}(.{5})", re.DOTALL),
}

# Where a picture's type stands in a packet, its bits, and their value for a B picture.
_MPEG_PICTURE = (re.compile(rb"\x00\x00\x01\x00.(.)", re.DOTALL), 0b00111000, 3 << 3)
_PICTURE_TYPES = {
    "mpeg1video": _MPEG_PICTURE,
    "mpeg2video": _MPEG_PICTURE,
    "mpeg4": (re.compile(rb"\x00\x00\x01\xb6(.)", re.DOTALL), 0b11000000, 2 << 6),
}


def picture_streams(
    container: av.container.InputContainer,
) -> list[av.video.stream.VideoStream]:
    """The picture streams in a known coding, without cover art."""
    streams = container.streams.video
    return [s for s in streams if s.codec_context is not None and not is_cover(s)]


def is_cover(stream: av.video.stream.VideoStream) -> bool:
    """Whether a stream is a picture attached to the file."""
    return bool(stream.disposition & stream.disposition.attached_pic)


def read_packets(
    container: av.container.InputContainer, *streams: av.video.stream.VideoStream
) -> Iterator[av.Packet]:
    """Yield the packets of streams from the present position on, without empty ones.

    Raises:
        FFmpegError: the container can't be followed any further.
        IndexError: further streams have appeared on the way; this is how PyAV ends there.
    """
    for other in container.streams:
        if other not in streams:
            other.discard = Discard.all
    for packet in container.demux(*streams):
        if packet.size:
            advance()
            yield packet


class PacketScan:
    """All packets of one stream in file order; times in ticks.

    Attributes:
        pts, dts: (packets,) time stamps, NO_TIME where the file gives none.
        durations: (packets,), 0 where unknown.
        is_key: (packets,) a decoder may start here.
        is_shown: (packets,) the packet holds a picture that a player shows; packets outside of
            the edit list, hidden reference pictures and packets without content are not.
        formats: the different picture formats that headers name.
        needs_all: a header changes on the way and is not repeated, so nothing may be left out.
        gaps: numbers of the packets from which on data is missing.
        cut_short: the last packet is incomplete: the file ends early.
        blank: number of packets with a hole of zeros.
        encrypted: the content is protected.
        elsewhere: first and last decoding time, in seconds, of each other picture stream.
        has_late_streams: further streams appear on the way.
    """

    def __init__(self, stream: av.video.stream.VideoStream, container: str) -> None:
        context = stream.codec_context
        self._codec = context.name
        self._header = context.extradata or b""
        self._lengths = length_bytes(self._codec, context.extradata)
        self._is_transport = container == "mpegts"
        # A few bytes a packet: a day of video has millions of them.
        self._stamps, self._flags = array("q"), bytearray()
        self._zero_tails: list[int] = []
        self._position, self._steps = -1, _TRANSPORT_STEPS
        self._is_changed = False
        self.formats: set[bytes] = set()
        self.gaps: list[int] = []
        self.blank = 0
        self.needs_all = self.cut_short = self.encrypted = self.has_late_streams = False
        self.elsewhere: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._flags)

    def add(self, packet: av.Packet) -> None:
        """Note the next packet."""
        number, data = len(self), memoryview(packet)
        self.encrypted |= number == 0 and packet.has_sidedata("encryption_info")
        is_blank = self._codec in _NEVER_ZERO and not any(data[:_HOLE_BYTES])
        is_key = packet.is_keyframe and not is_blank
        is_hidden = packet.is_discard or is_blank or _is_hidden(self._codec, data)
        for stamp in (packet.pts, packet.dts):
            self._stamps.append(NO_TIME if stamp is None else stamp)
        self._stamps.append(packet.duration or 0)
        self._flags.append(is_key | (not is_hidden) << 1)
        if is_key:
            if packet.has_sidedata("new_extradata"):
                header = bytes(packet.get_sidedata("new_extradata"))
                self.formats |= {self._header, header}
                self._header = header
            self._read_headers(bytes(data[:_HEADER_BYTES]))
        if is_blank:
            if self._zero_tails[-1:] == [number - 1]:
                self._blank_out(number - 1)
            self._blank_out(number)
        elif self._lengths and not any(data[-_HOLE_BYTES:]):
            self._zero_tails.append(number)
        if not self._is_transport:
            # The last packet is marked when the file ends inside of it.
            self.cut_short = packet.is_corrupt
            return
        if packet.is_corrupt:
            # The mark of a transport stream comes up to one picture early.
            self.gaps.append(number + 2)
        if packet.pos is None:
            return
        # Units of a transport stream follow each other at one distance, unless bytes are lost.
        distance = packet.pos - self._position
        if self._position >= 0 and distance > 0:
            kept = tuple(step for step in self._steps if distance % step == 0)
            if not kept:
                # The picture in front may be cut, too.
                self.gaps.append(number - 1)
            self._steps = kept or _TRANSPORT_STEPS
        self._position = packet.pos

    def finish(self) -> None:
        """Make the arrays, after the last packet."""
        # Zeros at the end of every packet are padding.
        if self._zero_tails == [len(self) - 1]:
            self._blank_out(len(self) - 1)
        stamps = np.frombuffer(self._stamps, dtype=np.int64).reshape(-1, 3)
        self.pts, self.dts, self.durations = stamps.T.copy()
        flags = np.frombuffer(self._flags, dtype=np.uint8)
        self.is_key, self.is_shown = flags & 1 > 0, flags & 2 > 0
        if self.cut_short:
            self.is_shown[-1:] = False

    def _blank_out(self, number: int) -> None:
        self._flags[number] = 0
        self.blank += 1
        self.gaps.append(number)

    def _read_headers(self, start: bytes) -> None:
        """Note the picture format that the start of a key packet names."""
        codec = self._codec
        if codec in _FORMAT_HEADERS:
            if found := _FORMAT_HEADERS[codec].search(start):
                self.formats.add(found[1])
            # Its decoder compares heights with the first picture's to tell fields from pictures.
            self.needs_all |= codec == "mjpeg" and len(self.formats) > 1
        elif codec in _PARAMETER_SETS:
            kinds = _PARAMETER_SETS[codec]
            sets = [
                (kind, start[first:end].rstrip(b"\0"))
                for kind, first, end in nal_units(codec, start, self._lengths)
                if kind in kinds
            ]
            self._header = self._header or b"".join(content for _, content in sets)
            self.formats.update(content for kind, content in sets if kind == kinds[0])
            self._is_changed |= any(content not in self._header for _, content in sets)
            self.needs_all |= self._is_changed and not sets


def scan_packets(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, most: int
) -> PacketScan:
    """Demux a whole stream once, or until there are more than ``most`` packets.

    Damage ends the scan where the container can't be followed.
    """
    scan = PacketScan(stream, container.format.name)
    others = [other for other in picture_streams(container) if other.index != stream.index]
    try:
        for packet in read_packets(container, stream, *others):
            if packet.stream_index == stream.index:
                scan.add(packet)
            elif packet.dts is not None:
                seconds = float(packet.dts * packet.time_base)
                begins, _ = scan.elsewhere.get(packet.stream_index, (seconds, seconds))
                scan.elsewhere[packet.stream_index] = begins, seconds
            if len(scan) > most:
                break
    except IndexError:
        scan.has_late_streams = True
    except FFmpegError:
        scan.cut_short = container.format.name != "mpegts"
    scan.finish()
    return scan


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


def damaged_spans(scan: PacketScan) -> tuple[tuple[int, int], ...]:
    """Packets that are built on lost data: behind each gap, up to the next key packet."""
    keys = np.flatnonzero(scan.is_key)
    spans: list[tuple[int, int]] = []
    for gap in scan.gaps:
        # At a splice a key packet follows at once, and nothing is damaged.
        end = next_key(keys, gap - 1, len(scan))
        if scan.is_shown[gap:end].any() and not (spans and gap < spans[-1][1]):
            spans.append((gap, end))
    return tuple(spans)


def length_bytes(codec: str, extradata: bytes | None) -> int:
    """Bytes of the length in front of each NAL unit; 0 where start codes part them."""
    if not extradata or len(extradata) < 22 or extradata[0] != 1:
        return 0
    return (extradata[4 if codec == "h264" else 21] & 3) + 1


def nal_units(codec: str, data: bytes, lengths: int) -> Iterator[tuple[int, int, int]]:
    """Yield kind, start and end of each NAL unit; the last may reach beyond the data."""
    at = 0 if lengths else data.find(_START_CODE)
    while at >= 0 and (start := at + (lengths or len(_START_CODE))) < len(data):
        if lengths:
            at = end = start + int.from_bytes(data[at:start], "big")
        else:
            at = data.find(_START_CODE, start)
            end = at if at >= 0 else len(data)
        yield data[start] & 31 if codec == "h264" else data[start] >> 1 & 63, start, end


def is_leaf(context: av.codec.context.CodecContext, packet: av.Packet) -> bool:
    """Whether no other picture is built on that of a packet; False where that is not known."""
    codec, data = context.name, bytes(packet)
    if codec in _PICTURE_TYPES:
        pattern, bits, value = _PICTURE_TYPES[codec]
        found = pattern.search(data)
        return found is not None and found[1][0] & bits == value
    if codec in ("h264", "hevc"):
        for kind, start, _ in nal_units(codec, data, length_bytes(codec, context.extradata)):
            if codec == "h264" and kind in (1, 2, 5):
                return data[start] & 0b1100000 == 0
            if codec == "hevc" and kind < 32:
                # Of the first 16 kinds the even ones are never referred to in their own layer.
                return kind < 16 and kind % 2 == 0
    return False


def _is_hidden(codec: str, data: memoryview) -> bool:
    """Whether a packet holds no picture: a reference never shown (VP8, VP9), a header (Theora)."""
    first = data[0]
    if codec == "theora":
        return first >> 7 == 1
    if codec == "vp8":
        return not first >> 4 & 1
    if codec != "vp9":
        return False
    is_superframe = data[-1] & 0xE0 == 0xC0
    # Profile 3 has one reserved bit more in front of these.
    shift = 2 if first & 0b110000 == 0b110000 else 3
    shows_existing, shows_itself = first >> shift & 1, first >> (shift - 2) & 1
    return not (is_superframe or shows_existing or shows_itself)


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
