"""Open a media file safely: plain files only, by content, and never another file or the network."""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.parse import unquote

import av
import av.container
from av.error import ArgumentError, FFmpegError

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError
from apollo_cli.text import apart

DEFAULT_READING = ReadingOptions()

# FFmpeg formats that hold their pictures themselves. Playlists, concat scripts, image patterns,
# capture devices and network formats are left out: each of them makes FFmpeg open something else.
ALLOWED_FORMATS = (
    "mov,matroska,webm,avi,mpegts,mpeg,mpegvideo,asf,ogg,flv,live_flv,mxf,nut,ivf,obu,dv,rm,wtv,"
    "yuv4mpegpipe,h264,hevc,vvc,m4v,vc1,av1,mjpeg"
)

# How files that hold pictures are usually called; content decides, not this.
_USUAL = (
    "3gp,apng,asf,avi,avif,bmp,dv,flv,gif,h264,heic,hevc,ivf,jpeg,jpg,m2ts,m2v,m4v,mjpeg,mkv,mov,"
    "mp4,mpeg,mpg,mts,mxf,nut,obu,ogg,ogv,png,rm,tif,tiff,ts,vob,webm,webp,wmv,y4m"
)
MEDIA_SUFFIXES = frozenset(f".{name}" for name in _USUAL.split(","))

_SNIFF_BYTES = 4096

# JPEG, PNG, GIF, BMP, TIFF, WebP.
_IMAGE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|BM|II[*+]\0|MM\0[*+]|RIFF.{4}WEBP", re.DOTALL
)

# How files begin that are neither image nor video, what they are, and what to do instead.
_OTHER_KINDS = {
    rb".{4}ftyp(hei[cxms]|hev[cx]|mif1|msf1)": "a HEIC photo: convert it to JPEG or PNG",
    rb"version https://git-lfs": "a Git LFS pointer, not the video itself: run git lfs pull",
    rb"#EXTM3U": "a playlist, not a video: give the video that it names",
    rb"ffconcat": "a concat script, not a video: give the videos that it names",
    rb"%PDF": "a PDF, not a video",
    rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf|Rar!": "an archive, not a video: unpack it first",
    rb"ID3|fLaC|RIFF.{4}WAVE": "sound only: give a file with a picture stream",
    rb'.*"apollo_memory"': "a saved memory, which only ask, chat and ui take instead of a video",
    rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|head|body)": "a web page: download the video itself",
}

_FIRST_BOXES = (b"ftyp", b"mdat", b"wide", b"free", b"skip", b"moov")
_PROTECTED = (b"encv", b"sinf", b"pssh")
_MOST_INDEX_BYTES = 1 << 24

# An entry of an edit list that shows nothing has this start.
_EMPTY = -1

# How the folder begins that holds a copy of a video from stdin.
STDIN_FOLDER = "apollo-stdin-"


_steps = 0


def advance() -> None:
    """Count a packet or picture that has been read, to tell slow work from a hang."""
    global _steps  # noqa: PLW0603 - one count for the whole process is the point
    _steps += 1


def steps() -> int:
    """Number of packets and pictures read by this process."""
    return _steps


def shown(path: str | Path) -> str:
    """The whole name on one line: characters that would break or hide it are escaped.

    A video that came on stdin has the name of its copy only, not the folder that nobody chose.
    """
    name = Path(path).name if is_from_stdin(path) else str(path)
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name
    )


def is_from_stdin(path: str | Path) -> bool:
    """Whether a file is the copy of a video that came on stdin."""
    return f"{os.sep}{STDIN_FOLDER}" in str(path)


def resolve_file(path: str | Path) -> Path:
    """The absolute path of a plain, non-empty file; a link to one is followed.

    Raises:
        MediaError: nothing is there, or it is a folder, pipe, socket or device.
    """
    name = shown(path)
    try:
        # An absolute path is never taken for a protocol, whatever colons the name has.
        absolute = Path(os.path.abspath(path))
        status = absolute.stat()
    except FileNotFoundError:
        if os.path.islink(path):
            target = shown(os.readlink(path))
            raise MediaError(f"{name} is a link to {target}, no such file") from None
        if local := local_path(str(path)):
            return resolve_file(local)
        if "://" in str(path):
            raise MediaError(f"{name} is a web address", "only local files are read") from None
        raise MediaError(f"{name}: no such file", next_step="check the path") from None
    except PermissionError:
        raise MediaError(f"{name}: permission denied") from None
    except (OSError, ValueError) as error:
        raise MediaError(f"{name} is not a usable path ({error.args[-1]})") from None
    if stat.S_ISDIR(status.st_mode):
        raise MediaError(
            f"{name} is a folder",
            "a video or image file is needed",
            "apollo ask --videos asks about each video of a folder; --image-fps takes its images "
            "as the pictures of one video",
        )
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{name} is a pipe, device or socket", "a plain file is needed")
    if status.st_size == 0:
        raise MediaError(f"{name} is empty (0 bytes)", next_step="copy or download it again")
    return absolute


def local_path(address: str) -> str:
    """The path that a file:// address of this machine names, else empty."""
    found = re.fullmatch("file:(?://(?:localhost)?)?(/(?!/).*)", address, re.DOTALL)
    return unquote(found[1]) if found else ""


def identify(path: Path) -> tuple[int, ...]:
    """Device, inode, size and time of change, which together identify a file.

    Raises:
        MediaError: it is gone.
    """
    try:
        facts = path.stat()
    except OSError as error:
        raise MediaError(f"{shown(path)}: {(error.strerror or 'it is gone').lower()}") from None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


@contextmanager
def unchanged(path: Path, identity: tuple[int, ...]) -> Iterator[None]:
    """Raise when a file is changed or replaced inside the block.

    Raises:
        MediaError: it was changed; this also replaces the error that the change has caused.
    """
    try:
        yield
    except (MediaError, OSError):
        check_unchanged(path, identity)
        raise
    check_unchanged(path, identity)


def check_unchanged(path: Path, identity: tuple[int, ...]) -> None:
    """Raise unless a file is still the one that was probed; an empty identity matches every file.

    Raises:
        MediaError: it has been changed or replaced.
    """
    if identity and identify(path) != identity:
        raise MediaError(
            f"{shown(path)} was changed or replaced while it was read",
            next_step="wait until it is complete, then try again",
        )


def sniff(path: Path) -> Literal["image", "container"]:
    """Judge by its first bytes whether a file is an image or may be a video container.

    Raises:
        MediaError: it is something else that has a name, such as a web page or an archive.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFF_BYTES)
    except OSError as error:
        raise MediaError(f"{shown(path)}: {(error.strerror or str(error)).lower()}") from None
    brands = head[8 : int.from_bytes(head[:4], "big")] if head[4:8] == b"ftyp" else b""
    # A film of bare JPEG pictures starts like a photo, and some photos hold a second picture.
    is_film = path.suffix.lower() in (".mjpeg", ".mjpg")
    if (_IMAGE.match(head) and not is_film) or b"avif" in brands or b"avis" in brands:
        return "image"
    for start, what in _OTHER_KINDS.items():
        if re.match(start, head, re.DOTALL | re.IGNORECASE):
            raise MediaError(f"{shown(path)} is {what}")
    return "container"


def open_container(path: Path) -> av.container.InputContainer:
    """Open a video container for reading, as a context manager.

    Raises:
        MediaError: the file is damaged, cut short, or of a kind that is not read.
    """
    options = {"format_whitelist": ALLOWED_FORMATS, "protocol_whitelist": "file"}
    try:
        return av.open(str(path), mode="r", options=options, metadata_errors="replace")
    except ArgumentError:
        raise MediaError(
            f"{shown(path)} is of a kind that is not read as video",
            "allowed are mp4, mov, mkv, webm, avi, ts, mpg, wmv, flv, ogg and the like",
        ) from None
    except (FFmpegError, OSError) as error:
        check_index(path)
        reason = (error.strerror or type(error).__name__).lower()
        raise MediaError(f"{shown(path)} is not a readable video ({reason})") from None


def check_index(path: Path) -> None:
    """Raise if the boxes of an mp4 or mov file show why it cannot be read.

    Raises:
        MediaError: its index is missing or cut, or it is encrypted.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        boxes = list(read_boxes(file, 0, size))
        if not boxes or boxes[0][0] not in _FIRST_BOXES:
            return
        index = next((box for box in boxes if box[0] == b"moov"), None)
        content = b""
        if index is not None:
            content = _read(file, index[1], min(index[2] - index[1], _MOST_INDEX_BYTES))
    if index is None or index[2] > size:
        fault = "it has no index (moov)" if index is None else "its index (moov) is cut"
        again = "copy, download or record it again"
        raise MediaError(f"{shown(path)} is incomplete: {fault}", next_step=again)
    if any(mark in content for mark in _PROTECTED):
        raise MediaError(f"{shown(path)} is encrypted", "an unprotected file is needed")


def check_size(path: Path, size: tuple[int, int], reading: ReadingOptions) -> None:
    """Refuse a picture with too many pixels.

    Raises:
        MediaError: with both numbers and the flag that raises the limit.
    """
    width, height = size
    if width * height > reading.max_pixels:
        raise MediaError(
            f"{shown(path)} has pictures of {width}x{height}",
            f"allowed are {reading.max_pixels:,} pixels",
            "raise it with --max-pixels, or make the video smaller",
        )


def check_length(path: Path, pictures: int, seconds: float, reading: ReadingOptions) -> None:
    """Refuse a video that has too many pictures or lasts too long.

    Raises:
        MediaError: with the limit and the flag that raises it.
    """
    if pictures > reading.max_pictures:
        raise MediaError(
            f"{shown(path)} has too many pictures",
            f"allowed are {reading.max_pictures:,}",
            "raise it with --max-pictures, or cut the video",
        )
    if seconds > 3600 * reading.max_hours:
        lasts, allowed = apart(seconds / 3600, reading.max_hours)
        raise MediaError(
            f"{shown(path)} lasts {lasts} hours",
            f"allowed are {allowed}",
            "raise it with --max-hours, or cut the video",
        )


def read_boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the boxes of an mp4 or mov file that lie one behind the other from ``start`` on.

    Yields:
        The kind of a box, where its content starts, and where it ends or should end.
    """
    while start + 8 <= end:
        header, first = _read(file, start, 8), start + 8
        length, kind = int.from_bytes(header[:4], "big"), header[4:]
        if length == 1:
            length, first = int.from_bytes(_read(file, first, 8), "big"), first + 8
        if length < 8 and length != 0:
            return
        start = start + length if length else end
        yield kind, first, start


def structure_faults(path: Path, container: str, track: int) -> list[str]:
    """What is not read of a file, or not as it says, one sentence each.

    Args:
        track: the number that the container gives the picture stream.
    """
    size, faults, scale, edits = path.stat().st_size, [], 1, []
    joined = "another file is stored behind the first: only the first is read"
    with path.open("rb") as file:
        if container.startswith("flv"):
            return [joined] if _has_second_flv(file, size) else []
        if not container.startswith("mov"):
            return []
        indices = [box for box in read_boxes(file, 0, size) if box[0] == b"moov"]
        if len(indices) > 1:
            faults.append(joined)
        if indices and indices[0][2] > size:
            faults.append("its index (moov) is cut: pictures may be missing")
        boxes = [box for _, *span in indices[:1] for box in read_boxes(file, *span)]
        for kind, first, last in boxes:
            if kind == b"mvhd":
                scale = _versioned(file, first) or 1
            elif kind == b"trak":
                parts = {box[0]: box[1:] for box in read_boxes(file, first, last)}
                is_ours = b"tkhd" in parts and _versioned(file, parts[b"tkhd"][0]) == track
                if is_ours and b"edts" in parts:
                    lists = [box for box in read_boxes(file, *parts[b"edts"]) if box[0] == b"elst"]
                    edits = [edit for box in lists for edit in _read_edits(file, *box[1:])]
    # Players wait for an empty entry in front, and the reader follows that.
    if empty := sum(length for length, begins, _ in edits[1:] if begins == _EMPTY):
        pause = f"its edit list shows nothing for {empty / scale:.2f} s on the way"
        faults.append(f"{pause}: the pictures are put end to end")
    if any(rate != 1 << 16 for _, begins, rate in edits if begins != _EMPTY):
        faults.append("its edit list holds pictures or changes their speed: that is not followed")
    return faults


def _has_second_flv(file: BinaryIO, size: int) -> bool:
    """Whether the tags of an FLV file end at the header of another one."""
    position = 13
    while position + 11 < size:
        header = _read(file, position, 11)
        if header[:4] == b"FLV\1":
            return True
        if header[0] & 0x1F not in (8, 9, 18):
            return False
        position += 15 + int.from_bytes(header[1:4], "big")
    return False


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
