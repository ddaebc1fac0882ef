"""One open stream: packets with their numbers in, decoded pictures with the same numbers out."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import av
import av.logging
import numpy as np
from av.error import EOFError as DecoderEmpty
from av.error import FFmpegError
from av.packet import PacketSideData

from apollo_cli.video.container import open_container
from apollo_cli.video.packets import read_packets

# A picture and the number of the packet that it came from; -1 where the decoder does not say.
Numbered = tuple[int, av.VideoFrame]

# The first decoders also complain of sound pictures, where one that they refer to was left out.
_COMPLAINS_OF_REFERENCES = ("h264", "hevc", "vvc")
_OWN_DAMAGE = re.compile(r"decoding MB|concealing|MD5|CRC|checksum|mismatch")
_ANY_DAMAGE = re.compile(r"^(?!.*MVs not available)", re.DOTALL)

# How often the decoder may complain while it is emptied; each complaint is one broken picture.
_MOST_COMPLAINTS = 64


class Decoder:
    """Reads packets of one stream in file order and decodes them.

    Each packet carries its number in the file through the decoder in place of its time stamp.
    So a picture is known for certain by the packet that it came from, also where time stamps are
    missing, repeated, or start again.

    Attributes:
        number: of the packet that ``read`` returns next.
        context: FFmpeg's decoder.
        is_broken: the decoder has refused the last packet, or reported that its data is damaged.
    """

    def __init__(self, path: Path, stream_index: int) -> None:
        self._path, self._stream_index = path, stream_index
        self.is_broken = False
        self._open()

    def _open(self) -> None:
        self._container = open_container(self._path)
        stream = self._container.streams[self._stream_index]
        assert isinstance(stream, av.VideoStream)
        self._stream = stream
        self.context = stream.codec_context
        self.context.thread_count = 1
        # Some files hold checksums of their pictures.
        self.context.options = {"err_detect": "crccheck"}
        complains = self.context.name in _COMPLAINS_OF_REFERENCES
        self._damage_pattern = _OWN_DAMAGE if complains else _ANY_DAMAGE
        self._packets = read_packets(self._container, stream)
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
        try:
            packet = next(self._packets, None)
        except (FFmpegError, IndexError):
            return None
        if packet is not None:
            self.number += 1
            if packet.has_sidedata("new_extradata"):
                self._header = packet.get_sidedata("new_extradata")
        return packet

    def skip_to(self, number: int) -> None:
        """Read packets without decoding, until ``number`` is next or the file ends."""
        while self.number < number and self.read() is not None:
            pass

    def seek(self, number: int, pts: np.ndarray) -> bool:
        """Jump to packet ``number`` or to one not far before it.

        Args:
            pts: (packets,) unique time stamps of all packets: where the jump landed is looked up
                there, never assumed.

        Returns:
            Whether the landing is known and useful. If not, the position is lost: ``rewind``.
        """
        try:
            self._container.seek(int(pts[number]), stream=self._stream, backward=True)
            packets = read_packets(self._container, self._stream)
            first = next(packets, None)
        except (FFmpegError, IndexError):
            return False
        if first is None:
            return False
        landed = np.flatnonzero(pts == first.pts)
        if len(landed) != 1 or landed[0] > number:
            return False
        self._packets = chain([first], packets)
        self.number = int(landed[0])
        return True

    def decode(self, packet: av.Packet) -> list[Numbered]:
        """Decode the packet that ``read`` just returned."""
        packet.pts, packet.dts = self.number - 1, None
        # The demuxer sets this at every splice, and it would be copied to pictures that are fine.
        packet.is_corrupt = False
        if self._header is not None and not packet.has_sidedata("new_extradata"):
            # It came with a packet that was passed over.
            packet.set_sidedata(self._header)
        self._header = None
        level, repeats = av.logging.get_level(), av.logging.get_skip_repeated()
        av.logging.set_skip_repeated(False)
        av.logging.set_level(av.logging.ERROR)
        try:
            with av.logging.Capture() as messages:
                frames = _numbered(self.context.decode(packet))
            self.is_broken = any(self._damage_pattern.search(text) for _, _, text in messages)
        except FFmpegError:
            self.is_broken, frames = True, []
        finally:
            av.logging.set_level(level)
            av.logging.set_skip_repeated(repeats)
        return frames

    def drain(self) -> list[Numbered]:
        """Take out all pictures that are still inside the decoder, broken ones left out."""
        pictures: list[Numbered] = []
        for _ in range(_MOST_COMPLAINTS):
            try:
                pictures += _numbered(self.context.decode(None))
                break
            except DecoderEmpty:
                break
            except FFmpegError:
                continue
        self.context.flush_buffers()
        return pictures


def _numbered(frames: list[av.VideoFrame]) -> list[Numbered]:
    return [(-1 if frame.pts is None else frame.pts, frame) for frame in frames]
