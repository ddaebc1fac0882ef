"""Pictures to the squares that the vision encoders take, in uint8.

Source: the released preprocessing. A picture is padded to a centred square in the encoder's own
colour and then resized: bicubic as in Pillow, antialiased; or bilinear as in OpenCV, not
antialiased. The padded square is never built at full size, and the values are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

# OpenCV's bilinear weights for bytes have 11 bits.
_ONE = 1 << 11

# Rows that are padded at once for the horizontal pass; more would only cost memory.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class PixelSpec:
    """What one vision encoder takes.

    Attributes:
        name: of the encoder.
        size: side of the square, in pixels.
        resample: ``bicubic`` with antialiasing or ``bilinear`` without.
        pad_colour: RGB of the bars that make a picture square.
        mean, std: for normalisation, on a scale where white is 1; used by the network.
    """

    name: str
    size: int
    resample: Literal["bilinear", "bicubic"]
    pad_colour: tuple[int, int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def resize_square(rgb: np.ndarray, spec: PixelSpec) -> np.ndarray:
    """Pad an (H, W, 3) uint8 picture to a square and resize it to (3, size, size) uint8."""
    if spec.resample == "bicubic":
        square = _bicubic(rgb, spec.size, spec.pad_colour)
    else:
        square = _bilinear(rgb, spec.size, spec.pad_colour)
    return np.ascontiguousarray(square.transpose(2, 0, 1))


def _bicubic(rgb: np.ndarray, size: int, colour: tuple[int, int, int]) -> np.ndarray:
    """Pillow's two passes, across and then down; each row is padded only while it is resized."""
    height, width = rgb.shape[:2]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    narrow = Image.new("RGB", (size, side), colour)
    for start in range(0, height, _ROWS_AT_ONCE):
        rows = rgb[start : start + _ROWS_AT_ONCE]
        if width < side:
            padded = np.empty((len(rows), side, 3), dtype=np.uint8)
            padded[:] = colour
            padded[:, left : left + width] = rows
            rows = padded
        strip = Image.fromarray(np.ascontiguousarray(rows))
        narrow.paste(strip.resize((size, len(rows)), Image.Resampling.BICUBIC), (0, top + start))
    return np.asarray(narrow.resize((size, size), Image.Resampling.BICUBIC))


def _bilinear(rgb: np.ndarray, size: int, colour: tuple[int, int, int]) -> np.ndarray:
    """OpenCV's fixed-point arithmetic on the two nearest pixels in each direction."""
    height, width = rgb.shape[:2]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    if side == 2 * size:
        return _halve(_gather(rgb, np.arange(side) - top, np.arange(side) - left, colour))
    low, high, near, far = _taps(side, size)
    taps = np.concatenate([low, high])
    corners = _gather(rgb, taps - top, taps - left, colour).astype(np.int32)
    edge = low == high
    near_across, far_across = np.where(edge, _ONE, near), np.where(edge, 0, far)
    across = corners[:, :size] * near_across[:, None] + corners[:, size:] * far_across[:, None]
    # The shifts drop the same bits as OpenCV's 16-bit multiplications do.
    across >>= 4
    upper = (across[:size] * near[:, None, None]) >> 16
    lower = (across[size:] * far[:, None, None]) >> 16
    return ((upper + lower + 2) >> 2).astype(np.uint8)


def _taps(side: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The two source pixels of each target pixel, and their weights."""
    # OpenCV computes the place in double precision and keeps it in single.
    place = ((np.arange(size) + 0.5) * (side / size) - 0.5).astype(np.float32)
    low = np.floor(place)
    fraction = place - low
    near = np.rint((np.float32(1) - fraction) * np.float32(_ONE)).astype(np.int32)
    far = np.rint(fraction * np.float32(_ONE)).astype(np.int32)
    low = low.astype(np.int64)
    return np.clip(low, 0, side - 1), np.clip(low + 1, 0, side - 1), near, far


def _halve(square: np.ndarray) -> np.ndarray:
    """OpenCV takes the plain mean of four where a side is exactly halved."""
    wide = square.astype(np.uint16)
    total = wide[::2, ::2] + wide[1::2, ::2] + wide[::2, 1::2] + wide[1::2, 1::2]
    return ((total + 2) >> 2).astype(np.uint8)


def _gather(
    rgb: np.ndarray, rows: np.ndarray, columns: np.ndarray, colour: tuple[int, int, int]
) -> np.ndarray:
    """Pick rows and columns of a picture; those outside of it have the pad colour."""
    height, width = rgb.shape[:2]
    inside_rows = np.flatnonzero((rows >= 0) & (rows < height))
    inside_columns = np.flatnonzero((columns >= 0) & (columns < width))
    out = np.empty((len(rows), len(columns), 3), dtype=np.uint8)
    out[:] = colour
    picked = rgb[rows[inside_rows][:, None], columns[inside_columns][None, :]]
    out[np.ix_(inside_rows, inside_columns)] = picked
    return out
