"""The strip under the player: which moments the model saw, which it did not, and the cited ones."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np

from apollo_cli.answer import clock
from apollo_cli.video.sampler import ClipPlan

# The picture is drawn this many units wide, and stretched to the width of the page.
_WIDTH, _HEIGHT = 1000.0, 24.0
# A lone clip of a long video stays visible; many clips keep their true width.
_THINNEST, _FEW = 1.5, 300
# Up to this many, the borders between clips that touch are drawn.
_FEW_TICKS = 150


@dataclass(frozen=True)
class Mark:
    """A moment that an answer names; ``seen`` is None where that is not known."""

    seconds: float
    text: str
    seen: bool | None = None

    @property
    def label(self) -> str:
        """What the moment is, in words."""
        known = {True: ", inside a clip that was seen", False: ", not seen by the model", None: ""}
        return f"{clock(self.seconds)}{known[self.seen]}"


@dataclass(frozen=True, eq=False)
class Strip:
    """What is drawn for one video.

    Attributes:
        name: of the file. duration_seconds: of the whole video.
        window: start and end of the part that is looked at, in seconds.
        clips: (clips, 2), start and end of each, in seconds.
        words: the coverage, as the plan tells it.
        is_seen: whether the clips were looked at, or are planned.
        marks: moments that answers name.
    """

    name: str
    duration_seconds: float
    window: tuple[float, float]
    clips: np.ndarray
    words: str
    is_seen: bool
    marks: tuple[Mark, ...] = ()


def clip_edges(times: np.ndarray, plan: ClipPlan, duration_seconds: float) -> np.ndarray:
    """Start and end of each clip that shows times (clips, frames); of each frame when uniform."""
    if plan.is_uniform:
        moments = times.reshape(-1)
        return np.stack([moments, moments], axis=1)
    starts = times[:, 0]
    ends = times[:, -1] + plan.clip_seconds / times.shape[1]
    return np.stack([starts, np.minimum(ends, duration_seconds)], axis=1)


def draw(strip: Strip) -> str:
    """The strip as HTML: a slider that keyboard and mouse move, and a button for each mark.

    The script of the page gives it its behaviour; without, it is still a picture with words.
    """
    end = max(strip.duration_seconds, 1e-3)
    name = escape(strip.name, quote=True)
    seen = "seen by the model" if strip.is_seen else "planned"
    edges = ";".join(f"{start:g},{stop:g}" for start, stop in strip.clips.round(2).tolist())
    return (
        f'<figure class="strip" data-seen="{str(strip.is_seen).lower()}">'
        f'<div class="strip-bar" role="slider" tabindex="0" aria-label="Position in {name}" '
        f'aria-valuemin="0" aria-valuemax="{end:.3f}" aria-valuenow="0" aria-valuetext="0:00" '
        f'data-clips="{edges}" title="Click or use the arrow keys to move the player">'
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{len(strip.clips)} moments {seen}">'
        f"<title>{escape(strip.words)}</title>{_picture(strip, end)}</svg>"
        f'<span class="strip-head" aria-hidden="true"></span></div>'
        f"{_buttons(strip.marks, end)}"
        f'<figcaption><span>0:00</span><span class="strip-words">{escape(strip.words)}</span>'
        f'<span class="moment"></span><span>{clock(strip.duration_seconds)}</span></figcaption>'
        "</figure>"
    )


def _picture(strip: Strip, end: float) -> str:
    start, stop = (edge / end * _WIDTH for edge in strip.window)
    window = (
        f'<rect class="strip-window" x="{start:.2f}" y="0" width="{max(0.0, stop - start):.2f}" '
        f'height="{_HEIGHT:g}"/>'
    )
    ticks = ""
    if len(strip.clips) <= _FEW_TICKS:
        borders = (strip.clips[1:, 0] / end * _WIDTH).tolist()
        lines = "".join(f"M{x:.2f} 3v{_HEIGHT - 6:g}" for x in borders)
        ticks = f'<path class="strip-ticks" d="{lines}"/>'
    return f'{window}<path class="strip-clips" d="{clips_path(strip.clips, end)}"/>{ticks}'


def clips_path(clips: np.ndarray, end: float) -> str:
    """All clips as one path, so that thousands of them cost one element."""
    left = clips[:, 0] / end * _WIDTH
    width = (clips[:, 1] - clips[:, 0]) / end * _WIDTH
    if len(clips) <= _FEW:
        width = np.maximum(width, _THINNEST)
    left = np.minimum(left, _WIDTH - width)
    top, tall = 3.0, _HEIGHT - 6.0
    rows = zip(left.tolist(), width.tolist(), strict=True)
    return "".join(f"M{x:.2f} {top:g}h{w:.2f}v{tall:g}h-{w:.2f}z" for x, w in rows)


def _buttons(marks: tuple[Mark, ...], end: float) -> str:
    inside = sorted((m for m in marks if m.seconds <= end), key=lambda mark: mark.seconds)
    if not inside:
        return ""
    buttons = "".join(
        f'<button type="button" class="strip-mark" data-seek="{mark.seconds:g}" '
        f'style="--place:{mark.seconds / end:.3%}" title="{escape(mark.label, quote=True)}" '
        f'aria-label="Go to {escape(mark.label, quote=True)}"></button>'
        for mark in inside
    )
    return f'<div class="strip-marks" role="group" aria-label="Times in answers">{buttons}</div>'
