"""What is odd about a video file, in one short sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import av
import av.container
import av.video.stream
import numpy as np

from apollo_cli.video.boxes import structure_faults
from apollo_cli.video.feed import picture_streams
from apollo_cli.video.info import FORMAT_CHANGES, VideoInfo
from apollo_cli.video.packets import NO_TIME, PacketScan
from apollo_cli.video.picture import display_shape
from apollo_cli.video.timeline import Times, damaged_spans, typical_step
from apollo_cli.words import count

# A header may round; it may not promise more than this share beyond what is there.
_LENGTH_SLACK = 0.05
_LENGTH_SLACK_SECONDS = 0.5
_LONG_GAP_SECONDS = 60.0
_SPLICED_GAP_SECONDS = 5.0
_HANDOVER_SECONDS = 0.2
_OFFSET_SECONDS = 0.9
_SPLICED_CONTAINERS = ("mpegts", "mpeg", "flv", "asf")


def describe_faults(
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
    promised = _promised_seconds(container, stream)
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


def _promised_seconds(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream
) -> float | None:
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    # Without a length of the stream's own, the container's may be that of the sound.
    alone = len(container.streams) == 1
    return container.duration / av.time_base if alone and container.duration else None
