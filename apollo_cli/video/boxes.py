"""What FFmpeg does not say of a file's own structure: boxes of mp4 and mov, tags of FLV."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_FIRST_BOXES = (b"ftyp", b"mdat", b"wide", b"free", b"skip", b"moov")
_PROTECTED = (b"encv", b"sinf", b"pssh")
_MOST_INDEX_BYTES = 1 << 24

# An entry of an edit list that shows nothing has this start.
_EMPTY = -1

# Kind of a box, where its content starts, and where it ends or should end.
Box = tuple[bytes, int, int]


def read_boxes(file: BinaryIO, start: int, end: int) -> Iterator[Box]:
    """Yield the boxes that lie one behind the other from ``start`` on."""
    while start + 8 <= end:
        header, first = _read(file, start, 8), start + 8
        length, kind = int.from_bytes(header[:4], "big"), header[4:]
        if length == 1:
            length, first = int.from_bytes(_read(file, first, 8), "big"), first + 8
        if length < 8 and length != 0:
            return
        start = start + length if length else end
        yield kind, first, start


def index_fault(path: Path) -> str:
    """Why an mp4 or mov file cannot be opened, as far as its boxes tell; else empty."""
    size = path.stat().st_size
    with path.open("rb") as file:
        boxes = list(read_boxes(file, 0, size))
        if not boxes or boxes[0][0] not in _FIRST_BOXES:
            return ""
        index = next((box for box in boxes if box[0] == b"moov"), None)
        if index is None:
            return "is incomplete: it has no index (moov)"
        _, start, end = index
        if end > size:
            return "is incomplete: its index (moov) is cut"
        content = _read(file, start, min(end - start, _MOST_INDEX_BYTES))
    return "is encrypted" if any(mark in content for mark in _PROTECTED) else ""


def structure_faults(path: Path, container: str, track: int) -> list[str]:
    """What is not read of a file, or not as it says, one sentence each.

    Args:
        track: the number that the container gives the picture stream.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        indices = []
        if container.startswith("mov"):
            indices = [box for box in read_boxes(file, 0, size) if box[0] == b"moov"]
        is_joined = len(indices) > 1 or (
            container.startswith("flv") and _has_second_flv(file, size)
        )
        joined = "another file is stored behind the first: only the first is read"
        faults = [joined] if is_joined else []
        for _, start, end in indices[:1]:
            if end > size:
                faults.append("its index (moov) is cut: pictures may be missing")
            faults += _edit_faults(file, start, end, track)
    return faults


def _has_second_flv(file: BinaryIO, size: int) -> bool:
    position = 13
    while position + 11 < size:
        header = _read(file, position, 11)
        if header[:4] == b"FLV\1":
            return True
        if header[0] & 0x1F not in (8, 9, 18):
            return False
        position += 15 + int.from_bytes(header[1:4], "big")
    return False


def _edit_faults(file: BinaryIO, start: int, end: int, track: int) -> list[str]:
    scale, edits = 1, []
    for kind, first, last in read_boxes(file, start, end):
        if kind == b"mvhd":
            scale = _versioned(file, first) or 1
        elif kind == b"trak":
            parts = {box[0]: box[1:] for box in read_boxes(file, first, last)}
            if {b"tkhd", b"edts"} <= parts.keys() and _versioned(file, parts[b"tkhd"][0]) == track:
                lists = [box for box in read_boxes(file, *parts[b"edts"]) if box[0] == b"elst"]
                edits = [edit for box in lists for edit in _read_edits(file, *box[1:])]
    faults = []
    # Players wait for an empty entry in front, and the reader follows that.
    if empty := sum(length for length, begins, _ in edits[1:] if begins == _EMPTY):
        pause = f"its edit list shows nothing for {empty / scale:.2f} s on the way"
        faults.append(f"{pause}: the pictures are put end to end")
    if any(rate != 1 << 16 for _, begins, rate in edits if begins != _EMPTY):
        faults.append("its edit list holds pictures or changes their speed: that is not followed")
    return faults


def _read_edits(file: BinaryIO, start: int, end: int) -> list[tuple[int, int, int]]:
    """Length in the film's ticks, start in the track's, and rate in 16.16 of each entry."""
    entry = struct.Struct(">QqI" if _read(file, start, 1) == b"\1" else ">IiI")
    count = int.from_bytes(_read(file, start + 4, 4), "big")
    count = min(count, (min(end, start + _MOST_INDEX_BYTES) - start - 8) // entry.size)
    data = _read(file, start + 8, max(0, count) * entry.size)
    return list(entry.iter_unpack(data[: len(data) // entry.size * entry.size]))


def _versioned(file: BinaryIO, start: int) -> int:
    """The number behind two times, which take 8 bytes each in version 1 of a box and else 4."""
    offset = 20 if _read(file, start, 1) == b"\1" else 12
    return int.from_bytes(_read(file, start + offset, 4), "big")


def _read(file: BinaryIO, position: int, size: int) -> bytes:
    file.seek(position)
    return file.read(size)
