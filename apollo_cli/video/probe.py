"""Look at a video or image once: true times, true size, and what is wrong with the file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import av
import av.container
import av.video.stream
import numpy as np

from apollo_cli.errors import MediaError
from apollo_cli.video.clock import read_clock
from apollo_cli.video.container import (
    DEFAULT_LIMITS,
    Limits,
    check_index,
    identify,
    open_container,
    resolve_file,
    shown,
    sniff,
    unchanged,
)
from apollo_cli.video.feed import is_cover, picture_streams
from apollo_cli.video.findings import describe_faults
from apollo_cli.video.folder import probe_folder
from apollo_cli.video.images import read_image_facts
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.packets import PacketScan, scan_packets
from apollo_cli.video.picture import display_shape
from apollo_cli.video.timeline import build_timeline, order_times, typical_step
from apollo_cli.video.trial import FirstPictures, decode_first

# Each of these keeps a palette from the first packet on, or is not safe to enter midway.
_STRAIGHT_CODECS = (
    "msrle",
    "msvideo1",
    "cinepak",
    "smc",
    "8bps",
    "qtrle",
    "flic",
    "zmbv",
    "rawvideo",
)
_TRUE_TIME_CONTAINERS = ("mov", "matroska", "mpegts", "mpeg", "flv", "nut")
_INDEXED_CONTAINERS = ("mov", "matroska")


def probe(
    path: str | Path,
    *,
    stream: int | None = None,
    image_fps: float | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> VideoInfo:
    """Read every packet of a file, decode its first pictures, and say what is in it.

    Args:
        path: a plain file; links are followed. With ``image_fps`` it may be a folder of images.
        stream: number of the stream among all of the file; None takes the main picture stream.
        image_fps: how many images of a folder make a second.
        limits: larger files than these are refused.

    Raises:
        MediaError: not a plain file, not a video or image, nothing to decode, protected, too large.
    """
    if image_fps is not None and os.path.isdir(path):
        return probe_folder(Path(os.path.abspath(path)), image_fps, limits)
    absolute = resolve_file(path)
    identity = identify(absolute)
    with unchanged(absolute, identity):
        is_image = sniff(absolute) == "image"
        info = (
            _probe_image(absolute, limits) if is_image else _probe_video(absolute, stream, limits)
        )
    return replace(info, identity=identity)


def _probe_video(absolute: Path, stream: int | None, limits: Limits) -> VideoInfo:
    with open_container(absolute) as container:
        picked = pick_stream(container, absolute, stream)
        # Matroska loads its index at the first seek; mov has all of it when it isn't fragmented.
        is_mov = container.format.name.startswith("mov")
        has_index = len(picked.index_entries) > 0 or not is_mov
        limits.check_size(absolute, picked.codec_context.width, picked.codec_context.height)
        scan = scan_packets(container, picked, limits.max_pictures)
        if scan is None:
            limits.refuse_pictures(absolute)
        check_content(absolute, scan)
        first = decode_first(absolute, picked.index, scan)
        may_seek = has_index and container.format.name.startswith(_INDEXED_CONTAINERS)
        info = _assemble(absolute, container, picked, scan=scan, first=first, may_seek=may_seek)
    limits.check_size(absolute, *info.stored_size)
    limits.check_size(absolute, *info.display_size)
    limits.check_duration(absolute, info.duration_seconds)
    return info


def _probe_image(path: Path, limits: Limits) -> VideoInfo:
    facts = read_image_facts(path, limits)
    moves = facts.frames > 1
    step = typical_step(facts.seconds)
    misnamed = []
    if path.suffix.lower() in (".mp4", ".mov", ".mkv", ".avi", ".webm", ".m4v", ".ts"):
        misnamed.append(f"an image ({facts.codec}) under the name of a video")
    return VideoInfo(
        path=path,
        kind="video" if moves else "image",
        times=facts.seconds[:-1],
        duration_seconds=float(facts.seconds[-1]),
        stored_size=facts.stored_size,
        display_size=facts.display_size,
        codec=facts.codec,
        container=facts.codec,
        source_fps=facts.frames / float(facts.seconds[-1]) if moves else None,
        constant_rate=bool(np.allclose(np.diff(facts.seconds), step)),
        tick_seconds=0.001,
        warnings=(*facts.warnings, *misnamed),
    )


def pick_stream(
    container: av.container.InputContainer, path: Path, index: int | None
) -> av.video.stream.VideoStream:
    """The stream of that number, or the main moving one; cover art is never taken for a video.

    Raises:
        MediaError: there is no picture stream, or none of that number.
    """
    moving = picture_streams(container)
    if not moving:
        check_index(path)
        if any(not is_cover(s) for s in container.streams.video):
            raise MediaError(f"{shown(path)} has pictures in a coding that is not known")
        has_sound = bool(container.streams.audio)
        what = "has sound only" if has_sound else "has no picture stream"
        raise MediaError(f"{shown(path)} {what}", "a picture stream is needed")
    if index is not None:
        for candidate in moving:
            if candidate.index == index:
                return candidate
        known = ", ".join(str(s.index) for s in moving)
        raise MediaError(f"--stream {index} of {shown(path)}", f"its picture streams are {known}")
    best = container.streams.best("video")
    return best if isinstance(best, av.video.stream.VideoStream) and best in moving else moving[0]


def check_content(path: Path, scan: PacketScan) -> None:
    """Refuse a stream without anything to decode.

    Raises:
        MediaError: no packets, or protected ones.
    """
    if scan.encrypted:
        raise MediaError(f"{shown(path)} is encrypted", "an unprotected file is needed")
    if not scan.is_shown.any():
        raise MediaError(f"{shown(path)} shows no picture: its picture stream is empty")


def _assemble(
    path: Path,
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    *,
    scan: PacketScan,
    first: FirstPictures,
    may_seek: bool,
) -> VideoInfo:
    is_shown = scan.is_shown & ~first.undecodable
    if not is_shown.any():
        raise MediaError(f"{shown(path)} shows no picture that can be decoded")
    times = order_times(scan, is_shown, float(stream.time_base or 1))
    clock = read_clock(container, stream, scan, times)
    aspect = stream.sample_aspect_ratio
    aspect = None if not aspect or aspect == 1 else aspect
    codec, kind = stream.codec_context.name, container.format.name
    faults = describe_faults(
        path, container, stream, scan=scan, first=first, times=times, clock=clock, aspect=aspect
    )
    timeline = build_timeline(
        scan,
        times,
        may_seek=may_seek,
        in_order=first.pixel_format == "pal8" or codec in _STRAIGHT_CODECS or scan.needs_all,
        reorders=first.reorders and not kind.startswith(_TRUE_TIME_CONTAINERS),
    )
    return VideoInfo(
        path=path,
        kind="video",
        times=clock.seconds,
        duration_seconds=clock.duration_seconds,
        stored_size=first.size,
        display_size=first.turn.size(*display_shape(*first.size, aspect)),
        codec=codec,
        container=kind,
        rotation=first.turn.rotation,
        mirrored=first.turn.mirrored,
        sample_aspect=aspect,
        source_fps=clock.source_fps,
        constant_rate=clock.constant_rate,
        clock_offset_seconds=clock.offset_seconds,
        tick_seconds=clock.tick_seconds,
        stream_index=stream.index,
        warnings=faults,
        timeline=timeline,
    )
