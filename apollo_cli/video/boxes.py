"""What FFmpeg does not tell of a file's own structure: boxes of mp4 and mov, tags of FLV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_FIRST_BOXES = (b"ftyp", b"mdat", b"wide", b"free", b"skip", b"moov")
_PROTECTED = (b"encv", b"sinf", b"pssh")
_MOST_INDEX_BYTES = 1 << 24

# An entry of an edit list that shows nothing has this start.
_EMPTY = -1


@dataclass(frozen=True)
class Box:
    """One box: its kind, where its content starts, and where it ends or should end."""

    kind: bytes
    start: int
    end: int


def read_boxes(file: BinaryIO, start: int, end: int) -> Iterator[Box]:
    """The boxes that lie one behind the other from ``start`` on."""
    while start + 8 <= end:
        file.seek(start)
        header = file.read(16)
        length, first = int.from_bytes(header[:4], "big"), start + 8
        if length == 1:
            length, first = int.from_bytes(header[8:16], "big"), start + 16
        if length < 8 and length != 0:
            return
        start = start + length if length else end
        yield Box(header[4:8], first, start)


def index_fault(path: Path) -> str:
    """Why an mp4 or mov file cannot be opened, as far as its boxes tell; else empty."""
    size = path.stat().st_size
    with path.open("rb") as file:
        boxes = list(read_boxes(file, 0, size))
        if not boxes or boxes[0].kind not in _FIRST_BOXES:
            return ""
        index = next((box for box in boxes if box.kind == b"moov"), None)
        if index is None:
            return "is incomplete: it has no index (moov)"
        if index.end > size:
            return "is incomplete: its index (moov) is cut"
        file.seek(index.start)
        content = file.read(min(index.end - index.start, _MOST_INDEX_BYTES))
    return "is encrypted" if any(mark in content for mark in _PROTECTED) else ""


def structure_faults(path: Path, container: str, track: int) -> list[str]:
    """What is not read of a file, or not as it says, one sentence each.

    Args:
        track: the number that the container gives the picture stream.
    """
    size = path.stat().st_size
    joined = "another file is stored behind the first: only the first is read"
    with path.open("rb") as file:
        if container.startswith("flv"):
            return [joined] if _has_second_flv(file, size) else []
        if not container.startswith("mov"):
            return []
        indices = [box for box in read_boxes(file, 0, size) if box.kind == b"moov"]
        faults = [joined] if len(indices) > 1 else []
        if indices and indices[0].end > size:
            faults.append("its index (moov) is cut: pictures may be missing")
        for index in indices[:1]:
            faults += _edit_faults(file, index, track)
    return faults


def _has_second_flv(file: BinaryIO, size: int) -> bool:
    position = 13
    while position + 11 < size:
        file.seek(position)
        header = file.read(11)
        if header[:4] == b"FLV\1":
            return True
        if header[0] & 0x1F not in (8, 9, 18):
            return False
        position += 15 + int.from_bytes(header[1:4], "big")
    return False


def _edit_faults(file: BinaryIO, index: Box, track: int) -> list[str]:
    scale, edits = 1, []
    for box in read_boxes(file, index.start, index.end):
        if box.kind == b"mvhd":
            version = _number(file, box.start, 1)
            scale = _number(file, box.start + (20 if version else 12), 4) or 1
        elif box.kind == b"trak":
            parts = {part.kind: part for part in read_boxes(file, box.start, box.end)}
            head, list_of = parts.get(b"tkhd"), parts.get(b"edts")
            if head is None or list_of is None:
                continue
            version = _number(file, head.start, 1)
            if _number(file, head.start + (20 if version else 12), 4) == track:
                for part in read_boxes(file, list_of.start, list_of.end):
                    edits = _read_edits(file, part) if part.kind == b"elst" else edits
    # Players wait for an empty entry in front, and the reader follows that.
    empty = sum(length for length, start, _ in edits[1:] if start == _EMPTY)
    faults = []
    if empty:
        pause = f"its edit list shows nothing for {empty / scale:.2f} s on the way"
        faults.append(f"{pause}: the pictures are put end to end")
    if any(rate != 1 << 16 for _, start, rate in edits if start != _EMPTY):
        faults.append("its edit list holds pictures or changes their speed: that is not followed")
    return faults


def _read_edits(file: BinaryIO, box: Box) -> list[tuple[int, int, int]]:
    """Length in the film's ticks, start in the track's, and rate in 16.16 of each entry."""
    wide = _number(file, box.start, 1) == 1
    size = 8 if wide else 4
    entry = 2 * size + 4
    count = min(_number(file, box.start + 4, 4), (box.end - box.start - 8) // entry)
    file.seek(box.start + 8)
    data = file.read(min(count * entry, _MOST_INDEX_BYTES))
    return [
        (
            int.from_bytes(data[at : at + size], "big"),
            int.from_bytes(data[at + size : at + 2 * size], "big", signed=True),
            int.from_bytes(data[at + 2 * size : at + entry], "big"),
        )
        for at in range(0, len(data) - entry + 1, entry)
    ]


def _number(file: BinaryIO, position: int, size: int) -> int:
    file.seek(position)
    return int.from_bytes(file.read(size), "big")
