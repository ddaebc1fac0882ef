"""Videos for measurements, made with PyAV: moving content, a noise floor, B-frames, a fixed GOP."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

_SEGMENT_SECONDS = 20


def make_video(
    path: Path, seconds: int, size: tuple[int, int] = (320, 180), fps: int = 30, gop: int = 60
) -> Path:
    """Write an H.264 file; a segment is encoded once and its packets are repeated.

    Args:
        path: ends in .mp4.
        size: width and height.
        gop: frames from one key frame to the next; the segments are closed.
    """
    packets, template_path = _encode_segment(path.with_suffix(".part.mp4"), size, fps, gop)
    with av.open(str(template_path)) as template, av.open(str(path), "w") as output:
        source = template.streams.video[0]
        assert source.time_base is not None
        stream = output.add_stream_from_template(source)
        stream.time_base = source.time_base
        ticks = round(_SEGMENT_SECONDS / source.time_base)
        for number in range(-(-seconds // _SEGMENT_SECONDS)):
            for data, pts, dts, is_key in packets:
                packet = av.Packet(data)
                packet.pts, packet.dts = pts + number * ticks, dts + number * ticks
                packet.time_base, packet.stream, packet.is_keyframe = (
                    source.time_base,
                    stream,
                    is_key,
                )
                output.mux(packet)
    template_path.unlink()
    return path


def _encode_segment(
    path: Path, size: tuple[int, int], fps: int, gop: int
) -> tuple[list[tuple[bytes, int, int, bool]], Path]:
    width, height = size
    options = {
        "preset": "veryfast",
        "bf": "3",
        "g": str(gop),
        "x264-params": "open-gop=0:scenecut=0",
    }
    rows, columns = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(0).integers(0, 24, (height, width), dtype=np.uint8)
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.time_base = Fraction(1, fps)
        for number in range(_SEGMENT_SECONDS * fps):
            picture = np.empty((height, width, 3), np.uint8)
            picture[..., 0] = (rows + 3 * number) % 256
            picture[..., 1] = (columns + rows // 2 - 2 * number) % 256
            picture[..., 2] = np.roll(noise, number, axis=1) + 100
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    with av.open(str(path)) as container:
        packets = [
            (bytes(packet), int(packet.pts), int(packet.dts), packet.is_keyframe)
            for packet in container.demux(video=0)
            if packet.size and packet.pts is not None and packet.dts is not None
        ]
    return packets, path
