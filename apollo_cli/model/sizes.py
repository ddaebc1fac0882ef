"""What the network holds, from its shape alone and without torch: values of each part, and
activations at the dearest moment of each stage.

Letters: D encoder width, M its hidden width, N tokens of a clip on the common grid, V encoder
widths, H language model width, C tokens of a prompt chunk, L tokens of the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from apollo_cli.model.config import ConnectorConfig, EncoderShape, NetworkConfig


@dataclass(frozen=True)
class LlmSizes:
    """Sizes of the language model that arithmetic needs.

    Attributes:
        width: H. hidden: width of the feed-forward part. layers: number of layers.
        heads, kv_heads, head_width: of the attention.
        vocabulary: rows of the embedding. tied: whether the head is the embedding.
    """

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values that one token leaves in the cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width

    @property
    def layer_linears(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of each linear layer of one transformer layer."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return (
            (queries, self.width),
            (keys, self.width),
            (keys, self.width),
            (self.width, queries),
            (self.hidden, self.width),
            (self.hidden, self.width),
            (self.width, self.hidden),
        )

    @property
    def other_values(self) -> int:
        """Values outside these linear layers: embedding, head, norms and biases."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        per_layer = queries + 2 * keys + 2 * self.width
        return embeddings + self.layers * per_layer + self.width

    @property
    def values(self) -> int:
        """All values."""
        linears = sum(rows * columns for rows, columns in self.layer_linears)
        return self.layers * linears + self.other_values


def llm_sizes(config: dict[str, Any]) -> LlmSizes:
    """The sizes in the config of a language model, as ``NetworkConfig`` holds it."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return LlmSizes(
        width=width,
        hidden=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_width=config.get("head_dim") or width // heads,
        vocabulary=config["vocab_size"],
        tied=config["tie_word_embeddings"],
    )


def connector_values(config: ConnectorConfig) -> int:
    """Values of projector and resampler."""
    return sum(_connector_parts(config))


def _connector_parts(config: ConnectorConfig) -> Iterator[int]:
    width = config.text_width
    linears = 1 if config.projector == "linear" else int(config.projector[3:].partition("x")[0])
    yield config.vision_width * width + width + (linears - 1) * (width * width + width)
    if config.learned_ends:
        yield 2 * width
    if config.resampler == "conv2d_avg":
        yield 9 * width * width + width
    if config.resampler == "perciver":
        queries, keys = config.heads * config.head_width, config.key_heads * config.head_width
        norm = 3 * width
        feed = 3 * config.ff_multi * width * width
        layer = 3 * norm + 2 * queries * width + 2 * keys * width + feed
        yield config.tokens_per_clip * width + config.depth * layer + norm


_FLOAT32 = 4


def clip_bytes(config: NetworkConfig, value_bytes: int) -> int:
    """Activations of one clip on its way from pixels to visual tokens."""
    return max(_clip_stages(config, value_bytes))


def _clip_stages(config: NetworkConfig, value_bytes: int) -> Iterator[int]:
    connector, frames = config.connector, config.frames_per_clip
    time, rows, columns = connector.grid
    grid = time * rows * columns
    # The pictures of a clip arrive as bytes, for all encoders at once.
    held = sum(frames * 3 * encoder.pixels.size**2 for encoder in config.encoders)
    features = 0
    for encoder in config.encoders:
        seen = frames // max(1, frames // time) if encoder.shape.per_frame else frames
        values = frames * 3 * encoder.pixels.size**2
        # Normalising holds two float32 copies; its result stays as long as the encoder runs.
        yield held + features + 2 * _FLOAT32 * values
        inside = max(_encoder_moments(encoder.shape, seen, grid, value_bytes))
        yield held + features + values * value_bytes + inside
        features += grid * encoder.width * value_bytes
    # Joining holds the parts and the whole.
    yield held + 2 * features
    context = grid * connector.text_width * value_bytes
    keys = 2 * grid * connector.heads * connector.head_width * value_bytes
    # The resampler holds the context, the normalised one and a copy with the latents.
    yield held + features + 3 * context + keys


def _encoder_moments(
    shape: EncoderShape, frames: int, grid: int, value_bytes: int
) -> Iterator[int]:
    width, (time, rows, columns) = shape.width, shape.grid
    tokens = time * rows * columns * (frames if shape.per_frame else 1)
    yield tokens * shape.attention_copies * width * value_bytes
    if not shape.per_frame and tokens != grid:
        # Interpolation works on float32 and holds what it reads and what it writes.
        read = tokens * width * (value_bytes + _FLOAT32)
        yield read + grid * width * (value_bytes + _FLOAT32)
    # Feed-forward: residual and normalised input, the hidden layer before and after its curve.
    yield tokens * (2 * width + 2 * shape.mlp_width) * value_bytes


def prefill_bytes(
    llm: LlmSizes, chunk: int, length: int, value_bytes: int, fused: bool = False
) -> int:
    """Activations of one chunk of the prompt in the dearest layer.

    Args:
        llm: sizes of the language model.
        chunk: C. length: L, all that the chunk looks back on.
        value_bytes: of one value.
        fused: whether attention runs in flash-attn, without masks and repeated heads.
    """
    chunk = min(chunk, length)
    queries = llm.heads * llm.head_width
    feed = chunk * (3 * llm.hidden + 2 * llm.width) * value_bytes
    # Residual, normalised input, queries, their rotation with its terms, and the result.
    attention = chunk * (2 * llm.width + 5 * queries) * value_bytes
    # A cache grows by a copy, so one layer's keys are there twice.
    attention += length * llm.kv_heads * llm.head_width * value_bytes
    if not fused and chunk < length:
        # A mask, first of bytes and then of values; keys and values repeated for every head.
        attention += chunk * length * (1 + value_bytes) + 2 * length * queries * value_bytes
    logits = llm.vocabulary * (value_bytes + _FLOAT32)
    return max(feed, attention, logits)


def quantised_workspace(llm: LlmSizes, kind: str, chunk: int, value_bytes: int) -> int:
    """What a quantised layer needs beside its input and output."""
    if kind == "4bit":
        return max(rows * columns for rows, columns in llm.layer_linears) * value_bytes
    # Input in 16 bits, its outliers and its 8-bit form; products in 32 bits.
    return chunk * max(4 * columns + 4 * rows for rows, columns in llm.layer_linears)
