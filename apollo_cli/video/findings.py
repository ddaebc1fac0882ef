"""What is odd about a file, in one short sentence each."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import av.container
import av.video.stream
import numpy as np

from apollo_cli.video.boxes import structure_faults
from apollo_cli.video.clock import Clock
from apollo_cli.video.feed import picture_streams
from apollo_cli.video.packets import NO_TIME, PacketScan
from apollo_cli.video.picture import display_shape
from apollo_cli.video.timeline import Times, damaged_spans, typical_step
from apollo_cli.video.trial import FirstPictures
from apollo_cli.words import count

FORMAT_CHANGES = "the picture's size or format changes on the way"

# A header may round; it may not promise more than this share beyond what is there.
_LENGTH_SLACK = 0.05
_LENGTH_SLACK_SECONDS = 0.5
_LONG_GAP_SECONDS = 60.0
_SPLICED_GAP_SECONDS = 5.0
_HANDOVER_SECONDS = 0.2
_OFFSET_SECONDS = 0.9
_SPLICED_CONTAINERS = ("mpegts", "mpeg", "flv", "asf")


def describe_faults(
    path: Path,
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    *,
    scan: PacketScan,
    first: FirstPictures,
    times: Times,
    clock: Clock,
    aspect: Fraction | None,
) -> tuple[str, ...]:
    """All warnings about a file, the gravest first."""
    faults = [
        *_missing(scan, first),
        *_unread(container, stream, scan),
        *structure_faults(path, container.format.name, stream.id),
        *_times(container, times, clock.seconds),
        *_promises(container, stream, times, clock),
    ]
    if scan.formats > 1:
        faults.append(FORMAT_CHANGES)
    if first.odd_angle:
        faults.append(
            f"the picture is turned by {first.odd_angle:.0f} degrees: it is shown upright to the "
            "nearest right angle"
        )
    if first.interlaced:
        faults.append("interlaced: pictures are taken as they are stored")
    if first.hdr:
        faults.append("HDR: brightness is mapped to an ordinary screen")
    if clock.offset_seconds > _OFFSET_SECONDS:
        start = f"{clock.offset_seconds:.2f} s"
        faults.append(f"the file's clock starts at {start}: times count from there")
    width, height = first.size
    if aspect and display_shape(width, height, aspect) == (width, height):
        faults.append(f"a pixel aspect of {aspect} is ignored")
    return tuple(faults)


def _unread(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, scan: PacketScan
) -> list[str]:
    faults = []
    others = [other for other in picture_streams(container) if other.index != stream.index]
    if others:
        names = ", ".join(str(other.index) for other in others)
        faults.append(
            f"only picture stream {stream.index} is read, not {names}: choose with --stream"
        )
    known = scan.pts[scan.pts != NO_TIME] * float(stream.time_base or 1)
    for index, (begins, ends) in scan.elsewhere.items():
        # Pictures that go on in another stream, not the same time seen by another camera.
        is_later = bool(len(known)) and begins > known.max() - _HANDOVER_SECONDS
        is_earlier = bool(len(known)) and ends < known.min() + _HANDOVER_SECONDS
        if is_later or is_earlier:
            faults.append(f"stream {index} holds the pictures from {begins:.1f} s to {ends:.1f} s")
    if scan.late_streams:
        faults.append("further streams begin on the way: they are not read")
    return faults


def _missing(scan: PacketScan, first: FirstPictures) -> list[str]:
    faults = []
    if scan.cut_short:
        faults.append("the file ends early: the last picture is incomplete")
    if scan.blank:
        missing = count(scan.blank, "picture is missing", "pictures are missing")
        faults.append(f"{missing}: the file has holes of zeros")
    holes = damaged_spans(scan)
    if holes:
        touched = sum(int(scan.is_shown[first:end].sum()) for first, end in holes)
        damaged = count(touched, "picture is damaged", "pictures are damaged")
        faults.append(f"data is lost in {count(len(holes), 'place')}: about {damaged}")
    lost = int((scan.is_shown & first.undecodable).sum())
    if lost:
        first_ones = "first picture" if lost == 1 else f"first {lost} pictures"
        faults.append(f"the {first_ones} can't be decoded: the file starts in a group")
    return faults


def _times(container: av.container.InputContainer, times: Times, seconds: np.ndarray) -> list[str]:
    faults = []
    total = len(seconds)
    if times.untimed == total:
        faults.append("no time stamps: times follow from a nominal rate")
    elif times.untimed:
        untimed = count(times.untimed, "picture has", "pictures have")
        faults.append(f"{untimed} no time stamp: it is estimated")
    if times.restarts:
        faults.append("the time line starts again on the way: the parts are put end to end")
    spliced = container.format.name in _SPLICED_CONTAINERS
    gaps = np.diff(seconds)
    long = _SPLICED_GAP_SECONDS if spliced else _LONG_GAP_SECONDS
    long = max(long, 10 * typical_step(seconds))
    if (gaps > long).any():
        where = int(np.argmax(gaps))
        faults.append(
            f"no picture between {seconds[where]:.1f} s and {seconds[where + 1]:.1f} s: "
            "the time line jumps"
        )
    repeats = int((gaps <= 0).sum())
    if repeats:
        shared = count(repeats, "picture shares its time", "pictures share their time")
        faults.append(f"{shared} with another one")
    return faults


def _promises(
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    times: Times,
    clock: Clock,
) -> list[str]:
    if times.restarts:
        return []
    end = clock.duration_seconds
    span = end - float(clock.seconds[0])
    promised = _promised_seconds(container, stream)
    if promised is None:
        return []
    # Some containers count from 0, some from the first picture, some from their own start.
    start = (container.start_time or 0) / av.time_base
    nearest = min((end, span, end + start), key=lambda there: abs(there - promised))
    if promised - nearest > max(_LENGTH_SLACK_SECONDS, _LENGTH_SLACK * nearest):
        return [f"the header promises {promised:.1f} s, the pictures end at {end:.1f} s"]
    return []


def _promised_seconds(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream
) -> float | None:
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    # Without a length of the stream's own, the container's may be that of the sound.
    alone = len(container.streams) == 1
    return container.duration / av.time_base if alone and container.duration else None
