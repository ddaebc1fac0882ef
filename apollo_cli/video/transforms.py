"""Pictures to the squares that the vision encoders take, in uint8.

Source: the released preprocessing. A picture is padded to a centred square in the encoder's own
colour and then resized: bicubic as in Pillow, antialiased; or bilinear as in OpenCV, not
antialiased. The padded square is never built at full size, and the values are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

# OpenCV's bilinear weights for bytes have 11 bits.
_ONE = 1 << 11

# Rows that are padded and resized at once in the horizontal pass; more would only cost memory.
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
    # Target rows that see nothing but bars keep the colour of the bars.
    scale = side / size
    reach = 2 * max(scale, 1) + 1
    first = max(0, int((top - reach) / scale - 1))
    end = min(size, int((top + height + reach) / scale + 2))
    # Pillow keeps the edges of a box in single precision: only whole ones give exact values.
    whole = size // math.gcd(side, size)
    first = first // whole * whole
    end = min(size, -(-end // whole) * whole)
    box = (0, first * side // size, size, end * side // size)
    square = Image.new("RGB", (size, size), colour)
    square.paste(narrow.resize((size, end - first), Image.Resampling.BICUBIC, box), (0, first))
    return np.asarray(square)


def _bilinear(rgb: np.ndarray, size: int, colour: tuple[int, int, int]) -> np.ndarray:
    """OpenCV's fixed-point arithmetic on the two nearest pixels in each direction."""
    height, width = rgb.shape[:2]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    square = np.empty((size, size, 3), dtype=np.uint8)
    square[:] = colour
    low, high, near, far = _taps(side, size)
    # Target rows that see nothing but bars keep the colour of the bars.
    seen = (high >= top) & (low < top + height)
    rows = np.concatenate([low[seen], high[seen]]) - top
    taps = (low, high, near, far)
    across = _blend_columns(rgb, rows, left, side, colour=colour, taps=taps)
    upper, lower = across[: seen.sum()], across[seen.sum() :]
    if side == 2 * size:
        # OpenCV takes the plain mean of four where a side is exactly halved.
        square[seen] = (upper + lower + 2) >> 2
        return square
    # The shifts drop the same bits as OpenCV's 16-bit multiplications do.
    upper = ((upper >> 4) * near[seen, None, None]) >> 16
    lower = ((lower >> 4) * far[seen, None, None]) >> 16
    square[seen] = (upper + lower + 2) >> 2
    return square


def _blend_columns(
    rgb: np.ndarray,
    rows: np.ndarray,
    left: int,
    side: int,
    *,
    colour: tuple[int, int, int],
    taps: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> np.ndarray:
    """The given rows of the padded square, (rows, size, 3) int32, blended across."""
    height, width = rgb.shape[:2]
    low, high, near, far = taps
    size = len(low)
    columns = np.concatenate([low, high]) - left
    corners = np.empty((len(rows), 2 * size, 3), dtype=np.int32)
    corners[:] = colour
    inside_rows = np.flatnonzero((rows >= 0) & (rows < height))
    inside_columns = np.flatnonzero((columns >= 0) & (columns < width))
    picked = np.take(rgb[rows[inside_rows]], columns[inside_columns], axis=1)
    if len(inside_rows) == len(rows) and len(inside_columns) == 2 * size:
        corners = picked.astype(np.int32)
    else:
        corners[np.ix_(inside_rows, inside_columns)] = picked
    if side == 2 * size:
        return corners[:, :size] + corners[:, size:]
    edge = low == high
    near, far = np.where(edge, _ONE, near), np.where(edge, 0, far)
    return corners[:, :size] * near[:, None] + corners[:, size:] * far[:, None]


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
