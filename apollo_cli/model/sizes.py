"""How many values each part of the network holds, from its shape alone; without torch.

Letters: D encoder width, M its hidden width, V encoder widths, H language model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from apollo_cli.model.config import ConnectorConfig, EncoderConfig, InternVideo2Config


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


def encoder_values(config: EncoderConfig) -> int:
    """Values of an encoder up to the selected layer."""
    if config.internvideo2 is not None:
        return _internvideo2_values(config.internvideo2)
    assert config.siglip is not None
    shape, depth = config.siglip
    width, hidden = config.width, siglip_hidden(config)
    patch = width * 3 * shape["patch_size"] ** 2 + width
    layer = 4 * width + 4 * (width * width + width) + 2 * width * hidden + hidden + width
    return patch + config.grid[1] * config.grid[2] * width + depth * layer


def siglip_hidden(config: EncoderConfig) -> int:
    """Hidden width of SigLIP's feed-forward part."""
    assert config.siglip is not None
    return config.siglip[0]["intermediate_size"]


def _internvideo2_values(shape: InternVideo2Config) -> int:
    width, hidden = shape.width, shape.mlp_width
    time, rows, columns = shape.grid
    patch = width * 3 * shape.tubelet * shape.patch_size**2 + width
    positions = (1 + time * rows * columns) * width + width
    attention = 3 * width * width + 2 * width + width * width + width
    block = 2 * width + attention + 2 * width + 2 * width * hidden + hidden + width
    return patch + positions + shape.depth * block


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
