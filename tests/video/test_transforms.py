"""Squares for the encoders equal those of the original's libraries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apollo_cli.video.transforms import PixelSpec, resize_square

GOLDEN = Path(__file__).parents[1] / "golden" / "preprocess.npz"
SIGLIP = PixelSpec("siglip", 384, "bicubic", (127, 127, 127), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
INTERNVIDEO = PixelSpec(
    "internvideo", 224, "bilinear", (123, 116, 103), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
)


def synthetic(number: int, height: int, width: int) -> np.ndarray:
    """The input formula of the golden values."""
    y, x, c = np.ogrid[:height, :width, :3]
    value = 3 * x + 5 * y + 17 * number + 29 * c + x * y // 11 + 64 * ((x // 16 + y // 16) % 2)
    return (value % 256).astype(np.uint8)


@pytest.mark.parametrize("spec", [SIGLIP, INTERNVIDEO], ids=lambda spec: spec.name)
@pytest.mark.parametrize("shape", [(90, 160), (131, 97), (270, 480), (64, 64)])
def test_squares_equal_the_golden_ones_exactly(shape: tuple[int, int], spec: PixelSpec):
    with np.load(GOLDEN) as golden:
        want = golden[f"real_{spec.name}_u8_{shape[0]}x{shape[1]}_f2"]
    got = resize_square(synthetic(2, *shape), spec)
    assert np.array_equal(got, want.transpose(2, 0, 1))


@pytest.mark.parametrize("shape", [(1080, 1920), (1280, 90), (16, 16), (577, 1), (2, 901), (1, 1)])
def test_bicubic_equals_pillow_on_the_whole_padded_square(shape: tuple[int, int]):
    height, width = shape
    side = max(shape)
    padded = np.full((side, side, 3), 127, dtype=np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    picture = synthetic(5, height, width)
    padded[top : top + height, left : left + width] = picture
    want = Image.fromarray(padded).resize((384, 384), Image.Resampling.BICUBIC)
    got = resize_square(picture, SIGLIP)
    assert np.array_equal(got.transpose(1, 2, 0), np.asarray(want))
