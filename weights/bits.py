"""Which layers go into how many bits, and what that takes; without torch."""

from __future__ import annotations

from typing import Literal

QuantKind = Literal["4bit", "8bit"]
KINDS: tuple[QuantKind, ...] = ("4bit", "8bit")
# The output head stays whole, by its name inside the language model.
SKIPPED = ("lm_head",)
# The share of a row that one 4-bit scale covers. The CPU kernel of bitsandbytes 0.50 takes the
# wrong scales, without an error, where rows do not hold whole blocks.
BLOCK = 64
# Scales are quantised in their turn, to 8 bits in groups of this many under one float32.
_SCALE_GROUP = 256
_CODE_BYTES = 16 * 4 + 256 * 4
_ROW_ALIGNMENT = 4


def fits_quantisation(kind: QuantKind, in_features: int) -> bool:
    """Whether a layer can be quantised: rows of whole blocks, or rows that a GPU can align."""
    return in_features % (BLOCK if kind == "4bit" else _ROW_ALIGNMENT) == 0


def quantised_bytes(kind: QuantKind, out_features: int, in_features: int) -> int:
    """Memory of one quantised weight with its scales."""
    values = out_features * in_features
    if kind == "8bit":
        return values + 4 * out_features
    blocks = values // BLOCK
    return values // 2 + blocks + 4 * -(-blocks // _SCALE_GROUP) + _CODE_BYTES
