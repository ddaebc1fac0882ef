"""Subtitles in a prompt: listed before the question, or interleaved with the clips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apollo_cli.config import ReadingOptions, SubtitleStyle
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.subtitles import Subtitle, find_subtitles, subtitles_between


@dataclass(frozen=True)
class Spoken:
    """What is said in a video, and how it is told.

    Attributes:
        subtitles: in order of time. style: ``listed`` or ``interleaved``.
        notes: what a user should know about where they were read, a sentence each.
    """

    subtitles: tuple[Subtitle, ...] = ()
    style: SubtitleStyle = "listed"
    notes: tuple[str, ...] = ()

    def words(self, times: np.ndarray, clip_seconds: float) -> tuple[str, ...]:
        """What is on display during each clip of times (clips, frames); empty when listed."""
        if self.style == "listed" or not self.subtitles:
            return ()
        return tuple(
            " ".join(s.text for s in subtitles_between(self.subtitles, start, start + clip_seconds))
            for start in times[:, 0].tolist()
        )

    def listed(self, window: tuple[float, float]) -> str:
        """The lines of a window, as the paper's evaluation puts them; empty when interleaved."""
        if self.style == "interleaved":
            return ""
        found = subtitles_between(self.subtitles, *window)
        if not found:
            return ""
        lines = "\n".join(subtitle.text for subtitle in found)
        return f"This video's subtitles are listed below:\n{lines}\n"


def read_spoken(info: VideoInfo, reading: ReadingOptions) -> Spoken:
    """Read the subtitles of a video, where they were asked for."""
    notes: list[str] = []
    lines = find_subtitles(info, reading.subtitles, notes=notes)
    return Spoken(lines, reading.subtitle_style, tuple(notes))


def preamble(spoken: Sequence[tuple[Spoken, tuple[float, float]]]) -> str:
    """The listed subtitles of all videos of a question, each with its window."""
    return "".join(told.listed(window) for told, window in spoken)
