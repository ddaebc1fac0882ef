"""From a decoded picture to upright RGB in display proportions, for an ordinary screen."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import av
import numpy as np

# Beyond this a pixel shape is taken for a fault of the file.
_MAX_PIXEL_ASPECT = 8

_ALPHA_FORMATS = ("yuva", "rgba", "bgra", "argb", "abgr", "gbrap", "ya8", "ya16", "pal8")

# Codes of FFmpeg for the brightness curves of HDR and for its primaries.
_PQ, _HLG = 16, 18
_BT2020 = 9

# Brightness of diffuse white in HDR programmes (ITU-R BT.2408), and the peak that is kept.
_WHITE_NITS = 203.0
_PEAK_NITS = 1000.0

_BT2020_TO_BT709 = np.array(
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]],
    dtype=np.float32,
)
_ROWS_AT_ONCE = 128


def read_turn(frame: av.VideoFrame) -> tuple[int, bool, float]:
    """The turn that a display matrix asks for.

    Returns:
        Degrees clockwise to the nearest right angle; whether it is mirrored before that; degrees
        that the matrix asks for.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0, False, 0.0
    a, b, _, c, d, *_ = np.frombuffer(matrix, dtype=np.int32, count=9).tolist()
    mirrored = a * d - b * c < 0
    angle = math.degrees(math.atan2(-b, -a) if mirrored else math.atan2(b, a)) % 360
    return round(angle / 90) * 90 % 360, mirrored, angle


def display_size(
    width: int, height: int, aspect: Fraction | None, rotation: int = 0
) -> tuple[int, int]:
    """Width and height in square pixels, after turning; the stored height is kept."""
    if aspect is not None and 1 / _MAX_PIXEL_ASPECT <= aspect <= _MAX_PIXEL_ASPECT:
        width = max(1, round(width * aspect))
    return (height, width) if rotation in (90, 270) else (width, height)


def to_rgb(
    frame: av.VideoFrame, aspect: Fraction | None, rotation: int, mirrored: bool
) -> np.ndarray:
    """Convert a decoded picture to upright (H, W, 3) uint8 RGB.

    The colour matrix is the one that the file names; where it names none, FFmpeg's default
    (BT.601), which is what the original's reader does. Alpha is laid over black, HDR is
    tone-mapped.
    """
    width, height = display_size(frame.width, frame.height, aspect)
    if is_hdr(frame):
        rgb = _tone_map(frame, width, height)
    elif frame.format.name.startswith(_ALPHA_FORMATS):
        rgb = over_black(frame.reformat(width, height, "rgba").to_ndarray())
    else:
        rgb = frame.reformat(width, height, "rgb24").to_ndarray()
    rgb = rgb[:, ::-1] if mirrored else rgb
    return np.ascontiguousarray(np.rot90(rgb, -rotation // 90))


def over_black(rgba: np.ndarray) -> np.ndarray:
    """Lay (H, W, 4) uint8 over black."""
    alpha = rgba[..., 3]
    if alpha.min() == 255:
        return np.ascontiguousarray(rgba[..., :3])
    scaled = rgba[..., :3].astype(np.uint16) * alpha[..., None]
    return ((scaled + 127) // 255).astype(np.uint8)


def is_hdr(frame: av.VideoFrame) -> bool:
    """Whether the picture carries PQ or HLG brightness."""
    return int(frame.color_trc) in (_PQ, _HLG)


def _tone_map(frame: av.VideoFrame, width: int, height: int) -> np.ndarray:
    """Convert an HDR picture to (height, width, 3) uint8, a few rows at a time."""
    deep = np.asarray(frame.reformat(width, height, "rgb48le").to_ndarray(), dtype=np.uint16)
    light, encode = _brightness_tables(int(frame.color_trc))
    is_wide = int(frame.color_primaries) == _BT2020
    peak = _PEAK_NITS / _WHITE_NITS
    out = np.empty((height, width, 3), dtype=np.uint8)
    for top in range(0, height, _ROWS_AT_ONCE):
        linear = light[deep[top : top + _ROWS_AT_ONCE]]
        if is_wide:
            linear = linear @ _BT2020_TO_BT709.T
        # One factor for all three colours keeps the hue: the extended Reinhard curve maps diffuse
        # white from 1 and the peak to 1.
        brightest = np.maximum(linear.max(axis=2, keepdims=True), 1e-6)
        linear *= (1 + brightest / peak**2) / (1 + brightest)
        index = np.clip(linear * 4095 + 0.5, 0, 4095).astype(np.int16)
        out[top : top + _ROWS_AT_ONCE] = encode[index]
    return out


@cache
def _brightness_tables(transfer: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables from 16-bit codes to linear light, and from 4096 steps of that to sRGB codes.

    Light is 1 at diffuse white (ITU-R BT.2100).
    """
    code = np.arange(65536, dtype=np.float64) / 65535
    if transfer == _PQ:
        root = code ** (1 / 78.84375)
        top = np.maximum(root - 0.8359375, 0)
        nits = 10000 * (top / (18.8515625 - 18.6875 * root)) ** (1 / 0.1593017578125)
    else:
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        scene = np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12)
        nits = _PEAK_NITS * scene**1.2
    light = np.arange(4096) / 4095
    srgb = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    linear = (np.minimum(nits, _PEAK_NITS) / _WHITE_NITS).astype(np.float32)
    return linear, np.round(srgb * 255).astype(np.uint8)
