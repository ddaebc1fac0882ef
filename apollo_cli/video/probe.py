"""Probe a video or image: true times, true size, and what is wrong with the file."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.container
import av.video.stream
import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError
from apollo_cli.text import count
from apollo_cli.video.container import (
    DEFAULT_READING,
    check_index,
    check_length,
    check_size,
    identify,
    open_container,
    resolve_file,
    shown,
    sniff,
    structure_faults,
    unchanged,
)
from apollo_cli.video.decoder import Decoder
from apollo_cli.video.images import probe_folder, probe_image
from apollo_cli.video.info import (
    FORMAT_CHANGES,
    NO_TIME,
    VideoInfo,
    leading_packets,
    typical_step,
)
from apollo_cli.video.packets import (
    PacketScan,
    build_timeline,
    damaged_spans,
    is_cover,
    order_times,
    picture_streams,
    scan_packets,
)
from apollo_cli.video.picture import display_size, is_hdr, read_turn

# Each of these keeps a palette from the first packet on, or is not safe to enter midway.
_IN_ORDER = (
    *("msrle", "msvideo1", "cinepak", "smc", "8bps", "qtrle", "flic", "zmbv"),
    "rawvideo",
)
_TRUE_TIME_CONTAINERS = ("mov", "matroska", "mpegts", "mpeg", "flv", "nut")
_INDEXED_CONTAINERS = ("mov", "matroska")
_GUESSED_RATE = Fraction(25)

# A header may round; it may not promise more than this share beyond what is there.
_LENGTH_SLACK, _LENGTH_SLACK_SECONDS = 0.05, 0.5
_LONG_GAP_SECONDS, _SPLICED_GAP_SECONDS = 60.0, 5.0
_OFFSET_SECONDS = 0.9
# Pictures that another stream takes over begin about where the first one ends.
_HANDOVER_SECONDS = 0.5
_SPLICED_CONTAINERS = ("mpegts", "mpeg", "flv", "asf")

# Packets that are decoded behind the last one that matters, and at most.
_FURTHER_PACKETS, _MOST_PACKETS = 6, 300


def probe(path: str | Path, reading: ReadingOptions = DEFAULT_READING) -> VideoInfo:
    """Read every packet of a file, decode its first pictures, and describe it.

    Args:
        path: a plain file; links are followed. With ``image_fps`` it may be a folder of images.
        reading: its ``stream``, ``image_fps`` and limits count.

    Raises:
        MediaError: not a plain file, not a video or image, nothing to decode, protected, too large.
    """
    if reading.image_fps is not None and os.path.isdir(path):
        return probe_folder(Path(os.path.abspath(path)), reading)
    absolute = resolve_file(path)
    identity = identify(absolute)
    with unchanged(absolute, identity):
        if sniff(absolute) == "image":
            info = probe_image(absolute, reading)
        else:
            info = _probe_video(absolute, reading)
            # Asked for its side data, a picture of PyAV refers to itself: nothing else frees it
            # soon.
            gc.collect(1)
    return replace(info, identity=identity)


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
        what = "has sound only" if container.streams.audio else "has no picture stream"
        raise MediaError(f"{shown(path)} {what}", "a picture stream is needed")
    if index is None:
        best = container.streams.best("video")
        return next((stream for stream in moving if stream is best), moving[0])
    for stream in moving:
        if stream.index == index:
            return stream
    known = ", ".join(str(stream.index) for stream in moving)
    raise MediaError(f"--stream {index} of {shown(path)}", f"its picture streams are {known}")


def _probe_video(path: Path, reading: ReadingOptions) -> VideoInfo:
    with open_container(path) as container:
        stream = pick_stream(container, path, reading.stream)
        codec, kind = stream.codec_context.name, container.format.name
        # Matroska loads its index at the first seek; mov has all of it when it isn't fragmented.
        has_index = len(stream.index_entries) > 0 or not kind.startswith("mov")
        check_size(path, (stream.codec_context.width, stream.codec_context.height), reading)
        scan = scan_packets(container, stream, reading.max_pictures)
        check_length(path, len(scan), 0, reading)
        first, undecodable, reorders = _decode_first(path, stream.index, scan)
        is_shown = scan.is_shown & ~undecodable
        if not is_shown.any():
            raise MediaError(f"{shown(path)} shows no picture that can be decoded")
        tick_seconds = float(stream.time_base or 1)
        ticks, order, restarts, untimed = order_times(scan, is_shown, tick_seconds)
        clock = _read_clock(container, stream, ticks, float(scan.durations[order[-1]]), untimed)
        aspect = stream.sample_aspect_ratio
        aspect = aspect if aspect and aspect != 1 else None
        rotation, mirrored, angle = read_turn(first)
        info = VideoInfo(
            path=path,
            kind="video",
            **clock,
            stored_size=(first.width, first.height),
            display_size=display_size(first.width, first.height, aspect, rotation),
            codec=codec,
            container=kind,
            rotation=rotation,
            mirrored=mirrored,
            sample_aspect=aspect,
            stream_index=stream.index,
            timeline=build_timeline(
                scan,
                order,
                may_seek=has_index and kind.startswith(_INDEXED_CONTAINERS) and not restarts,
                in_order=first.format.name == "pal8" or codec in _IN_ORDER or scan.needs_all,
                reorders=reorders and not kind.startswith(_TRUE_TIME_CONTAINERS),
            ),
        )
        faults = [
            *_data_faults(info, container, stream, scan, int((scan.is_shown & undecodable).sum())),
            *_time_faults(info, container, stream, restarts, untimed),
        ]
        if abs(angle / 90 % 1 - 0.5) < 0.49:
            faults.append(f"turned by {angle:.0f} degrees: it is shown upright to a right angle")
        interlaced = "interlaced: pictures are taken as they are stored"
        faults += [interlaced] if first.interlaced_frame else []
        faults += ["HDR: brightness is mapped to an ordinary screen"] if is_hdr(first) else []
    check_size(path, info.stored_size, reading)
    check_size(path, info.display_size, reading)
    check_length(path, info.frame_count, info.duration_seconds, reading)
    return replace(info, warnings=tuple(faults))


def _read_clock(
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    ticks: np.ndarray,
    last: float,
    untimed: int,
) -> dict[str, Any]:
    """The fields of ``VideoInfo`` that say when pictures are shown, on a player's clock.

    mp4 and mov keep their edited time line, since players show it so; in other containers the
    clock starts at the first time stamp, be it of sound or of pictures.

    Args:
        ticks: (pictures,) times. last: how long the last one is shown, 0 where unknown.
        untimed: how many of them have no time stamp.
    """
    tick = stream.time_base or Fraction(1)
    nominal = stream.average_rate
    rate = stream.codec_context.framerate or nominal or stream.guessed_rate or _GUESSED_RATE
    nominal_step = float(1 / rate / tick)
    ticks = ticks * nominal_step if untimed == len(ticks) else ticks
    step = typical_step(ticks) or last or nominal_step
    first, start = float(ticks[0] * tick), container.start_time
    if container.format.name.startswith("mov"):
        offset = min(0.0, first)
    else:
        offset = first if start is None else min(first, start / av.time_base)
    # Dividing last gives the nearest float to each true time.
    seconds = ticks * tick.numerator / tick.denominator - offset
    fps = float(nominal) if nominal else None
    if len(seconds) > 1 and seconds[-1] > seconds[0]:
        measured = (len(seconds) - 1) / float(seconds[-1] - seconds[0])
        # Coarse ticks blur the measured rate; the nominal one is exact where the two agree.
        fps = fps if fps and abs(fps / measured - 1) < 2e-3 else measured
    return {
        "times": seconds,
        "duration_seconds": float(seconds[-1] + (last if 0 < last < 100 * step else step) * tick),
        "source_fps": fps,
        "constant_rate": bool((np.abs(np.diff(ticks) - step) <= max(1.01, 0.02 * step)).all()),
        "clock_offset_seconds": offset,
        "tick_seconds": float(tick),
    }


def _decode_first(
    path: Path, stream_index: int, scan: PacketScan
) -> tuple[av.VideoFrame, np.ndarray, bool]:
    """Decode from the first key packet to the last picture that is shown before it.

    Returns:
        The first picture; for each packet whether it is undecodable, since it lies in front of
        the first key packet or is built on pictures that are not in the file; whether the decoder
        holds pictures back, to put them into another order.

    Raises:
        MediaError: it is encrypted, or nothing comes out.
    """
    if scan.encrypted:
        raise MediaError(f"{shown(path)} is encrypted", "an unprotected file is needed")
    keys = np.flatnonzero(scan.is_key)
    start = int(keys[0]) if len(keys) else 0
    numbers = np.arange(len(scan))
    leads = np.isin(numbers, leading_packets(scan.pts, keys, start)) & scan.is_shown
    last = int(np.flatnonzero(leads)[-1]) if leads.any() else start
    stop = min(start + _MOST_PACKETS, last + _FURTHER_PACKETS)
    came: set[int] = set()
    first: av.VideoFrame | None = None
    is_sound, packet = True, None
    with closing(Decoder(path, stream_index)) as decoder:
        decoder.skip_to(start)
        while first is None or decoder.number < stop:
            packet = decoder.read()
            pictures = decoder.drain() if packet is None else decoder.decode(packet)
            came.update(number for number, _ in pictures)
            is_sound &= not decoder.is_broken
            first = first or next((frame for _, frame in pictures), None)
            if packet is None:
                break
        came.update(number for number, _ in decoder.drain())
        reorders = decoder.context.has_b_frames
    if first is None:
        raise MediaError(f"{shown(path)} shows no picture that can be decoded")
    undecodable = (numbers < start) | (leads & ~np.isin(numbers, list(came)))
    if is_sound and came and (shown_first := scan.pts[min(came)]) != NO_TIME:
        # Where no picture stands alone, the decoder holds back all until the whole is refreshed.
        undecodable |= (numbers < min(came)) & (scan.pts < shown_first)
    return first, undecodable, reorders


def _data_faults(
    info: VideoInfo,
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    scan: PacketScan,
    lost: int,
) -> Iterator[str]:
    """Yield what is missing, damaged or not read.

    Args:
        lost: number of pictures at the start that can't be decoded.
    """
    if scan.cut_short:
        yield "the file ends early: the last picture is incomplete"
    if scan.blank:
        missing = count(scan.blank, "picture is missing", "pictures are missing")
        yield f"{missing}: the file has holes of zeros"
    if holes := damaged_spans(scan):
        touched = sum(int(scan.is_shown[first:end].sum()) for first, end in holes)
        damaged = count(touched, "picture is damaged", "pictures are damaged")
        yield f"data is lost in {count(len(holes), 'place')}: about {damaged}"
    if lost:
        first = "first picture" if lost == 1 else f"first {lost} pictures"
        yield f"the {first} can't be decoded: the file starts in a group"
    others = [str(s.index) for s in picture_streams(container) if s.index != stream.index]
    if others:
        names = ", ".join(others)
        yield f"only picture stream {stream.index} is read, not {names}: choose with --stream"
    known = scan.pts[scan.pts != NO_TIME] * float(stream.time_base or 1)
    for index, (begins, ends) in scan.elsewhere.items():
        # Pictures that go on in another stream, not the same time seen by another camera.
        if len(known) and (
            begins > known.max() - _HANDOVER_SECONDS or ends < known.min() + _HANDOVER_SECONDS
        ):
            yield f"stream {index} holds the pictures from {begins:.1f} s to {ends:.1f} s"
    if scan.has_late_streams:
        yield "further streams begin on the way: they are not read"
    yield from structure_faults(info.path, info.container, stream.id)
    if len(scan.formats) > 1:
        yield FORMAT_CHANGES


def _time_faults(
    info: VideoInfo,
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    restarts: int,
    untimed: int,
) -> Iterator[str]:
    """Yield what is odd about the times of pictures, and that the header promises more of them."""
    seconds = info.times
    if untimed == len(seconds):
        yield "no time stamps: times follow from a nominal rate"
    elif untimed:
        pictures = count(untimed, "picture has", "pictures have")
        yield f"{pictures} no time stamp: it is estimated"
    if restarts:
        yield "the time line starts again on the way: the parts are put end to end"
    gaps = np.diff(seconds)
    is_spliced = info.container in _SPLICED_CONTAINERS
    long = _SPLICED_GAP_SECONDS if is_spliced else _LONG_GAP_SECONDS
    if (gaps > max(long, 10 * typical_step(seconds))).any():
        where = int(np.argmax(gaps))
        span = f"{seconds[where]:.1f} s and {seconds[where + 1]:.1f} s"
        yield f"no picture between {span}: the time line jumps"
    if repeats := int((gaps <= 0).sum()):
        shared = count(repeats, "picture shares its time", "pictures share their time")
        yield f"{shared} with another one"
    if info.clock_offset_seconds > _OFFSET_SECONDS:
        start = f"{info.clock_offset_seconds:.2f} s"
        yield f"the file's clock starts at {start}: times count from there"
    if stream.duration and stream.time_base:
        promised = float(stream.duration * stream.time_base)
    elif len(container.streams) == 1 and container.duration:
        # With several streams, the container's length may be that of the sound.
        promised = container.duration / av.time_base
    else:
        promised = 0.0
    # Some containers count from 0, some from the first picture, some from their own start.
    end, start = info.duration_seconds, (container.start_time or 0) / av.time_base
    ends = (end, end - float(info.times[0]), end + start)
    nearest = min(ends, key=lambda there: abs(there - promised))
    if not restarts and promised - nearest > max(_LENGTH_SLACK_SECONDS, _LENGTH_SLACK * nearest):
        yield f"the header promises {promised:.1f} s, the pictures end at {end:.1f} s"
