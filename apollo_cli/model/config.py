"""Shapes of the network, as plain data: read from a checkpoint, free of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from apollo_cli.video.transforms import PixelSpec

if TYPE_CHECKING:
    from torch import nn

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
class EncoderShape(ABC):
    """Shape of a vision transformer up to the selected layer; each kind of encoder is a subclass.

    Attributes:
        width: D. heads: attention heads; cannot be read off the weights.
        mlp_width: hidden width of the feed-forward part.
        depth: number of layers that are run; the layers behind the selected one are not built.
        image_size: S. patch_size: P.
        per_frame: whether it sees each frame alone.
        attention_copies: how often attention holds its input, its result and what is between.
    """

    per_frame: ClassVar[bool]
    attention_copies: ClassVar[int]

    width: int
    heads: int
    mlp_width: int
    depth: int
    image_size: int
    patch_size: int

    @property
    @abstractmethod
    def grid(self) -> tuple[int, int, int]:
        """Tokens of a clip along time, rows and columns; an image encoder has one moment."""

    @property
    @abstractmethod
    def values(self) -> int:
        """Number of values."""

    @property
    @abstractmethod
    def linear_sides(self) -> int:
        """Inputs and outputs of all linear layers."""

    @abstractmethod
    def build(self, kernel: str) -> nn.Module:
        """Build the network without weights, as ``encoders.VisionEncoder``."""


@dataclass(frozen=True)
class SiglipShape(EncoderShape):
    """SigLIP: an image encoder.

    Attributes:
        hidden_act, layer_norm_eps: as in the released config.
    """

    per_frame = True
    # Input, normalised input, queries, keys, values, and the result twice.
    attention_copies = 7

    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @property
    def grid(self) -> tuple[int, int, int]:
        """One moment."""
        side = self.image_size // self.patch_size
        return 1, side, side

    @property
    def values(self) -> int:
        """Patches, positions and layers."""
        width, hidden = self.width, self.mlp_width
        patch = width * 3 * self.patch_size**2 + width
        layer = 4 * width + 4 * (width * width + width) + 2 * width * hidden + hidden + width
        return patch + self.grid[1] * self.grid[2] * width + self.depth * layer

    @property
    def linear_sides(self) -> int:
        """Queries, keys, values, output, and both sides of the curve."""
        return self.depth * (4 * 2 * self.width + 2 * (self.width + self.mlp_width))

    def build(self, kernel: str) -> nn.Module:
        """Build it through transformers."""
        from apollo_cli.model.encoders import Siglip

        return Siglip(self, kernel)


@dataclass(frozen=True, kw_only=True)
class InternVideo2Shape(EncoderShape):
    """InternVideo2: a video encoder with joint attention over space and time.

    Attributes:
        frames: T. tubelet: frames that one patch spans.
        tanh_gelu: the fused kernels of the original use the tanh form of GELU, the plain path erf.
    """

    per_frame = False
    # Input, normalised input, queries with keys and values, both normalised, and the result.
    attention_copies = 8

    frames: int
    tubelet: int = 1
    tanh_gelu: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens of a clip along time, rows and columns."""
        side = self.image_size // self.patch_size
        return self.frames // self.tubelet, side, side

    @property
    def values(self) -> int:
        """Patches, class token, positions and blocks."""
        width, hidden = self.width, self.mlp_width
        time, rows, columns = self.grid
        patch = width * 3 * self.tubelet * self.patch_size**2 + width
        positions = (1 + time * rows * columns) * width + width
        attention = 3 * width * width + 2 * width + width * width + width
        block = 2 * width + attention + 2 * width + 2 * width * hidden + hidden + width
        return patch + positions + self.depth * block

    @property
    def linear_sides(self) -> int:
        """Queries with keys and values, output, and both sides of the curve."""
        return self.depth * (4 * self.width + 2 * self.width + 2 * (self.width + self.mlp_width))

    def build(self, kernel: str) -> nn.Module:
        """Build our own network."""
        from apollo_cli.model.encoders import InternVideo2

        return InternVideo2(self, kernel)


@dataclass(frozen=True)
class EncoderConfig:
    """One vision encoder of a checkpoint, in the order in which features are concatenated.

    Attributes:
        name: directory name under ``vision_tower/``.
        shape: of the network. pixels: how its pixels are made.
    """

    name: str
    shape: EncoderShape
    pixels: PixelSpec

    @property
    def width(self) -> int:
        """D."""
        return self.shape.width

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens of a clip along time, rows and columns."""
        return self.shape.grid


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
