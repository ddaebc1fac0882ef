"""What the network holds while it runs, tensor by tensor as its code does; without torch.

Every function counts bytes at the dearest moment of its stage. Letters: D encoder width, M its
hidden width, N tokens of a clip on the common grid, H language model width, C tokens of a prompt
chunk, L tokens of the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from apollo_cli.model.config import EncoderConfig, NetworkConfig
from apollo_cli.model.sizes import LlmSizes, siglip_hidden

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
        seen = frames // max(1, frames // time) if encoder.kind == "siglip" else frames
        values = frames * 3 * encoder.pixels.size**2
        # Normalising holds two float32 copies; its result stays as long as the encoder runs.
        yield held + features + 2 * _FLOAT32 * values
        inside = max(_encoder_moments(encoder, seen, grid, value_bytes))
        yield held + features + values * value_bytes + inside
        features += grid * encoder.width * value_bytes
    # Joining holds the parts and the whole.
    yield held + 2 * features
    context = grid * connector.text_width * value_bytes
    keys = 2 * grid * connector.heads * connector.head_width * value_bytes
    # The resampler holds the context, the normalised one and a copy with the latents.
    yield held + features + 3 * context + keys


def _encoder_moments(
    encoder: EncoderConfig, frames: int, grid: int, value_bytes: int
) -> Iterator[int]:
    width = encoder.width
    time, rows, columns = encoder.grid
    tokens = time * rows * columns
    if encoder.internvideo2 is not None:
        hidden = encoder.internvideo2.mlp_width
        # Attention: input, normalised, queries with keys and values, both normalised, result.
        yield tokens * 8 * width * value_bytes
        if tokens != grid:
            # Interpolation works on float32 and holds what it reads and what it writes.
            read = tokens * width * (value_bytes + _FLOAT32)
            yield read + grid * width * (value_bytes + _FLOAT32)
    else:
        hidden, tokens = siglip_hidden(encoder), tokens * frames
        yield tokens * 7 * width * value_bytes
    # Feed-forward: residual and normalised input, the hidden layer before and after its curve.
    yield tokens * (2 * width + 2 * hidden) * value_bytes


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
