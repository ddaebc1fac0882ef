"""HDR pictures (PQ and HLG) to something that a person would recognise on an ordinary screen."""

from __future__ import annotations

from functools import cache

import av
import numpy as np

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


def is_hdr(frame: av.VideoFrame) -> bool:
    """Whether the picture carries PQ or HLG brightness."""
    return int(frame.color_trc) in (_PQ, _HLG)


def tone_map(frame: av.VideoFrame, width: int, height: int) -> np.ndarray:
    """Convert an HDR picture to (height, width, 3) uint8, a few rows at a time."""
    deep = np.asarray(frame.reformat(width, height, "rgb48le").to_ndarray(), dtype=np.uint16)
    light = _light_table(int(frame.color_trc))
    wide = int(frame.color_primaries) == _BT2020
    encode = _display_table()
    out = np.empty((height, width, 3), dtype=np.uint8)
    for top in range(0, height, _ROWS_AT_ONCE):
        linear = light[deep[top : top + _ROWS_AT_ONCE]]
        if wide:
            linear = linear @ _BT2020_TO_BT709.T
        # One factor for all three colours keeps the hue.
        brightest = np.maximum(linear.max(axis=2, keepdims=True), 1e-6)
        linear *= _compress(brightest) / brightest
        index = np.clip(linear * 4095 + 0.5, 0, 4095).astype(np.int16)
        out[top : top + _ROWS_AT_ONCE] = encode[index]
    return out


def _compress(light: np.ndarray) -> np.ndarray:
    """Extended Reinhard curve: 1 is diffuse white before, the peak becomes 1 after."""
    peak = _PEAK_NITS / _WHITE_NITS
    return light * (1 + light / peak**2) / (1 + light)


@cache
def _light_table(transfer: int) -> np.ndarray:
    """Linear light, 1 at diffuse white, for each 16-bit code (ITU-R BT.2100)."""
    code = np.arange(65536, dtype=np.float64) / 65535
    if transfer == _PQ:
        root = code ** (1 / 78.84375)
        top = np.maximum(root - 0.8359375, 0)
        nits = 10000 * (top / (18.8515625 - 18.6875 * root)) ** (1 / 0.1593017578125)
    else:
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        scene = np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12)
        nits = _PEAK_NITS * scene**1.2
    return (np.minimum(nits, _PEAK_NITS) / _WHITE_NITS).astype(np.float32)


@cache
def _display_table() -> np.ndarray:
    """sRGB code for each of 4096 steps of linear light."""
    light = np.arange(4096) / 4095
    code = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.round(code * 255).astype(np.uint8)
