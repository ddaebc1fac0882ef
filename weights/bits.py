"""Which layers go into how many bits, and what that takes; without torch."""

from __future__ import annotations

import importlib.util
from typing import Literal

from apollo_cli.errors import WeightsError
from apollo_cli.values import Values, any_text, flag, nothing_or, one_of, show
from apollo_cli.weights.checkpoint import Checkpoint

QuantKind = Literal["4bit", "8bit"]
KINDS: tuple[QuantKind, ...] = ("4bit", "8bit")
# Columns of activations with a value past this stay in 16 bits (LLM.int8, arXiv:2208.07339).
OUTLIER_THRESHOLD = 6.0
# The output head stays whole, by its name inside the language model.
SKIPPED = ("lm_head",)
# Where bitsandbytes runs for us.
DEVICES = ("cpu", "cuda")
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


def stored_kind(checkpoint: Checkpoint) -> QuantKind | None:
    """In how many bits a checkpoint stores its language model; None when it is not quantised.

    Raises:
        WeightsError: it is quantised in a way that is not read here.
    """
    if checkpoint.llm_config.get("quantization_config") is None:
        return None
    faults: list[str] = []
    config = Values(checkpoint.llm_config, "llm/config.json", faults).inside("quantization_config")
    method = config.get("quant_method", any_text, "bitsandbytes")
    kinds: list[QuantKind] = [
        kind for kind in KINDS if config.get(f"load_in_{kind}", nothing_or(flag), None)
    ]
    if "8bit" in kinds:
        # Another one changes the numbers, and is not built here.
        config.get("llm_int8_threshold", one_of(OUTLIER_THRESHOLD, int(OUTLIER_THRESHOLD)), None)
    if not faults and (method != "bitsandbytes" or len(kinds) != 1):
        told = " and ".join(kinds) or "neither 4bit nor 8bit"
        faults.append(f"{config.where} is of {show(method)}, {told}")
    if not faults:
        return kinds[0]
    raise WeightsError(
        "; ".join(faults),
        "read are 4-bit and 8-bit weights of bitsandbytes",
        "take the checkpoint that it was made from, with --quant",
    )


def allowed_kinds(
    wanted: QuantKind | None, device: str, stored: QuantKind | None = None
) -> tuple[QuantKind | None, ...]:
    """The precisions that a run may go down to, the wanted one first.

    Args:
        wanted: what was asked for; None is the dtype of the run.
        device: where it runs.
        stored: how the checkpoint is stored; a quantised one stays so.
    """
    if stored is not None:
        return (stored,)
    runs = device.partition(":")[0] in DEVICES and importlib.util.find_spec("bitsandbytes")
    order: tuple[QuantKind | None, ...] = (None, "8bit", "4bit")
    below = order[order.index(wanted) + 1 :]
    return (wanted, *below) if runs else (wanted,)
