"""Make small marked videos of further kinds, with PyAV."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from av.video.stream import VideoStream

from apollo_cli.config import ReadingOptions
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.reader import read_frames
from tests.cases.marker import draw_marker, read_marker

LINES = b"1\n00:00:06,000 --> 00:00:07,000\n<b>one</b>\n\n2\n00:00:08,000 --> 00:00:09,000\ntwo\n"


def marked_frame(number: int, hundredths: int, size: tuple[int, int]) -> av.VideoFrame:
    """One picture with its marker, as RGB."""
    gray = draw_marker(number, hundredths, *size)
    return av.VideoFrame.from_ndarray(np.repeat(gray[..., None], 3, axis=2), format="rgb24")


class Shown(NamedTuple):
    """What a reading gave for a picture: its time, and the number drawn into it.

    The number is None where there is no marker, or one that is turned.
    """

    seconds: float
    number: int | None
    is_damaged: bool


def read_marks(info: VideoInfo, indices: Sequence[int] | None = None) -> list[Shown]:
    """Read the pictures of these indices, or all, by their times; in the order of the indices."""
    times = info.times if indices is None else info.times[list(indices)]
    found: dict[int, Shown] = {}
    for frame in read_frames(info, times, ReadingOptions()):
        mark = read_marker(frame.rgb)
        number = mark.number if mark and mark.turned == 0 else None
        assert frame.position not in found
        wanted = float(times[frame.position])
        found[frame.position] = Shown(float(frame.seconds), number, wanted in frame.damaged)
    return [found[position] for position in range(len(times))]


def numbers(info: VideoInfo, indices: Sequence[int] | None = None) -> list[int | None]:
    """The numbers drawn into pictures that are all sound and at their times."""
    seen = read_marks(info, indices)
    times = info.times if indices is None else info.times[list(indices)]
    assert [one.seconds for one in seen] == times.tolist()
    assert not any(one.is_damaged for one in seen)
    return [one.number for one in seen]


def remux(
    source: Path, target: Path, keep: Callable[[int, av.Packet], bool] = lambda *_: True
) -> Path:
    """Copy the coded pictures as they are into another container.

    Args:
        keep: whether to take a packet, by the number of key packets up to it and itself.
    """
    with av.open(str(source)) as read, av.open(str(target), "w") as written:
        stream = read.streams.video[0]
        copy = written.add_stream_from_template(stream)
        keys = 0
        for packet in read.demux(stream):
            keys += packet.is_keyframe
            if packet.dts is not None and keep(keys, packet):
                packet.stream = copy
                written.mux(packet)
    return target


def packets_of(path: Path) -> list[bytes]:
    """The coded pictures of a film, in file order."""
    with av.open(str(path)) as container:
        return [bytes(p) for p in container.demux(container.streams.video[0]) if p.size]


def make_film(
    path: Path,
    *,
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    size: tuple[int, int] = (160, 90),
    count: int = 60,
    fps: Fraction | int = 30,
    gop: int = 15,
    ticks: Sequence[int] | None = None,
    tick: Fraction | None = None,
    options: dict[str, str] | None = None,
    mux: dict[str, str] | None = None,
    file_format: str | None = None,
    prepare: Callable[[VideoStream], None] | None = None,
) -> Path:
    """Write a film whose picture k carries the mark k; returns its path.

    Args:
        ticks: time stamp of each picture in units of ``tick``; evenly spaced at ``fps`` if None.
        options, mux: for the encoder and for the container.
        prepare: called with the stream before the first picture.
    """
    with av.open(str(path), "w", format=file_format, options=mux or {}) as container:
        stream = container.add_stream(codec, rate=fps)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height = size
        stream.pix_fmt = pixel_format
        stream.codec_context.gop_size = gop
        stream.options = dict(options or {})
        if tick is not None:
            stream.codec_context.time_base = tick
        if prepare:
            prepare(stream)
        base = tick or 1 / Fraction(fps)
        for number in range(count):
            stamp = number if ticks is None else ticks[number]
            frame = marked_frame(number, abs(round(stamp * base * 100)), size)
            frame = frame.reformat(format=pixel_format)
            frame.pts, frame.time_base = stamp, base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def make_talk(path: Path, lines: bytes = LINES) -> Path:
    """A film with a text track; its clock starts at five seconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = 160, 90, "yuv420p"
        with av.open(io.BytesIO(lines), mode="r", format="srt") as source:
            text = container.add_stream_from_template(source.streams[0])
            packets = [packet for packet in source.demux() if packet.size]
        for packet in packets:
            packet.stream = text
            container.mux(packet)
        for number in range(50):
            frame = marked_frame(number, 0, (160, 90)).reformat(format="yuv420p")
            frame.pts, frame.time_base = number + 50, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
