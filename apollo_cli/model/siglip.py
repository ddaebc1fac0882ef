"""SigLIP's vision tower through transformers, cut off at the selected layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel


class Siglip(nn.Module):
    """The hidden state behind ``depth`` layers, without the final norm and the pooling head.

    Letters: B clips, T frames, S image side, G grid side, D width.

    Args:
        config: the released ``config.json`` of the tower.
        depth: number of layers to build and run.
        kernel: attention kernel, under transformers' name for it.
    """

    per_frame = True

    def __init__(self, config: dict[str, Any], depth: int, kernel: str = "sdpa") -> None:
        super().__init__()
        wanted = {"num_hidden_layers": depth, "vision_use_head": False}
        siglip_config = SiglipVisionConfig(**{**config, **wanted})
        siglip_config._attn_implementation = kernel
        self.vision_model = SiglipVisionModel(siglip_config)
        self.vision_model.post_layernorm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        side = config["image_size"] // config["patch_size"]
        self.grid = (1, side, side)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map normalised pixels (B, T, 3, S, S) to features (B, T, G, G, D)."""
        clips, frames = pixels.shape[:2]
        hidden = self.vision_model(pixel_values=pixels.flatten(0, 1)).last_hidden_state
        return hidden.unflatten(1, self.grid[1:]).unflatten(0, (clips, frames))
