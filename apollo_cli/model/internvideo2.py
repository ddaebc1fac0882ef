"""InternVideo2's vision transformer, written for clips of a few frames.

Letters: B clips, T frames, S image side, P patch side, G grid side (S / P), N tokens, D width.
Key names and numerics follow the released files; the pretraining heads are left out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from apollo_cli.model.attention import scaled_attention
from apollo_cli.model.config import InternVideo2Config


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

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kernel = "sdpa"
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

    def __init__(self, config: InternVideo2Config) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.width)
        self.attn = Attention(config.width, config.heads)
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

    def __init__(self, config: InternVideo2Config) -> None:
        super().__init__()
        size = (config.tubelet, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(3, config.width, kernel_size=size, stride=size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map (B, 3, T, S, S) to (B, N, D), ordered by time, row, column."""
        return self.proj(pixels).flatten(2).transpose(1, 2)


class InternVideo2(nn.Module):
    """The tower up to the selected layer, without a final norm."""

    per_frame = False

    def __init__(self, config: InternVideo2Config) -> None:
        super().__init__()
        self.grid = config.grid
        tokens = 1 + config.grid[0] * config.grid[1] * config.grid[2]
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))

    def set_kernel(self, kernel: str) -> None:
        """Choose the attention kernel of every block."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.kernel = kernel

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
