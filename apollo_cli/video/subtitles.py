"""Subtitles as text with times: from a file beside the video, or from a track inside of it."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Sequence
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
# Both marks of UTF-32 come first, since one of them starts with a mark of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Which of the first four bytes are not 0, in Unicode without a mark.
_WIDTHS = {
    b"\1\0\0\0": "utf-32-le",
    b"\0\0\0\1": "utf-32-be",
    b"\1\0\1\0": "utf-16-le",
    b"\0\1\0\1": "utf-16-be",
}
_WHOLE_SHARE = 10

# What subtitles are stored in, beside Unicode. Others, as those of old Macs, would be found where
# one of these is meant.
_ENCODINGS = (
    *(f"cp{number}" for number in (*range(1250, 1259), 874, 866, 932, 949)),
    *("koi8_r", "iso8859_2", "iso8859_5", "iso8859_7", "euc_jp", "gb18030", "big5"),
)
# As in "by³em", which is Polish taken for Western European; quotes and dashes may stand in words.
_SIGNS_IN_WORDS = re.compile(r"(?<=[A-Za-z])(?:[¹²³]|[^\w\s\x00-\x7f\u0300-\u036f‐-…])(?=[A-Za-z])")
# Two encodings whose scores are closer than this cannot be told apart.
_CLOSE_CALL = 0.05


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
    return read_track(info)


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


def read_track(info: VideoInfo) -> tuple[Subtitle, ...]:
    """Read the default text track inside a video; empty when it has none.

    Raises:
        MediaError: the track is damaged.
    """
    try:
        return _read_default_track(info)
    except FFmpegError as error:
        raise MediaError(
            f"{shown(info.path)}: its subtitle track is damaged ({error.strerror})",
            next_step="leave out --subtitles, or name a subtitle file",
        ) from error


def _read_default_track(info: VideoInfo) -> tuple[Subtitle, ...]:
    with open_container(info.path) as container:
        tracks = [
            stream
            for stream in container.streams
            if isinstance(stream, SubtitleStream) and stream.codec_context.name in _TEXT_CODECS
        ]
        if not tracks:
            return ()
        chosen = max(tracks, key=lambda track: bool(track.disposition & track.disposition.default))
        for other in container.streams:
            if other.index != chosen.index:
                other.discard = Discard.all
        return _read_stream(container, chosen.index, info.clock_offset_seconds)


def subtitles_between(
    subtitles: Sequence[Subtitle], start_seconds: float, end_seconds: float
) -> tuple[Subtitle, ...]:
    """Those on display at any moment of a span."""
    return tuple(
        s for s in subtitles if s.start_seconds < end_seconds and s.end_seconds > start_seconds
    )


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
        lines = [_plain(rect) for rect in packet.decode() if isinstance(rect, AssSubtitle)]
        text = " ".join(filter(None, lines))
        if text:
            found.append(Subtitle(start, end, text))
    return _join_repeats(sorted(found, key=lambda subtitle: subtitle.start_seconds))


def _plain(rect: AssSubtitle) -> str:
    text = rect.dialogue.decode("utf-8", errors="replace")
    return " ".join(_OVERRIDES.sub("", text).split())


def _join_repeats(subtitles: Iterable[Subtitle]) -> tuple[Subtitle, ...]:
    """Rolling captions repeat a line with each new part: one stretch of time is enough."""
    joined: list[Subtitle] = []
    for subtitle in subtitles:
        last = joined[-1] if joined else None
        if last and last.text == subtitle.text and subtitle.start_seconds <= last.end_seconds + 0.1:
            end = max(last.end_seconds, subtitle.end_seconds)
            joined[-1] = Subtitle(last.start_seconds, end, last.text)
        else:
            joined.append(subtitle)
    return tuple(joined)


def _decode_text(data: bytes) -> tuple[str, str]:
    """The text, and what a user should know about its encoding; empty for Unicode."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace"), ""
    # A subtitle file starts with a digit or Latin letter, so zeros tell the width of characters.
    wide = _WIDTHS.get(bytes(map(bool, data[:4])))
    if wide is not None:
        return data.decode(wide, errors="replace"), ""
    text = data.decode("utf-8-sig", errors="replace")
    lost = text.count("\ufffd")
    if not lost:
        return text, ""
    # Of UTF-8 that is damaged most characters are whole; other encodings hardly give any.
    if sum(character > "\x7f" for character in text) > _WHOLE_SHARE * lost:
        return text, f"{lost} characters are damaged"
    return _guess_encoding(data)


def _guess_encoding(data: bytes) -> tuple[str, str]:
    """Take the encoding whose text looks most like a language, and say which others may be it."""
    from charset_normalizer import from_bytes

    scored = []
    for match in from_bytes(data, cp_isolation=list(_ENCODINGS)):
        text = str(match)
        # Noise tells more than the share of frequent letters, which is alike in related encodings.
        signs = 10 * len(_SIGNS_IN_WORDS.findall(text)) / len(text)
        scored.append((match.coherence - 4 * match.chaos - signs, match.encoding, text))
    way_out = "if letters are wrong, save it as UTF-8"
    if not scored:
        note = (
            f"neither in Unicode nor in an encoding that can be told: taken for cp1252; {way_out}"
        )
        return data.decode("cp1252", errors="replace"), note
    best, encoding, text = max(scored, key=lambda one: one[0])
    near = [name for score, name, other in scored if best - score < _CLOSE_CALL and other != text]
    doubt = f", though it may be {' or '.join(near)}" if near else ""
    return text, f"not in Unicode: taken for {encoding}{doubt}; {way_out}"
