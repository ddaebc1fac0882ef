"""What the first bytes of a coded picture tell."""

from __future__ import annotations

from collections.abc import Iterator

import av
import av.codec.context

_START_CODE = b"\x00\x00\x01"

# Slices of H.264, and those of HEVC that no picture of their own layer is built on.
_H264_SLICES = (1, 2, 5)
_HEVC_LEAVES = (0, 2, 4, 6, 8, 10, 12, 14)
_HEVC_SLICES = range(32)

# Where the kind of a picture stands: bytes before it, its shift, and the value of a B picture.
_PICTURE_HEADERS = {
    "mpeg1video": (b"\x00\x00\x01\x00", 1, 3, 0b111, 3),
    "mpeg2video": (b"\x00\x00\x01\x00", 1, 3, 0b111, 3),
    "mpeg4": (b"\x00\x00\x01\xb6", 0, 6, 0b11, 2),
}


def length_bytes(codec: str, extradata: bytes | None) -> int:
    """Bytes of the length in front of each NAL unit; 0 where start codes part them."""
    if not extradata or len(extradata) < 22 or extradata[0] != 1:
        return 0
    return (extradata[4 if codec == "h264" else 21] & 3) + 1


def nal_starts(data: bytes, lengths: int) -> Iterator[int]:
    """Where NAL units begin; the last may lie behind a broken length."""
    if lengths == 0:
        at = data.find(_START_CODE)
        while 0 <= at < len(data) - 3:
            yield at + 3
            at = data.find(_START_CODE, at + 3)
        return
    at = 0
    while at + lengths < len(data):
        yield at + lengths
        at += lengths + int.from_bytes(data[at : at + lengths], "big")


def parameter_sets(
    codec: str, data: bytes, lengths: int, kinds: tuple[int, ...]
) -> Iterator[tuple[int, bytes]]:
    """The kind and content of each NAL unit of these kinds."""
    starts = list(nal_starts(data, lengths))
    ends = [*(start - (lengths or len(_START_CODE)) for start in starts[1:]), len(data)]
    for start, end in zip(starts, ends, strict=True):
        kind = data[start] & 31 if codec == "h264" else data[start] >> 1 & 63
        if kind in kinds:
            yield kind, data[start:end].rstrip(b"\0")


def is_leaf(context: av.codec.context.CodecContext, packet: av.Packet) -> bool:
    """Whether no other picture is built on that of a packet; False where that is not known."""
    codec = context.name
    if codec in ("h264", "hevc"):
        data = bytes(packet)
        for start in nal_starts(data, length_bytes(codec, context.extradata)):
            kind = data[start] & 31 if codec == "h264" else data[start] >> 1 & 63
            if codec == "h264" and kind in _H264_SLICES:
                return data[start] >> 5 & 3 == 0
            if codec == "hevc" and kind in _HEVC_SLICES:
                return kind in _HEVC_LEAVES
        return False
    if codec not in _PICTURE_HEADERS:
        return False
    mark, skipped, shift, mask, value = _PICTURE_HEADERS[codec]
    data = bytes(packet)
    at = data.find(mark) + len(mark) + skipped
    return len(mark) <= at < len(data) and data[at] >> shift & mask == value
