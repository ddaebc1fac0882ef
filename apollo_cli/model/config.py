"""Shapes of the network, as plain data: read from a checkpoint, free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apollo_cli.video.transforms import PixelSpec

RESAMPLERS = ("perciver", "avg", "conv2d_avg")
INTEGRATIONS = ("plain", "start_end", "timestamps", "both")


@dataclass(frozen=True)
class ConnectorConfig:
    """Shape of the connector.

    Attributes:
        vision_width: V. text_width: H.
        projector: ``linear`` or ``mlpNx_gelu``.
        resampler: ``perciver`` (the released spelling; the paper's best), ``avg`` for adaptive
            average pooling, ``conv2d_avg`` for a 3x3 convolution before it (paper, table 3).
        tokens_per_clip: R.
        grid: time, rows and columns of the context.
        depth, heads, head_width, key_heads, ff_multi: of the Perceiver only.
        integration: what stands between the clips: ``timestamps`` in words (released),
            learned ``start_end`` tokens, ``both`` or nothing (``plain``).
    """

    vision_width: int
    text_width: int
    projector: str
    resampler: str
    tokens_per_clip: int
    grid: tuple[int, int, int]
    depth: int = 0
    heads: int = 1
    head_width: int = 0
    key_heads: int = 1
    ff_multi: int = 4
    integration: str = "timestamps"

    @property
    def learned_ends(self) -> bool:
        """Whether each clip stands between learned start and end tokens."""
        return self.integration in ("start_end", "both")


@dataclass(frozen=True)
class InternVideo2Config:
    """Shape of the transformer.

    Attributes:
        width: D.
        heads: attention heads; cannot be read off the weights.
        mlp_width: hidden width of the feed-forward part.
        depth: number of blocks that are run; the blocks behind the selected layer are not built.
        image_size: S. patch_size: P.
        frames: T. tubelet: frames that one patch spans.
        tanh_gelu: the fused kernels of the original use the tanh form of GELU, the plain path erf.
    """

    width: int
    heads: int
    mlp_width: int
    depth: int
    image_size: int
    patch_size: int
    frames: int
    tubelet: int = 1
    tanh_gelu: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens of a clip along time, rows and columns."""
        side = self.image_size // self.patch_size
        return self.frames // self.tubelet, side, side


@dataclass(frozen=True)
class EncoderConfig:
    """One vision encoder of a checkpoint, in the order in which features are concatenated.

    Attributes:
        name: directory name under ``vision_tower/``.
        kind: ``internvideo2`` or ``siglip``.
        width: D. grid: tokens of a clip along time, rows, columns (t = 1 for images).
        pixels: how its pixels are made.
        internvideo2: shape, for that kind.
        siglip: released config and number of layers to run, for that kind.
    """

    name: str
    kind: str
    width: int
    grid: tuple[int, int, int]
    pixels: PixelSpec
    internvideo2: InternVideo2Config | None = None
    siglip: tuple[dict[str, Any], int] | None = None


def common_grid(encoders: Sequence[EncoderConfig]) -> tuple[int, int, int]:
    """The largest extent of the encoders' grids along time, rows and columns."""
    time, rows, columns = (max(axis) for axis in zip(*(e.grid for e in encoders), strict=True))
    return time, rows, columns


@dataclass(frozen=True)
class NetworkConfig:
    """Everything that shapes the network and its prompt, as read from a checkpoint.

    Attributes:
        clip_seconds: length of a clip; an int is printed as an int in the prompt.
        frames_per_clip: T.
        encoders: in the order of concatenation.
        connector: shape of the connector.
        llm: what ``llm/config.json`` says of the shape, complete.
        context: longest sequence that the language model was tuned for, in tokens.
        template: ``qwen_2`` or ``qwen_1_5``.
        eos_ids: ids that end an answer. generation: what ``generation_config.json`` sets of them.
        notes: what the checkpoint's files hold otherwise than the released ones.
    """

    clip_seconds: float
    frames_per_clip: int
    encoders: tuple[EncoderConfig, ...]
    connector: ConnectorConfig
    llm: dict[str, Any]
    context: int
    template: str
    eos_ids: tuple[int, ...]
    generation: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def fps(self) -> float:
        """Frames a second inside a clip."""
        return self.frames_per_clip / self.clip_seconds

    @property
    def visual_tokens_per_clip(self) -> int:
        """R, and the learned ends where there are any."""
        return self.connector.tokens_per_clip + 2 * self.connector.learned_ends
