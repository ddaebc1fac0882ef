"""Subtitles as text with times: from a file beside the video, or from a track inside of it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import av.container
from av.error import FFmpegError
from av.stream import Discard
from av.subtitles.stream import SubtitleStream
from av.subtitles.subtitle import AssSubtitle

from apollo_cli.errors import MediaError
from apollo_cli.video.container import open_container, resolve_file, shown
from apollo_cli.video.info import VideoInfo

FORMATS = {".srt": "srt", ".vtt": "webvtt", ".ass": "ass", ".ssa": "ass"}

_TEXT_CODECS = ("subrip", "srt", "mov_text", "webvtt", "ass", "ssa", "text")
_MOST_BYTES = 32 << 20
_OVERRIDES = re.compile(r"\{\\[^{}]*\}|<[^<>]{1,40}>")

# What subtitles are stored in, beside Unicode. Others, as those of old Macs, would be found where
# one of these is meant.
_ENCODINGS = (
    *(f"cp{number}" for number in (*range(1250, 1259), 874, 866, 932, 949)),
    *("koi8_r", "iso8859_2", "iso8859_5", "iso8859_7", "euc_jp", "gb18030", "big5"),
)
# As in "by³em", which is Polish taken for Western European; quotes and dashes may stand in words.
_SIGNS_IN_WORDS = re.compile(r"(?<=[A-Za-z])(?:[¹²³]|[^\w\s\x00-\x7f\u0300-\u036f‐-…])(?=[A-Za-z])")


@dataclass(frozen=True)
class Subtitle:
    """One line of text, on display from ``start_seconds`` up to before ``end_seconds``."""

    start_seconds: float
    end_seconds: float
    text: str


def find_subtitles(
    info: VideoInfo, choice: str, *, notes: list[str] | None = None
) -> tuple[Subtitle, ...]:
    """The subtitles of a video, in order of time, on the clock of ``info``.

    Args:
        choice: ``none``; ``auto`` for a file beside the video with its name, else a text track
            inside of it, else nothing; or the path of a subtitle file.
        notes: is extended by what a user should know about the file.

    Raises:
        MediaError: a file that was named can't be read, or one that was found is damaged.
    """
    if choice == "none" or (choice == "auto" and info.kind == "image"):
        return ()
    if choice != "auto":
        return read_subtitles(choice, notes=notes)
    for suffix in FORMATS:
        beside = info.path.with_suffix(suffix)
        if beside.is_file():
            return read_subtitles(beside, notes=notes)
    if info.timeline is None:
        return ()
    return _read_track(info)


def read_subtitles(path: str | Path, *, notes: list[str] | None = None) -> tuple[Subtitle, ...]:
    """Read an SRT, WebVTT or ASS file, in Unicode or an encoding that its text gives away.

    Args:
        notes: is extended by the encoding where it was guessed.

    Raises:
        MediaError: not a plain file, of another kind, or without any subtitle.
    """
    absolute = resolve_file(path)
    name = FORMATS.get(absolute.suffix.lower())
    if name is None:
        raise MediaError(
            f"{shown(path)} is not a subtitle file", f"allowed are {', '.join(FORMATS)}"
        )
    if absolute.stat().st_size > _MOST_BYTES:
        raise MediaError(f"{shown(path)} is too large for subtitles", "allowed are 32 MiB")
    try:
        data = absolute.read_bytes()
    except OSError as error:
        raise MediaError(f"{shown(path)} cannot be read ({error.strerror})") from error
    text, note = _decode_text(data)
    if note and notes is not None:
        notes.append(f"{shown(absolute.name)}: {note}")
    text = text.replace("\r\n", "\n")
    try:
        with av.open(io.BytesIO(text.encode()), mode="r", format=name) as container:
            found = _read_stream(container, 0, 0.0)
    except (FFmpegError, IndexError):
        found = ()
    if not found:
        raise MediaError(f"{shown(path)} holds no subtitle that can be read")
    return found


def subtitles_between(
    subtitles: Sequence[Subtitle], start_seconds: float, end_seconds: float
) -> tuple[Subtitle, ...]:
    """Those on display at any moment of a span."""
    return tuple(
        s for s in subtitles if s.start_seconds < end_seconds and s.end_seconds > start_seconds
    )


def _read_track(info: VideoInfo) -> tuple[Subtitle, ...]:
    """Read the default text track inside a video; empty when it has none."""
    try:
        with open_container(info.path) as container:
            streams = container.streams
            tracks = [
                s
                for s in streams
                if isinstance(s, SubtitleStream) and s.codec_context.name in _TEXT_CODECS
            ]
            if not tracks:
                return ()
            chosen = max(tracks, key=lambda s: bool(s.disposition & s.disposition.default))
            for other in streams:
                if other.index != chosen.index:
                    other.discard = Discard.all
            return _read_stream(container, chosen.index, info.clock_offset_seconds)
    except FFmpegError as error:
        raise MediaError(
            f"{shown(info.path)}: its subtitle track is damaged ({error.strerror})",
            next_step="leave out --subtitles, or name a subtitle file",
        ) from error


def _read_stream(
    container: av.container.InputContainer, index: int, offset_seconds: float
) -> tuple[Subtitle, ...]:
    stream = container.streams[index]
    assert isinstance(stream, SubtitleStream)
    found = []
    for packet in container.demux(stream):
        if packet.size == 0 or packet.pts is None or packet.time_base is None:
            continue
        start = float(packet.pts * packet.time_base) - offset_seconds
        end = start + float((packet.duration or 0) * packet.time_base)
        rects = [rect for rect in packet.decode() if isinstance(rect, AssSubtitle)]
        lines = " ".join(rect.dialogue.decode("utf-8", errors="replace") for rect in rects)
        if text := " ".join(_OVERRIDES.sub("", lines).split()):
            found.append(Subtitle(start, end, text))
    joined: list[Subtitle] = []
    for subtitle in sorted(found, key=lambda subtitle: subtitle.start_seconds):
        last = joined[-1] if joined else subtitle
        # Rolling captions repeat a line with each new part: one stretch of time is enough.
        if last.text == subtitle.text and subtitle.start_seconds <= last.end_seconds + 0.1:
            end = max(last.end_seconds, subtitle.end_seconds)
            joined[-1:] = [Subtitle(last.start_seconds, end, last.text)]
        else:
            joined.append(subtitle)
    return tuple(joined)


def _decode_text(data: bytes) -> tuple[str, str]:
    """The text, and what a user should know about its encoding; empty for Unicode."""
    from charset_normalizer import from_bytes

    # A subtitle file starts with a digit or Latin letter: characters of 2 or 4 bytes hold zeros.
    if b"\0" in data[:4] and (wide := from_bytes(data).best()):
        return str(wide), ""
    text = data.decode("utf-8-sig", errors="replace")
    lost = text.count("\ufffd")
    if not lost:
        return text, ""
    # Of UTF-8 that is damaged most characters are whole; other encodings hardly give any.
    if sum(character > "\x7f" for character in text) > 10 * lost:
        return text, f"{lost} characters are damaged"
    best, encoding = -math.inf, "cp1252"
    for match in from_bytes(data, cp_isolation=list(_ENCODINGS)):
        # Noise tells more than the share of frequent letters, which is alike in related encodings.
        signs = 10 * len(_SIGNS_IN_WORDS.findall(str(match))) / len(str(match))
        score = match.coherence - 4 * match.chaos - signs
        if score > best:
            best, encoding = score, match.encoding
    note = f"not in Unicode: taken for {encoding}; if letters are wrong, save it as UTF-8"
    return data.decode(encoding, errors="replace"), note
