"""From ticks of a container to seconds on the player's clock."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import av
import av.container
import av.video.stream
import numpy as np

from apollo_cli.video.packets import PacketScan
from apollo_cli.video.timeline import Times, typical_step

_GUESSED_RATE = Fraction(25)


@dataclass(frozen=True)
class Clock:
    """When pictures are shown.

    Attributes:
        seconds: (pictures,) float64, ascending.
        duration_seconds: end of the last picture's display.
        offset_seconds: what was taken off the container's time stamps.
        source_fps: average rate, None when unknown.
        constant_rate: all pictures are equally far apart, up to the rounding to ticks.
        tick_seconds: how finely the container stores times.
    """

    seconds: np.ndarray
    duration_seconds: float
    offset_seconds: float
    source_fps: float | None
    constant_rate: bool
    tick_seconds: float


def read_clock(
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    scan: PacketScan,
    times: Times,
) -> Clock:
    """Turn ticks into seconds.

    mp4 and mov keep their edited time line, since players show it so; in other containers a
    player's clock starts at the container's first time stamp, be it of sound or of pictures.
    """
    base = stream.time_base
    assert base is not None
    context = stream.codec_context
    rate = context.framerate or stream.average_rate or stream.guessed_rate or _GUESSED_RATE
    nominal_step = float(1 / rate / base)
    ticks = times.ticks
    if times.untimed == len(ticks):
        ticks = ticks * nominal_step
    last = float(scan.durations[times.order[-1]])
    step = typical_step(ticks) or last or nominal_step
    last = last if 0 < last < 100 * step else step
    offset = _offset(container, float(ticks[0] * base))
    # Dividing last gives the nearest float to each true time.
    seconds = ticks * base.numerator / base.denominator - offset
    return Clock(
        seconds=seconds,
        duration_seconds=float(seconds[-1] + last * base),
        offset_seconds=offset,
        source_fps=_average_rate(seconds, stream.average_rate),
        constant_rate=bool((np.abs(np.diff(ticks) - step) <= max(1.01, 0.02 * step)).all()),
        tick_seconds=float(base),
    )


def _offset(container: av.container.InputContainer, first_seconds: float) -> float:
    if container.format.name.startswith("mov"):
        return min(0.0, first_seconds)
    start = container.start_time
    return first_seconds if start is None else min(first_seconds, start / av.time_base)


def _average_rate(seconds: np.ndarray, nominal: Fraction | None) -> float | None:
    if len(seconds) < 2 or seconds[-1] <= seconds[0]:
        return float(nominal) if nominal else None
    measured = (len(seconds) - 1) / float(seconds[-1] - seconds[0])
    # Coarse ticks blur the measured rate; the nominal one is exact where the two agree.
    return float(nominal) if nominal and abs(nominal / measured - 1) < 2e-3 else measured
