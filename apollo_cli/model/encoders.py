"""What a vision encoder is, which ones there are, and how their grids become one.

Letters: B clips, T frames, S image side, D width of one encoder, V sum of the widths.
A further encoder is one file with a module of this protocol and one row in ``build_encoder``.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from apollo_cli.model.config import EncoderConfig
from apollo_cli.model.internvideo2 import InternVideo2
from apollo_cli.model.siglip import Siglip
from apollo_cli.video.transforms import PixelSpec


class VisionEncoder(Protocol):
    """A module from normalised pixels (B, T, 3, S, S) to features (B, t, rows, columns, D).

    ``grid`` is (t, rows, columns) of a whole clip. An image encoder (``per_frame``) has t = 1
    there, takes any number of frames and returns as many.
    """

    grid: tuple[int, int, int]
    per_frame: bool

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode the frames of clips."""
        ...


def build_encoder(config: EncoderConfig, kernel: str = "sdpa") -> torch.nn.Module:
    """Build one encoder without weights."""
    if config.internvideo2 is not None:
        tower = InternVideo2(config.internvideo2)
        tower.set_kernel(kernel)
        return tower
    assert config.siglip is not None
    return Siglip(*config.siglip, kernel=kernel)


def normalise(pixels: torch.Tensor, spec: PixelSpec, dtype: torch.dtype) -> torch.Tensor:
    """Turn uint8 (B, T, 3, S, S) into the encoder's input, in float32 until the last step."""
    mean = torch.tensor(spec.mean, device=pixels.device).view(3, 1, 1)
    std = torch.tensor(spec.std, device=pixels.device).view(3, 1, 1)
    return ((pixels.float() / 255 - mean) / std).to(dtype)


def encode_grid(
    encoder: VisionEncoder, pixels: torch.Tensor, grid: tuple[int, int, int]
) -> torch.Tensor:
    """Run one encoder on a clip's frames and bring it to the common grid.

    An image encoder sees every (T // t)-th frame, from the first on, so that it has as many
    moments as the common grid. Other grids are interpolated in float32, trilinear, corners
    not aligned; the result is cast back.

    Args:
        pixels: normalised (B, T, 3, S, S). grid: the common (t, rows, columns).

    Returns:
        (B, t, rows, columns, D).
    """
    if encoder.per_frame:
        pixels = pixels[:, :: max(1, pixels.shape[1] // grid[0])]
    features = encoder(pixels)
    if tuple(features.shape[1:4]) == grid:
        return features
    resized = F.interpolate(
        features.movedim(-1, 1).float(), size=grid, mode="trilinear", align_corners=False
    )
    return resized.movedim(1, -1).to(features.dtype)
