"""One open stream: packets with their numbers in, decoded pictures with the same numbers out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import av.container
import av.logging
import av.video.stream
import numpy as np
from av.error import EOFError as DecoderEmpty
from av.error import FFmpegError
from av.packet import PacketSideData
from av.stream import Discard

from apollo_cli.video import progress
from apollo_cli.video.container import open_container

_UNNUMBERED = -1

# These also complain of pictures that are sound, where one that they refer to was left out.
_TELLS_OF_OTHERS = ("h264", "hevc", "vvc")
_OWN_DAMAGE = re.compile(r"decoding MB|concealing|MD5|CRC|checksum|mismatch")
_ANY_DAMAGE = re.compile(r"^(?!.*MVs not available)", re.DOTALL)

# How often the decoder may complain while it is emptied; each complaint is one broken picture.
_MOST_COMPLAINTS = 64


def picture_streams(
    container: av.container.InputContainer,
) -> list[av.video.stream.VideoStream]:
    """The moving ones in a known coding; cover art is none."""
    return [s for s in container.streams.video if s.codec_context is not None and not is_cover(s)]


def is_cover(stream: av.video.stream.VideoStream) -> bool:
    """Whether a stream is a picture attached to the file."""
    return bool(stream.disposition & stream.disposition.attached_pic)


def silence_other_streams(
    container: av.container.InputContainer, *streams: av.video.stream.VideoStream
) -> None:
    """Let the demuxer drop what is not read, instead of fetching and sorting it in."""
    read = [stream.index for stream in streams]
    for other in container.streams:
        if other.index not in read:
            other.discard = Discard.all


def filled_packets(
    container: av.container.InputContainer,
    *streams: av.video.stream.VideoStream,
    on_late_stream: Callable[[], None] = lambda: None,
) -> Iterator[av.Packet]:
    """The packets of streams from the present position on, without the empty ones at the end.

    Args:
        on_late_stream: is called at the end of a file in which further streams appear on the way.

    Raises:
        FFmpegError: the container can't be followed any further.
    """
    try:
        for packet in container.demux(*streams):
            if packet.size:
                progress.advance()
                yield packet
    except IndexError:
        # This is how PyAV fails there.
        on_late_stream()


class Feed:
    """Reads packets of one stream in file order and decodes them.

    Each packet carries its number in the file through the decoder in place of its time stamp.
    So a picture is known for certain by the packet that it came from, also where time stamps are
    missing, repeated, or start again.

    Attributes:
        number: of the packet that ``read`` returns next.
        is_broken: the decoder has refused the last packet, or told that its data is damaged.
    """

    def __init__(self, path: Path, stream_index: int) -> None:
        self._path = path
        self._stream_index = stream_index
        self.is_broken = False
        self._open()

    def _open(self) -> None:
        self._container = open_container(self._path)
        stream = self._container.streams[self._stream_index]
        assert isinstance(stream, av.VideoStream)
        self.stream = stream
        silence_other_streams(self._container, stream)
        stream.codec_context.thread_count = 1
        self._packets = filled_packets(self._container, stream)
        codec = stream.codec_context.name
        self._tells_damage = _OWN_DAMAGE if codec in _TELLS_OF_OTHERS else _ANY_DAMAGE
        # Some files hold checksums of their pictures.
        stream.codec_context.options = {"err_detect": "crccheck"}
        self._held: av.Packet | None = None
        self._header: PacketSideData | None = None
        self.number = 0

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def rewind(self) -> None:
        """Start at packet 0 again, with a fresh demuxer: no seek to trust."""
        self.close()
        self._open()

    def read(self) -> av.Packet | None:
        """The next packet, None at the end or where the file can't be followed any further."""
        if self._held is not None:
            packet, self._held = self._held, None
            self.number += 1
            return packet
        try:
            packet = next(self._packets, None)
        except FFmpegError:
            return None
        self.number += packet is not None
        if packet is not None and packet.has_sidedata("new_extradata"):
            self._header = packet.get_sidedata("new_extradata")
        return packet

    def skip_to(self, number: int) -> None:
        """Read packets without decoding, until ``number`` is next or the file ends."""
        while self.number < number and self.read() is not None:
            pass

    def seek(self, number: int, ticks: int, pts: np.ndarray) -> bool:
        """Jump to packet ``number`` or to one not far before it.

        Args:
            number: the packet wanted.
            ticks: the time stamp to ask the demuxer for.
            pts: (packets,) unique time stamps of all packets: where the jump landed is looked up
                there, never assumed.

        Returns:
            Whether the landing is known and useful. If not, the position is lost: ``rewind``.
        """
        try:
            self._container.seek(ticks, stream=self.stream, backward=True)
            self._packets = filled_packets(self._container, self.stream)
            self._held = None
            packet = self.read()
        except FFmpegError:
            return False
        if packet is None or packet.pts is None:
            return False
        landed = np.flatnonzero(pts == packet.pts)
        if len(landed) != 1 or landed[0] > number:
            return False
        self._held = packet
        self.number = int(landed[0])
        return True

    def restart_decoder(self) -> None:
        """Forget all pictures inside the decoder; the next packet must be a key packet."""
        self.stream.codec_context.flush_buffers()

    def decode(self, packet: av.Packet) -> list[tuple[int, av.VideoFrame]]:
        """Decode the packet that ``read`` just returned; pictures come with packet numbers."""
        number = self.number - 1
        packet.pts, packet.dts = number, None
        # The demuxer sets this at every splice, and it would be copied to pictures that are fine.
        packet.is_corrupt = False
        self._hand_header(packet)
        level, repeats = av.logging.get_level(), av.logging.get_skip_repeated()
        av.logging.set_skip_repeated(False)
        av.logging.set_level(av.logging.ERROR)
        try:
            with av.logging.Capture() as heard:
                frames = _numbered(self.stream.codec_context.decode(packet))
            self.is_broken = any(self._tells_damage.search(text) for _, _, text in heard)
        except FFmpegError:
            self.is_broken, frames = True, []
        finally:
            av.logging.set_level(level)
            av.logging.set_skip_repeated(repeats)
        return frames

    def _hand_header(self, packet: av.Packet) -> None:
        """Give the decoder a header that came with a packet which was passed over."""
        if self._header is not None and not packet.has_sidedata("new_extradata"):
            packet.set_sidedata(self._header)
        self._header = None

    def drain(self) -> list[tuple[int, av.VideoFrame]]:
        """Take out all pictures that are still inside the decoder, broken ones left out."""
        pictures: list[tuple[int, av.VideoFrame]] = []
        for _ in range(_MOST_COMPLAINTS):
            try:
                pictures += _numbered(self.stream.codec_context.decode(None))
                break
            except DecoderEmpty:
                break
            except FFmpegError:
                continue
        self.restart_decoder()
        return pictures


def _numbered(frames: list[av.VideoFrame]) -> list[tuple[int, av.VideoFrame]]:
    return [(_UNNUMBERED if frame.pts is None else frame.pts, frame) for frame in frames]
