"""The marker that is drawn into the pictures of the test videos: a grid of black and white cells.

8 columns by 6 rows fill the whole picture. The corner at the top left is white, the other three
are black, so a turned or mirrored picture shows. The 44 cells between hold, the highest bit
first: 17 bits of frame number, 19 bits of hundredths of a second, 8 bits of check sum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

COLUMNS, ROWS = 8, 6
_CORNERS = np.zeros((ROWS, COLUMNS), dtype=bool)
_CORNERS[[0, 0, -1, -1], [0, -1, 0, -1]] = True


class Mark(NamedTuple):
    """What a marker says, and how the picture is turned: degrees clockwise, or ``mirror``."""

    number: int
    hundredths: int
    turned: int | str


def _check_sum(word: int) -> int:
    register = 0x5A
    for position in range(35, -1, -1):
        feedback = (register >> 7) ^ (word >> position & 1)
        register = (register << 1 & 0xFF) ^ (0x07 if feedback else 0)
    return register


def draw_marker(number: int, hundredths: int, width: int, height: int) -> np.ndarray:
    """A (height, width) uint8 picture, 16 for black and 235 for white."""
    word = number << 19 | hundredths
    bits = f"{word << 8 | _check_sum(word):044b}"
    cells = np.zeros((ROWS, COLUMNS), dtype=np.uint8)
    cells[0, 0] = 1
    cells[~_CORNERS] = [int(bit) for bit in bits]
    rows = np.arange(height) * ROWS // height
    columns = np.arange(width) * COLUMNS // width
    return np.where(cells[rows[:, None], columns[None, :]], 235, 16).astype(np.uint8)


def read_marker(rgb: np.ndarray) -> Mark | None:
    """Read the marker of an (H, W, 3) picture in any position; None where there is none."""
    gray = rgb.mean(axis=2) if rgb.ndim == 3 else rgb
    for turned in (0, 90, 180, 270):
        if mark := _read_upright(np.rot90(gray, turned // 90), turned):
            return mark
    for flipped in (gray[:, ::-1], gray[::-1]):
        if mark := _read_upright(flipped, "mirror"):
            return mark
    return None


def _read_upright(gray: np.ndarray, turned: int | str) -> Mark | None:
    height, width = gray.shape
    inside = np.array([0.35, 0.5, 0.65])
    rows = ((np.arange(ROWS)[:, None] + inside) * height / ROWS).astype(int).reshape(-1)
    columns = ((np.arange(COLUMNS)[:, None] + inside) * width / COLUMNS).astype(int).reshape(-1)
    sampled = gray[np.minimum(rows, height - 1)][:, np.minimum(columns, width - 1)]
    level = sampled.reshape(ROWS, 3, COLUMNS, 3).mean(axis=(1, 3))
    if level.max() - level.min() < 20:
        return None
    cells = level > (level.max() + level.min()) / 2
    if not cells[0, 0] or cells[_CORNERS].sum() != 1:
        return None
    value = int("".join(str(int(cell)) for cell in cells[~_CORNERS]), 2)
    word = value >> 8
    if _check_sum(word) != value & 0xFF:
        return None
    return Mark(word >> 19, word & 0x7FFFF, turned)
