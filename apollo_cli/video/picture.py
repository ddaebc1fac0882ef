"""From a decoded picture to upright RGB in display proportions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np

from apollo_cli.video.tonemap import is_hdr, tone_map

# Beyond this a pixel shape is taken for a fault of the file.
_MAX_PIXEL_ASPECT = 8

_ALPHA_FORMATS = ("yuva", "rgba", "bgra", "argb", "abgr", "gbrap", "ya8", "ya16", "pal8")


@dataclass(frozen=True)
class Turn:
    """How a stored picture is made upright: mirrored left to right, then turned clockwise."""

    rotation: int = 0
    mirrored: bool = False

    def apply(self, rgb: np.ndarray) -> np.ndarray:
        """Turn an (H, W, 3) picture; the result is contiguous."""
        if self.mirrored:
            rgb = rgb[:, ::-1]
        return np.ascontiguousarray(np.rot90(rgb, -self.rotation // 90))

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after turning."""
        return (height, width) if self.rotation in (90, 270) else (width, height)


def read_turn(frame: av.VideoFrame) -> Turn:
    """The turn that a display matrix asks for, to the nearest right angle."""
    angle, mirrored = turn_angle(frame)
    return Turn(round(angle / 90) * 90 % 360, mirrored)


def turn_angle(frame: av.VideoFrame) -> tuple[float, bool]:
    """Degrees clockwise that a display matrix asks for, and whether it mirrors before that."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0.0, False
    a, b, _, c, d, *_ = np.frombuffer(matrix, dtype=np.int32, count=9).tolist()
    mirrored = a * d - b * c < 0
    if mirrored:
        a, b = -a, -b
    return math.degrees(math.atan2(b, a)) % 360, mirrored


def display_shape(width: int, height: int, aspect: Fraction | None) -> tuple[int, int]:
    """Width and height in square pixels, before turning; the height is kept."""
    if aspect is None or not 1 / _MAX_PIXEL_ASPECT <= aspect <= _MAX_PIXEL_ASPECT:
        return width, height
    return max(1, round(width * aspect)), height


def to_rgb(frame: av.VideoFrame, aspect: Fraction | None, turn: Turn) -> np.ndarray:
    """Convert a decoded picture to upright (H, W, 3) uint8 RGB.

    The colour matrix is the one that the file names; where it names none, FFmpeg's default
    (BT.601), which is what the original's reader does. Alpha is laid over black, HDR is
    tone-mapped.
    """
    width, height = display_shape(frame.width, frame.height, aspect)
    if is_hdr(frame):
        rgb = tone_map(frame, width, height)
    elif frame.format.name.startswith(_ALPHA_FORMATS):
        rgba = frame.reformat(width, height, "rgba").to_ndarray()
        rgb = over_black(rgba)
    else:
        rgb = frame.reformat(width, height, "rgb24").to_ndarray()
    return turn.apply(rgb) if turn != Turn() else rgb


def over_black(rgba: np.ndarray) -> np.ndarray:
    """Lay (H, W, 4) uint8 over black."""
    alpha = rgba[..., 3]
    if alpha.min() == 255:
        return np.ascontiguousarray(rgba[..., :3])
    scaled = rgba[..., :3].astype(np.uint16) * alpha[..., None]
    return ((scaled + 127) // 255).astype(np.uint8)
