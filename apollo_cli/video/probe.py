"""Probe a video or image: true times, true size, and what is wrong with the file."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import av
import av.container
import av.video.stream
import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError
from apollo_cli.video.boxes import structure_faults
from apollo_cli.video.clock import read_clock
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
    unchanged,
)
from apollo_cli.video.feed import Feed, is_cover, picture_streams
from apollo_cli.video.images import probe_folder, probe_image
from apollo_cli.video.info import FORMAT_CHANGES, VideoInfo
from apollo_cli.video.packets import NO_TIME, PacketScan, scan_packets
from apollo_cli.video.picture import Turn, display_shape, read_turn, turn_angle
from apollo_cli.video.timeline import (
    Times,
    build_timeline,
    damaged_spans,
    leading_packets,
    order_times,
    typical_step,
)
from apollo_cli.video.tonemap import is_hdr
from apollo_cli.words import count

# Each of these keeps a palette from the first packet on, or is not safe to enter midway.
_IN_ORDER = [
    "msrle",
    "msvideo1",
    "cinepak",
    "smc",
    "8bps",
    "qtrle",
    "flic",
    "zmbv",
    "rawvideo",
]
_TRUE_TIME_CONTAINERS = ("mov", "matroska", "mpegts", "mpeg", "flv", "nut")
_INDEXED_CONTAINERS = ("mov", "matroska")

# A header may round; it may not promise more than this share beyond what is there.
_LENGTH_SLACK = 0.05
_LENGTH_SLACK_SECONDS = 0.5
_LONG_GAP_SECONDS = 60.0
_SPLICED_GAP_SECONDS = 5.0
_HANDOVER_SECONDS = 0.2
_OFFSET_SECONDS = 0.9
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
        is_image = sniff(absolute) == "image"
        info = probe_image(absolute, reading) if is_image else _probe_video(absolute, reading)
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
    if index is not None:
        for candidate in moving:
            if candidate.index == index:
                return candidate
        known = ", ".join(str(s.index) for s in moving)
        raise MediaError(f"--stream {index} of {shown(path)}", f"its picture streams are {known}")
    best = container.streams.best("video")
    return best if isinstance(best, av.video.stream.VideoStream) and best in moving else moving[0]


def _probe_video(path: Path, reading: ReadingOptions) -> VideoInfo:
    with open_container(path) as container:
        stream = pick_stream(container, path, reading.stream)
        codec, kind = stream.codec_context.name, container.format.name
        # Matroska loads its index at the first seek; mov has all of it when it isn't fragmented.
        has_index = len(stream.index_entries) > 0 or not kind.startswith("mov")
        check_size(path, (stream.codec_context.width, stream.codec_context.height), reading)
        scan = scan_packets(container, stream, reading.max_pictures)
        if scan is None:
            check_length(path, reading.max_pictures + 1, 0, reading)
        assert scan is not None
        if scan.encrypted:
            raise MediaError(f"{shown(path)} is encrypted", "an unprotected file is needed")
        if not scan.is_shown.any():
            raise MediaError(f"{shown(path)} shows no picture: its picture stream is empty")
        first = _decode_first(path, stream.index, scan)
        is_shown = scan.is_shown & ~first.undecodable
        if not is_shown.any():
            raise MediaError(f"{shown(path)} shows no picture that can be decoded")
        times = order_times(scan, is_shown, float(stream.time_base or 1))
        clock = read_clock(container, stream, scan, times)
        aspect = stream.sample_aspect_ratio
        aspect = None if not aspect or aspect == 1 else aspect
        info = VideoInfo(
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
            timeline=build_timeline(
                scan,
                times,
                may_seek=has_index and kind.startswith(_INDEXED_CONTAINERS),
                in_order=first.is_palette or codec in _IN_ORDER or scan.needs_all,
                reorders=first.reorders and not kind.startswith(_TRUE_TIME_CONTAINERS),
            ),
        )
        lost = int((scan.is_shown & first.undecodable).sum())
        faults = _faults(
            info, container, stream, scan=scan, times=times, lost=lost, first=first.warnings
        )
        warnings = tuple(faults)
    check_size(path, info.stored_size, reading)
    check_size(path, info.display_size, reading)
    check_length(path, info.frame_count, info.duration_seconds, reading)
    return replace(info, warnings=warnings)


@dataclass(frozen=True)
class _FirstPictures:
    """What decoding the start of a stream has found out.

    Attributes:
        size: stored width and height.
        turn: from the display matrix.
        is_palette: pixels are numbers of colours.
        reorders: the decoder holds pictures back, to put them into another order.
        undecodable: (packets,) bool: in front of the first key packet, or behind it and built on
            pictures that are not in the file.
        warnings: what is odd about the first picture.
    """

    size: tuple[int, int]
    turn: Turn
    is_palette: bool
    reorders: bool
    undecodable: np.ndarray
    warnings: list[str]


def _decode_first(path: Path, stream_index: int, scan: PacketScan) -> _FirstPictures:
    """Decode from the first key packet to the last picture that is shown before it.

    Raises:
        MediaError: nothing comes out.
    """
    keys = np.flatnonzero(scan.is_key)
    start = int(keys[0]) if len(keys) else 0
    numbers = np.arange(len(scan.pts))
    leads = np.isin(numbers, leading_packets(scan.pts, keys, start)) & scan.is_shown
    last = int(np.flatnonzero(leads)[-1]) if leads.any() else start
    stop = min(start + _MOST_PACKETS, last + _FURTHER_PACKETS)
    came: set[int] = set()
    first: av.VideoFrame | None = None
    pictures: list[tuple[int, av.VideoFrame]] = []
    is_sound = True
    with closing(Feed(path, stream_index)) as feed:
        feed.skip_to(start)
        while first is None or feed.number < stop:
            packet = feed.read()
            pictures = feed.drain() if packet is None else feed.decode(packet)
            came.update(number for number, _ in pictures)
            is_sound &= not feed.is_broken
            if first is None and pictures:
                first = pictures[0][1]
            if packet is None:
                break
        came.update(number for number, _ in feed.drain())
    if first is None:
        raise MediaError(f"{shown(path)}: no picture can be decoded", "it may be damaged")
    undecodable = (numbers < start) | (leads & ~np.isin(numbers, list(came)))
    if is_sound and came and (shown_first := scan.pts[min(came)]) != NO_TIME:
        # Where no picture stands alone, the decoder holds back all until the whole is refreshed.
        undecodable |= (numbers < min(came)) & (scan.pts < shown_first)
    angle = turn_angle(first)[0]
    faults = {
        f"the picture is turned by {angle:.0f} degrees: it is shown upright to the nearest right "
        "angle": abs(angle / 90 % 1 - 0.5) < 0.49,
        "interlaced: pictures are taken as they are stored": first.interlaced_frame,
        "HDR: brightness is mapped to an ordinary screen": is_hdr(first),
    }
    found = _FirstPictures(
        size=(first.width, first.height),
        turn=read_turn(first),
        is_palette=first.format.name == "pal8",
        reorders=feed.stream.codec_context.has_b_frames,
        undecodable=undecodable,
        warnings=[fault for fault, is_there in faults.items() if is_there],
    )
    # Asked for its side data, a picture of PyAV refers to itself: nothing else would free it soon.
    del first, pictures
    gc.collect(1)
    return found


def _faults(
    info: VideoInfo,
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    *,
    scan: PacketScan,
    times: Times,
    lost: int,
    first: Iterable[str],
) -> Iterator[str]:
    """Yield all warnings about a file, the gravest first.

    Args:
        info: what is known of it, without warnings.
        lost: number of pictures at the start that can't be decoded.
        first: what is odd about the first picture.
    """
    yield from _missing(scan, lost)
    yield from _unread(container, stream, scan)
    yield from structure_faults(info.path, info.container, stream.id)
    yield from _times(info, times)
    promised = None
    if stream.duration and stream.time_base:
        promised = float(stream.duration * stream.time_base)
    elif len(container.streams) == 1 and container.duration:
        # With several streams, the container's length may be that of the sound.
        promised = container.duration / av.time_base
    if promised is not None and not times.restarts:
        end = info.duration_seconds
        # Some containers count from 0, some from the first picture, some from their own start.
        start = (container.start_time or 0) / av.time_base
        ends = (end, end - float(info.times[0]), end + start)
        nearest = min(ends, key=lambda there: abs(there - promised))
        if promised - nearest > max(_LENGTH_SLACK_SECONDS, _LENGTH_SLACK * nearest):
            yield f"the header promises {promised:.1f} s, the pictures end at {end:.1f} s"
    if scan.formats > 1:
        yield FORMAT_CHANGES
    yield from first
    if info.clock_offset_seconds > _OFFSET_SECONDS:
        start = f"{info.clock_offset_seconds:.2f} s"
        yield f"the file's clock starts at {start}: times count from there"
    if info.sample_aspect and display_shape(*info.stored_size, info.sample_aspect) == (
        info.stored_size
    ):
        yield f"a pixel aspect of {info.sample_aspect} is ignored"


def _missing(scan: PacketScan, lost: int) -> Iterator[str]:
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


def _unread(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, scan: PacketScan
) -> Iterator[str]:
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
    if scan.late_streams:
        yield "further streams begin on the way: they are not read"


def _times(info: VideoInfo, times: Times) -> Iterator[str]:
    seconds = info.times
    if times.untimed == len(seconds):
        yield "no time stamps: times follow from a nominal rate"
    elif times.untimed:
        untimed = count(times.untimed, "picture has", "pictures have")
        yield f"{untimed} no time stamp: it is estimated"
    if times.restarts:
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
