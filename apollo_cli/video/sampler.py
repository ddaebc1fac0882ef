"""Which moments of a video are looked at, and how many fit: pure arithmetic before any decoding.

Source: the paper, section 3, and the released code's sampler. Frames are chosen by time. Where
the distance between samples is a whole number of the file's frames, the indices equal those of
the original; elsewhere the original rounds the distance down and drifts, and ours follows time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from apollo_cli.config import SamplingOptions
from apollo_cli.errors import FitError, MediaError, UsageError
from apollo_cli.text import apart, count, percent

_EPSILON = 1e-6
# Containers round their times to as much as a millisecond.
_INSIDE_SECONDS = 2e-3


@dataclass(frozen=True)
class ClipPlan:
    """Clips of wanted times.

    Attributes:
        times: (clips, frames a clip), seconds, on the clock of the file.
        clip_seconds: length of one clip.
        start_seconds, end_seconds: the window that the clips are spread over.
        wanted_clips: clips that would show every moment.
        is_uniform: frames are spread evenly, so clips are no stretches of real time.
    """

    times: np.ndarray
    clip_seconds: float
    start_seconds: float
    end_seconds: float
    wanted_clips: int
    is_uniform: bool = False

    def __len__(self) -> int:
        return len(self.times)

    @property
    def seen_seconds(self) -> float:
        """Seconds of the window that lie inside a clip."""
        window = self.end_seconds - self.start_seconds
        return min(window, len(self) * min(self.clip_seconds, window))

    @property
    def coverage(self) -> float:
        """Share of the window that lies inside a clip."""
        window = self.end_seconds - self.start_seconds
        return self.seen_seconds / window if window > 0 else 1.0

    def describe(self) -> str:
        """Say in words what is looked at and what is not."""
        if self.is_uniform:
            step = (self.end_seconds - self.start_seconds) / self.times.size
            return f"{count(self.times.size, 'frame')}, one every {apart(step, 0.0)[0]} s"
        clips = count(len(self), "clip")
        if len(self) >= self.wanted_clips:
            return f"{clips}, every moment seen"
        # Of the window, not from clip to clip: what lies behind the last clip counts too.
        window = self.end_seconds - self.start_seconds
        seen, every = apart(self.seen_seconds / len(self), window / len(self))
        return f"{clips}, {seen} s seen of every {every} s ({percent(self.coverage)})"


@dataclass(frozen=True)
class FrameGrid:
    """The frames of a file, as far as a sampler may follow them.

    Attributes:
        times: (frames,) seconds, ascending. fps: frames a second, None where the rate varies.
        keys: indices of the frames that decode without any other, ascending.
    """

    times: np.ndarray
    fps: float | None
    keys: np.ndarray


def resolve_window(duration_seconds: float, options: SamplingOptions) -> tuple[float, float]:
    """The window to look at, inside the video.

    Raises:
        UsageError: the window starts behind the end of the video.
    """
    start = options.start_seconds
    end = duration_seconds if options.end_seconds is None else options.end_seconds
    if start >= duration_seconds and start > 0:
        given, last = apart(start, duration_seconds)
        raise UsageError(f"--from {given} s", f"the video ends at {last} s")
    return start, min(end, duration_seconds)


def count_wanted_clips(
    window: tuple[float, float],
    *,
    clip_seconds: float,
    frames_per_clip: int,
    options: SamplingOptions,
    grid: FrameGrid | None = None,
) -> int:
    """Clips that would show every moment of a window, or as many frames as were asked for.

    Args:
        grid: the frames, for modes that count them; other arguments as in ``plan_clips``.
    """
    if options.mode == "uniform" and options.frames is not None:
        return math.ceil(options.frames / frames_per_clip)
    length = frames_per_clip / options.fps if options.fps else clip_seconds
    return max(1, math.ceil((window[1] - window[0]) / length - _EPSILON))


def plan_clips(
    duration_seconds: float,
    *,
    clip_seconds: float,
    frames_per_clip: int,
    limit: int,
    options: SamplingOptions,
    grid: FrameGrid | None = None,
) -> ClipPlan:
    """Spread at most ``limit`` clips over a video.

    Clips lie side by side while they all fit; past the limit they are spaced out evenly, each in
    the middle of its share. The frames inside a clip keep their rate.

    Args:
        duration_seconds: length of the video.
        clip_seconds: length of a clip at the rate the checkpoint was trained with.
        frames_per_clip: frames in a clip.
        limit: most clips that the token budget holds.
        options: rate, window, uniform sampling, and what short videos do.
        grid: the frames, where they are known.

    Raises:
        UsageError: the window lies outside the video.
        MediaError: the video is shorter than a clip and ``options.short`` is ``error``.
    """
    start, end = resolve_window(duration_seconds, options)
    window = end - start
    wanted = count_wanted_clips(
        (start, end),
        clip_seconds=clip_seconds,
        frames_per_clip=frames_per_clip,
        options=options,
        grid=grid,
    )
    count = max(1, min(wanted, limit, options.max_clips or wanted))
    if options.mode == "uniform":
        frames = count * frames_per_clip
        times = start + (np.arange(frames) + 0.5) * window / frames
        span = window * frames_per_clip / frames
        shape = (count, frames_per_clip)
        return ClipPlan(times.reshape(shape), span, start, end, wanted, is_uniform=True)
    length = frames_per_clip / options.fps if options.fps else float(clip_seconds)
    if window < length - _EPSILON and options.short != "repeat":
        if options.short == "error":
            lasts, needed = apart(window, length)
            raise MediaError(
                f"the video (or window) lasts {lasts} s",
                f"one clip is {needed} s",
                "use --short repeat or --short stretch",
            )
        times = start + np.arange(frames_per_clip) * window / frames_per_clip
        return ClipPlan(times[None], length, start, end, wanted)
    times = _on_grid(
        grid, (start, end), step=length / frames_per_clip, per_clip=frames_per_clip, count=count
    )
    if times is None:
        starts = _spread(window, length, count, whole=False)
        inside = np.arange(frames_per_clip) * (length / frames_per_clip)
        # A window never shows what lies behind its end; the last moment inside stands in.
        last = max(start, end - _INSIDE_SECONDS)
        times = np.minimum(start + starts[:, None] + inside, last)
    return ClipPlan(times, length, start, end, wanted)


def _on_grid(
    grid: FrameGrid | None, window: tuple[float, float], *, step: float, per_clip: int, count: int
) -> np.ndarray | None:
    """Times of whole frames, where the distance between samples is a whole number of them."""
    if grid is None or grid.fps is None:
        return None
    frames = grid.fps * step
    if frames < 1 - _EPSILON or abs(frames - round(frames)) > _EPSILON * frames:
        return None
    first, stop = np.searchsorted(grid.times, np.asarray(window) - _EPSILON)
    available = int(max(1, stop - first))
    starts = _spread(available, round(frames) * per_clip, count, whole=True)
    indices = starts[:, None] + np.arange(per_clip) * round(frames)
    indices = np.minimum(indices, available - 1) + min(int(first), len(grid.times) - 1)
    return grid.times[indices]


def _spread(length: float, clip: float, count: int, *, whole: bool) -> np.ndarray:
    """Starts of ``count`` clips in ``length``, in whole steps or not."""
    share = length // count if whole else length / count
    number = np.arange(count)
    if share > clip:
        margin = (share - clip) // 2 if whole else (share - clip) / 2
        return number * share + margin
    gaps = max(1, count - 1)
    room = max(0, length - clip)
    return number * (room // gaps if whole else room / gaps)


def share_clips(wanted: Sequence[int], total: int) -> list[int]:
    """Give each video its share of ``total`` clips: in proportion, at least one each."""
    if sum(wanted) <= total:
        return list(wanted)
    scale = total / sum(wanted)
    shares = [max(1, int(clips * scale)) for clips in wanted]
    for index in sorted(range(len(wanted)), key=lambda i: shares[i] - wanted[i] * scale):
        if sum(shares) < total:
            shares[index] += 1
    return shares


def largest_fitting(
    wanted: int, tokens_of: Callable[[int], int], available: int, fewest: int = 1, spare: int = 0
) -> int:
    """The largest number of clips, up to ``wanted``, whose prompt fits.

    Args:
        wanted: clips that would show everything.
        tokens_of: tokens of the whole prompt for a number of clips, answer included.
        available: tokens that the context holds.
        fewest: clips that are needed at least, one for each video.
        spare: tokens left free as well, where ``fewest`` clips fit beside them.

    Raises:
        FitError: not even ``fewest`` clips fit.
    """
    if spare:
        available = max(available - spare, min(available, tokens_of(fewest)))
    if tokens_of(wanted) <= available:
        return wanted
    fits, too_many = fewest - 1, wanted
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if tokens_of(middle) <= available:
            fits = middle
        else:
            too_many = middle
    if fits < fewest:
        clips = "one clip" if fewest == 1 else f"{fewest} clips"
        raise FitError(
            f"{clips}, the question and the answer need {tokens_of(fewest)} tokens",
            f"the context of the model holds {available}",
            "shorten the question or lower --max-new-tokens",
        )
    return fits
