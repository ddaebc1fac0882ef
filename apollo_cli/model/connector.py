"""The connector: a projector to the language model's width, then a resampler to few tokens.

Letters: B clips, N context tokens (time x rows x columns), R output tokens, V concatenated encoder
widths, H language model width. Key names follow the released files, spelling included.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

from apollo_cli.errors import WeightsError
from apollo_cli.model.config import ConnectorConfig
from apollo_cli.model.encoders import scaled_attention


class WeightedNorm(nn.Module):
    """LayerNorm with affine, then one more learned multiplier, as released."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-5)
        # The released files spell it so.
        self.wheight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise (..., H)."""
        return self.norm(x) * self.wheight


class GroupedCrossAttention(nn.Module):
    """Latents ask, context and latents answer; no mask, no positions."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        width, head = config.text_width, config.head_width
        self.heads, self.key_heads = config.heads, config.key_heads
        self.kernel = "sdpa"
        self.q_proj = nn.Linear(width, config.heads * head, bias=False)
        self.k_proj = nn.Linear(width, config.key_heads * head, bias=False)
        self.v_proj = nn.Linear(width, config.key_heads * head, bias=False)
        self.o_proj = nn.Linear(config.heads * head, width, bias=False)

    def forward(self, latents: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Map (B, R, H) and (B, N, H) to (B, R, H)."""
        seen = torch.cat((context, latents), dim=1)
        query = self.q_proj(latents).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.k_proj(seen).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        value = self.v_proj(seen).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        attended = scaled_attention(query, key, value, self.kernel)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., H) to (..., H)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PerceiverLayer(nn.Module):
    """One round of asking the context and thinking about it."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        self.input_latents_norm = WeightedNorm(config.text_width)
        self.input_context_norm = WeightedNorm(config.text_width)
        self.self_attn = GroupedCrossAttention(config)
        self.post_attention_layernorm = WeightedNorm(config.text_width)
        self.mlp = GatedMlp(config.text_width, config.ff_multi * config.text_width)

    def forward(self, latents: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Map (B, R, H) and (B, N, H) to (B, R, H)."""
        asked = self.self_attn(self.input_latents_norm(latents), self.input_context_norm(context))
        latents = latents + asked
        return latents + self.mlp(self.post_attention_layernorm(latents))


class PerceiverResampler(nn.Module):
    """Learned latents that read the context in a few layers; R tokens come out."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        # Latents of zero would make all R tokens equal for ever, so they start apart.
        latents = torch.empty(config.tokens_per_clip, config.text_width)
        self.latents = nn.Parameter(nn.init.trunc_normal_(latents, mean=0.5, std=0.1))
        self.layers = nn.ModuleList(PerceiverLayer(config) for _ in range(config.depth))
        self.norm = WeightedNorm(config.text_width)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """Map (B, N, H) to (B, R, H)."""
        latents = self.latents.expand(context.shape[0], -1, -1)
        for layer in self.layers:
            latents = layer(latents, context)
        return self.norm(latents)


class PoolResampler(nn.Module):
    """Adaptive average pooling of the grid to R tokens, with a 3x3 convolution before it or not."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.pooled = pooled_grid(config.tokens_per_clip, config.grid)
        self.conv = (
            nn.Conv2d(config.text_width, config.text_width, 3, padding=1)
            if config.resampler == "conv2d_avg"
            else None
        )

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """Map (B, N, H) to (B, R, H)."""
        grid = context.unflatten(1, self.grid).movedim(-1, 2)
        if self.conv is not None:
            grid = self.conv(grid.flatten(0, 1)).unflatten(0, grid.shape[:2])
        pooled = F.adaptive_avg_pool3d(grid.transpose(1, 2), self.pooled)
        return pooled.flatten(2).transpose(1, 2)


def pooled_grid(tokens: int, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Share R tokens out over time, rows and columns: time first, the rest as square as it goes."""
    time = next(t for t in range(min(grid[0], tokens), 0, -1) if tokens % t == 0)
    per_frame = tokens // time
    rows = next(r for r in range(int(per_frame**0.5), 0, -1) if per_frame % r == 0)
    return time, rows, per_frame // rows


def build_projector(kind: str, vision_width: int, text_width: int) -> nn.Sequential:
    """Build ``linear`` or ``mlpNx_gelu`` under the released key names (0, 2, 4 ...)."""
    match = re.fullmatch(r"mlp(\d+)x_gelu", kind)
    if kind != "linear" and (match is None or int(match[1]) < 1):
        raise WeightsError(
            f"mm_connector/config.json: projector_type {kind!r}",
            "supported are linear and mlpNx_gelu",
        )
    layers: list[nn.Module] = [nn.Linear(vision_width, text_width)]
    for _ in range(int(match[1]) - 1 if match else 0):
        layers += [nn.GELU(), nn.Linear(text_width, text_width)]
    return nn.Sequential(*layers)


class Connector(nn.Module):
    """Projector and resampler; with learned start and end tokens where the config says so."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        self.config = config
        self.proj = build_projector(config.projector, config.vision_width, config.text_width)
        perceiver = config.resampler == "perciver"
        self.resampler = PerceiverResampler(config) if perceiver else PoolResampler(config)
        if config.learned_ends:
            self.clip_start = nn.Parameter(torch.randn(config.text_width) * 0.02)
            self.clip_end = nn.Parameter(torch.randn(config.text_width) * 0.02)

    def set_kernel(self, kernel: str) -> None:
        """Choose the attention kernel of the resampler."""
        for module in self.modules():
            if isinstance(module, GroupedCrossAttention):
                module.kernel = kernel

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map concatenated features (B, N, V) to (B, R, H), or (B, 1 + R + 1, H) with ends."""
        tokens = self.resampler(self.proj(features))
        if not self.config.learned_ends:
            return tokens
        start, end = (
            token.expand(tokens.shape[0], 1, -1) for token in (self.clip_start, self.clip_end)
        )
        return torch.cat((start, tokens, end), dim=1)
