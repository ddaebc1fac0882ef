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
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.opening import open_container, resolve_file, shown

FORMATS = {".srt": "srt", ".vtt": "webvtt", ".ass": "ass", ".ssa": "ass"}

_TEXT_CODECS = ("subrip", "srt", "mov_text", "webvtt", "ass", "ssa", "text")
_MOST_BYTES = 32 << 20
_OVERRIDES = re.compile(r"\{\\[^{}]*\}|<[^<>]{1,40}>")
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@dataclass(frozen=True)
class Subtitle:
    """One line of text, on display from ``start_seconds`` up to before ``end_seconds``."""

    start_seconds: float
    end_seconds: float
    text: str


def find_subtitles(info: VideoInfo, choice: str) -> tuple[Subtitle, ...]:
    """The subtitles of a video, in order of time, on the clock of ``info``.

    Args:
        choice: ``none``; ``auto`` for a file beside the video with its name, else a text track
            inside of it, else nothing; or the path of a subtitle file.

    Raises:
        MediaError: a file that was named can't be read, or one that was found is damaged.
    """
    if choice == "none" or (choice == "auto" and info.kind == "image"):
        return ()
    if choice != "auto":
        return read_subtitles(choice)
    for suffix in FORMATS:
        beside = info.path.with_suffix(suffix)
        if beside.is_file():
            return read_subtitles(beside)
    if info.timeline is None:
        return ()
    return read_track(info)


def read_subtitles(path: str | Path) -> tuple[Subtitle, ...]:
    """Read an SRT, WebVTT or ASS file, in UTF-8, UTF-16 or, failing these, Windows-1252.

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
    text = _decode_text(data).replace("\r\n", "\n")
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


def _decode_text(data: bytes) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")
