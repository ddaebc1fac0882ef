"""The child process that looks at a file as a browser would, and makes a light copy of it.

Started by ``previews`` as ``encoding look FILE`` or ``encoding make FILE TARGET``. It answers with
lines of JSON on standard output, and ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer, OutputContainer
from av.error import FFmpegError
from av.video.stream import VideoStream
from PIL import Image

from apollo_cli.errors import MediaError
from apollo_cli.video.container import DEFAULT_READING, advance, open_container, sniff, steps
from apollo_cli.video.images import probe_image
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.probe import pick_stream, probe
from apollo_cli.video.reader import read_frames

# Of the shorter side; the longer one follows, up to twice as long a picture as wide.
_SHORT_SIDE, _LONG_SIDE, _IMAGE_SIDE = 480, 960, 1600
_MOST_FPS, _GOP, _SOUND_RATE = 15, 30, 44_100
_TICK = Fraction(1, 1000)
_BEAT_SECONDS = 0.5
_OUT = 1

_IMAGE_TYPES = {
    "jpeg": "image/jpeg",
    "mpo": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
    "bmp": "image/bmp",
    "avif": "image/avif",
}
# What Chromium, Firefox and Safari play alike, by container.
_PLAYED_PICTURES = {"video/mp4": ("h264", "av1", "vp9"), "video/webm": ("vp8", "vp9", "av1")}
_PLAYED_SOUNDS = {
    "video/mp4": ("aac", "mp3", "opus", "flac"),
    "video/webm": ("vorbis", "opus"),
}
_PLAYED_PIXELS = ("yuv420p", "yuvj420p")


def look(path: Path) -> dict[str, Any]:
    """What a browser makes of a file, judged by its content.

    Returns:
        ``kind`` (video or image), ``type`` for the player, ``reason`` why it does not play or "".

    Raises:
        MediaError: it is no video and no image.
    """
    if sniff(path) == "image":
        facts = probe_image(path, DEFAULT_READING)
        if facts.frame_count > 1:
            return _seen("video", "video/mp4", "an animation has no player")
        plays = facts.codec in _IMAGE_TYPES
        why = "" if plays else f"browsers do not show {facts.codec} images"
        return _seen("image", _IMAGE_TYPES.get(facts.codec, "image/jpeg"), why)
    with open_container(path) as container:
        stream = pick_stream(container, path, None)
        kind = _container_type(path, container.format.name)
        if kind is None:
            name = container.format.name.split(",")[0]
            return _seen("video", "video/mp4", f"browsers do not open {name} files")
        codec, pixels = stream.codec_context.name, stream.codec_context.pix_fmt
        decoder = {"libdav1d": "av1", "libvpx": "vp8", "libvpx-vp9": "vp9"}.get(codec, codec)
        sounds = [sound.codec_context.name for sound in container.streams.audio][:1]
        starts = float(container.start_time or 0) / av.time_base
        why = ""
        if decoder not in _PLAYED_PICTURES[kind]:
            why = f"browsers do not play {decoder} everywhere"
        elif pixels not in _PLAYED_PIXELS:
            why = f"browsers do not play {pixels} pictures everywhere"
        elif not set(sounds) <= set(_PLAYED_SOUNDS[kind]):
            why = f"browsers do not play {sounds[0]} sound"
        elif container.streams.video[0] is not stream:
            why = "a browser would show another picture stream"
        elif kind == "video/webm" and starts > 0.1:
            why = f"its clock starts at {starts:.1f} s"
        return _seen("video", kind, why)


def make(path: Path, target: Path, told: Progress) -> None:
    """Write a light copy that every browser plays: H.264 and AAC in mp4, or a JPEG of an image.

    Its times are those of ``VideoInfo``: from 0, with every picture on display as in the original
    up to a fifteenth of a second. Nothing stands at ``target`` before it is whole.

    Raises:
        MediaError: nothing can be decoded.
    """
    info = probe(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        if info.kind == "image":
            rgb = next(read_frames(info, [0.0])).rgb
            image = Image.fromarray(rgb)
            image.thumbnail((_IMAGE_SIDE, _IMAGE_SIDE))
            image.save(part, "JPEG", quality=85)
        else:
            _encode(info, part, told)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


class Progress:
    """Says the share done whenever work went on since the last time, from a thread of its own."""

    def __init__(self) -> None:
        self.share = 0.0
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        last, wait = -1, threading.Event()
        while not wait.wait(_BEAT_SECONDS):
            now = steps()
            if now != last:
                _say({"share": round(self.share, 4)})
                last = now


def _seen(kind: str, media_type: str, reason: str) -> dict[str, Any]:
    return {"kind": kind, "type": media_type, "reason": reason}


def _container_type(path: Path, name: str) -> str | None:
    if name.startswith("mov"):
        return "video/mp4"
    if not name.startswith("matroska"):
        return None
    with path.open("rb") as file:
        # Matroska in general is not played everywhere; its header says which of the two it is.
        return "video/webm" if b"webm" in file.read(64) else None


def _encode(info: VideoInfo, part: Path, told: Progress) -> None:
    width, height = _fit(*info.display_size)
    flags = {"movflags": "+faststart"}
    with av.open(str(part), "w", format="mp4", options=flags) as container:
        film = container.add_stream("libx264", rate=_MOST_FPS)
        assert isinstance(film, VideoStream)
        film.width, film.height, film.pix_fmt = width, height, "yuv420p"
        film.codec_context.time_base = _TICK
        film.codec_context.gop_size = _GOP
        film.codec_context.thread_count = 1
        film.options = {
            "preset": "veryfast",
            "profile": "baseline",
            "crf": "28",
            "maxrate": "700k",
            "bufsize": "1400k",
        }
        pictures = ((t, film, frame) for t, frame in _pictures(info, width, height))
        tracks: list[Iterator[tuple[float, Any, Any]]] = [pictures]
        with contextlib.ExitStack() as stack:
            if info.timeline is not None:
                source = stack.enter_context(open_container(info.path))
                tracks += _sound_track(info, source, container)
            for seconds, stream, frame in heapq.merge(*tracks, key=lambda item: item[0]):
                container.mux(stream.encode(frame))
                told.share = min(1.0, seconds / max(info.duration_seconds, 1e-6))
                advance()
        _flush(container)


def _sound_track(
    info: VideoInfo, source: InputContainer, container: OutputContainer
) -> Iterator[Iterator[tuple[float, Any, Any]]]:
    voice = source.streams.best("audio")
    if not isinstance(voice, AudioStream) or voice.codec_context is None:
        return
    sound = container.add_stream("aac", rate=_SOUND_RATE, layout="stereo")
    sound.bit_rate = 96_000
    heard = _sounds(source, voice, info.clock_offset_seconds, info.duration_seconds)
    yield ((t, sound, frame) for t, frame in heard)


def _flush(container: OutputContainer) -> None:
    for stream in container.streams:
        if isinstance(stream, VideoStream | AudioStream):
            container.mux(stream.encode(None))


def _fit(width: int, height: int) -> tuple[int, int]:
    """Even sides, no larger than the preview and never larger than the original."""
    scale = min(1.0, _SHORT_SIDE / min(width, height), _LONG_SIDE / max(width, height))
    return max(2, round(width * scale / 2) * 2), max(2, round(height * scale / 2) * 2)


def _pictures(info: VideoInfo, width: int, height: int) -> Iterator[tuple[float, av.VideoFrame]]:
    """Seconds and picture; of those within a fifteenth of a second, the last, which stays."""
    step = 1 / _MOST_FPS
    slots = np.ceil((info.times - info.tick_seconds) * _MOST_FPS)
    times = info.times[np.append(np.diff(slots) > 0, True)]
    rgb: np.ndarray | None = None
    stamp = -1
    for frame in read_frames(info, times):
        rgb = frame.rgb
        stamp = max(stamp + 1, round(times[frame.position] * 1000)) if stamp >= 0 else 0
        yield stamp / 1000, _picture(rgb, stamp, (width, height))
    # The last picture stays to the end, which an mp4 only says by one more.
    end = round((info.duration_seconds - step) * 1000)
    if rgb is not None and end > stamp:
        yield end / 1000, _picture(rgb, end, (width, height))


def _picture(rgb: np.ndarray, stamp: int, size: tuple[int, int]) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(*size, format="yuv420p")
    frame.pts, frame.time_base = stamp, _TICK
    return frame


def _sounds(
    source: InputContainer, voice: AudioStream, offset: float, end: float
) -> Iterator[tuple[float, av.AudioFrame]]:
    """Seconds and samples on the clock of the pictures; sound that breaks off is left out."""
    resampler = av.AudioResampler(format="fltp", layout="stereo", rate=_SOUND_RATE)
    base = Fraction(1, _SOUND_RATE)
    following = 0
    for packet in source.demux(voice):
        try:
            decoded = [piece for frame in packet.decode() for piece in resampler.resample(frame)]
        except (FFmpegError, ValueError):
            # A damaged packet, or another layout from here on: silence is no reason to fail.
            continue
        for frame in decoded:
            if frame.pts is None or frame.time_base is None:
                continue
            seconds = float(frame.pts * frame.time_base) - offset
            stamp = round(seconds * _SOUND_RATE)
            if seconds < 0 or seconds > end or stamp < following:
                continue
            frame.pts, frame.time_base = stamp, base
            following = stamp + frame.samples
            yield seconds, frame


def _say(message: dict[str, Any]) -> None:
    os.write(_OUT, (json.dumps(message) + "\n").encode())


def _end_with_owner() -> None:
    while os.read(0, 1 << 10):
        pass
    os._exit(0)


def main() -> None:
    """Serve the one request that the arguments hold."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_owner, daemon=True).start()
    task, path, *rest = sys.argv[1:]
    try:
        if task == "look":
            _say(look(Path(path)))
        else:
            if hasattr(os, "nice"):
                os.nice(10)
            make(Path(path), Path(rest[0]), Progress())
            _say({"done": True})
    except MediaError as error:
        _say({"error": error.message})


if __name__ == "__main__":
    _OUT = os.dup(1)
    # What a library prints must not be taken for an answer.
    os.dup2(2, 1)
    main()
