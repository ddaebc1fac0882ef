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
    resize = _bicubic if spec.resample == "bicubic" else _bilinear
    return np.ascontiguousarray(resize(rgb, spec.size, spec.pad_colour).transpose(2, 0, 1))


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
    square = np.empty((size, size, 3), dtype=np.uint8)
    square[:] = colour
    # The two source pixels of each target pixel, and their weights. OpenCV computes the place in
    # double precision and keeps it in single.
    place = ((np.arange(size) + 0.5) * (side / size) - 0.5).astype(np.float32)
    low = np.floor(place)
    near = np.rint((np.float32(1) - (place - low)) * np.float32(_ONE)).astype(np.int32)
    far = np.rint((place - low) * np.float32(_ONE)).astype(np.int32)
    low, high = (np.clip(low.astype(np.int64) + step, 0, side - 1) for step in (0, 1))
    # Target rows that see nothing but bars keep the colour of the bars.
    seen = (high >= top) & (low < top + height)
    rows, columns = (
        np.concatenate([low[seen], high[seen]]) - top,
        np.concatenate([low, high]) - left,
    )
    corners = np.take(rgb[rows.clip(0, height - 1)], columns.clip(0, width - 1), axis=1)
    corners = corners.astype(np.int32)
    corners[(rows < 0) | (rows >= height)] = colour
    corners[:, (columns < 0) | (columns >= width)] = colour
    if side == 2 * size:
        # OpenCV takes the plain mean of four where a side is exactly halved.
        across = corners[:, :size] + corners[:, size:]
        square[seen] = (across[: seen.sum()] + across[seen.sum() :] + 2) >> 2
        return square
    is_edge = low == high
    left_weight, right_weight = np.where(is_edge, _ONE, near), np.where(is_edge, 0, far)
    across = corners[:, :size] * left_weight[:, None] + corners[:, size:] * right_weight[:, None]
    # The shifts drop the same bits as OpenCV's 16-bit multiplications do.
    upper = ((across[: seen.sum()] >> 4) * near[seen, None, None]) >> 16
    lower = ((across[seen.sum() :] >> 4) * far[seen, None, None]) >> 16
    square[seen] = (upper + lower + 2) >> 2
    return square
