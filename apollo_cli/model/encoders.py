"""Vision encoders: SigLIP, InternVideo2, their attention, and how their grids become one.

Letters: B clips, T frames, S image side, G grid side, D width of one encoder, V sum of the widths.
A further encoder is a module of the protocol ``VisionEncoder``, which its shape builds.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from apollo_cli.model.config import InternVideo2Shape, SiglipShape
from apollo_cli.video.transforms import PixelSpec


def scaled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: str = "sdpa"
) -> torch.Tensor:
    """Attend without a mask, with scale 1/sqrt(head width).

    Args:
        query: (B, heads, N, head width).
        key: (B, key heads, M, head width); key heads divide heads (grouped queries).
        value: as ``key``.
        kernel: ``flash_attention_2`` or ``sdpa``, as ``hardware.choose_device`` decided.

    Returns:
        (B, heads, N, head width).
    """
    if kernel == "flash_attention_2" and query.dtype in (torch.float16, torch.bfloat16):
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

        swapped = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return flash_attn_func(*swapped).transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)


class Siglip(nn.Module):
    """The hidden state behind ``depth`` layers, without the final norm and the pooling head.

    Letters: B clips, T frames, S image side, G grid side, D width.

    Args:
        shape: number of layers to build and run, and their sizes.
        kernel: attention kernel, under transformers' name for it.
    """

    per_frame = True

    def __init__(self, shape: SiglipShape, kernel: str = "sdpa") -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=shape.width,
            intermediate_size=shape.mlp_width,
            num_hidden_layers=shape.depth,
            num_attention_heads=shape.heads,
            image_size=shape.image_size,
            patch_size=shape.patch_size,
            hidden_act=shape.hidden_act,
            layer_norm_eps=shape.layer_norm_eps,
            vision_use_head=False,
        )
        config._attn_implementation = kernel
        self.vision_model = SiglipVisionModel(config)
        self.vision_model.post_layernorm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        self.grid = shape.grid

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map normalised pixels (B, T, 3, S, S) to features (B, T, G, G, D)."""
        clips, frames = pixels.shape[:2]
        hidden = self.vision_model(pixel_values=pixels.flatten(0, 1)).last_hidden_state
        return hidden.unflatten(1, self.grid[1:]).unflatten(0, (clips, frames))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and scaled in the input's dtype."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise (..., D)."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LayerScale(nn.Module):
    """A learned gain for each channel, multiplied in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale (..., D)."""
        return (x.float() * self.gamma.float()).to(x.dtype)


class Attention(nn.Module):
    """Joint space-time attention; queries and keys are normalised over the full width."""

    def __init__(self, width: int, heads: int, kernel: str) -> None:
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_norm = RMSNorm(width)
        self.k_norm = RMSNorm(width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend within each row of (B, N, D)."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        split = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q_norm(query), self.k_norm(key), value)
        )
        attended = scaled_attention(*split, kernel=self.kernel)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self, width: int, hidden: int, tanh_gelu: bool) -> None:
        super().__init__()
        self.approximate = "tanh" if tanh_gelu else "none"
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., D) to (..., D)."""
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class Block(nn.Module):
    """A pre-norm transformer block with layer scale."""

    def __init__(self, config: InternVideo2Shape, kernel: str) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.width)
        self.attn = Attention(config.width, config.heads, kernel)
        self.ls1 = LayerScale(config.width)
        self.norm2 = RMSNorm(config.width)
        self.mlp = Mlp(config.width, config.mlp_width, config.tanh_gelu)
        self.ls2 = LayerScale(config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, N, D) to (B, N, D)."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Cuts a clip into patches by a strided 3-D convolution."""

    def __init__(self, config: InternVideo2Shape) -> None:
        super().__init__()
        size = (config.tubelet, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(3, config.width, kernel_size=size, stride=size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map (B, 3, T, S, S) to (B, N, D), ordered by time, row, column."""
        return self.proj(pixels).flatten(2).transpose(1, 2)


class InternVideo2(nn.Module):
    """The tower up to the selected layer, without a final norm."""

    per_frame = False

    def __init__(self, config: InternVideo2Shape, kernel: str = "sdpa") -> None:
        super().__init__()
        self.grid = config.grid
        tokens = 1 + config.grid[0] * config.grid[1] * config.grid[2]
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, config.width))
        self.blocks = nn.ModuleList(Block(config, kernel) for _ in range(config.depth))

    def forward_tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map (B, T, 3, S, S) to (B, 1 + N, D): the class token first, then the patches."""
        x = self.patch_embed(pixels.transpose(1, 2))
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map normalised pixels (B, T, 3, S, S) to features (B, T // tubelet, G, G, D)."""
        return self.forward_tokens(pixels)[:, 1:].unflatten(1, self.grid)


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
