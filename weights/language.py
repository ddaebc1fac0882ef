"""The language model's shape and limits, from its configs and its tensors; without torch.

What a config lacks is read off the tensors where they can tell; what they cannot tell is asked
for. Nothing is left to the defaults of a library, which are those of another model.
"""

from __future__ import annotations

from typing import Any

from apollo_cli.values import (
    Check,
    Values,
    flag,
    list_of,
    nothing_or,
    number,
    one_of,
    table,
    whole,
)
from apollo_cli.weights.checkpoint import LLM, Checkpoint, stored_kind
from apollo_cli.weights.encoders import agree, count_layers
from apollo_cli.weights.shards import EMBEDDING

DEFAULT_CONTEXT = 32768
_FILE, _GENERATION_FILE = f"{LLM}/config.json", f"{LLM}/generation_config.json"
_LAYERS, _MOST_TOKENS = "model.layers.", 2**31
# What stands for "no limit" in configs of tokenizers.
_NO_LIMIT = 10**31
_HEADS, _POSITIVE = whole(1, 65536), number(0, 1000, above=True)
# What these would change is not built here.
_FIXED: dict[str, Check] = {
    "model_type": one_of("qwen2"),
    "use_sliding_window": nothing_or(one_of(False)),
    "layer_types": nothing_or(list_of(one_of("full_attention"))),
    "tie_word_embeddings": nothing_or(flag),
}
# Ways to turn positions, beyond the plain one, and what shapes them.
_ROPE: dict[str, Check] = {
    "rope_type": one_of("default", "linear", "dynamic", "yarn"),
    "factor": number(1, 1000),
    "original_max_position_embeddings": whole(1, _MOST_TOKENS),
    "attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
}


def read_llm(checkpoint: Checkpoint, faults: list[str]) -> dict[str, Any]:
    """What ``transformers`` needs to build the language model: checked, and nothing else.

    Args:
        checkpoint: as found. faults: what is missing, wrong or not supported is added.
    """
    config, tensors = Values(checkpoint.llm_config, _FILE, faults), checkpoint.tensors[LLM]
    config.read(_FIXED)
    shape = tensors[EMBEDDING].shape if EMBEDDING in tensors else ()
    rows, width = shape if len(shape) == 2 else (None, None)
    gate = tensors.get(f"{_LAYERS}0.mlp.gate_proj.weight")
    # A layer in 4 bits is stored as one long row of bytes, which tells nothing of its shape.
    is_packed = gate is None or len(gate.shape) != 2 or stored_kind(checkpoint) == "4bit"
    width = agree(config, "hidden_size", width)
    return {
        "vocab_size": agree(config, "vocab_size", rows),
        "hidden_size": width,
        "intermediate_size": agree(
            config, "intermediate_size", None if is_packed or gate is None else gate.shape[0]
        ),
        "num_hidden_layers": agree(
            config, "num_hidden_layers", count_layers(tensors, _LAYERS) or None
        ),
        **_heads(config, checkpoint, width),
        **_rope(config),
        "hidden_act": config.get("hidden_act", one_of("silu")),
        "rms_norm_eps": config.get("rms_norm_eps", number(0, 1, above=True)),
        "attention_dropout": config.get("attention_dropout", nothing_or(number(0, 1)), None) or 0.0,
        "tie_word_embeddings": checkpoint.tied_head,
    }


def _heads(config: Values, checkpoint: Checkpoint, width: int | None) -> dict[str, Any]:
    tensors = checkpoint.tensors[LLM]
    biases = (tensors.get(f"{_LAYERS}0.self_attn.{name}_proj.bias") for name in "qk")
    queries, keys = (info.elements if info else 0 for info in biases)
    heads = config.get("num_attention_heads", _HEADS)
    optional = config.read(dict.fromkeys(("head_dim", "num_key_value_heads"), nothing_or(_HEADS)))
    head, key_heads = optional["head_dim"], optional["num_key_value_heads"]
    if heads and width and queries and keys:
        head = head or width // heads
        if heads * head != queries or head % 2:
            config.refuse(
                "num_attention_heads",
                f"is {heads}: with {head} values each, they do not fill the {queries} of the "
                "tensors",
            )
            head = max(head, 1)
        key_heads = key_heads or keys // head or 1
        if key_heads * head != keys or heads % key_heads:
            config.refuse(
                "num_key_value_heads",
                f"is {key_heads}: with {head} values each, they do not fill the {keys} of the "
                f"tensors, or do not divide {heads} heads",
            )
    return {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head}


def _rope(config: Values) -> dict[str, Any]:
    """How positions turn: newer configs hold it in one object, older ones beside each other."""
    newer = config.get("rope_parameters", nothing_or(table), None) or {}
    older = config.get("rope_scaling", nothing_or(table), None) or {}
    inside = Values(newer, f"{_FILE}: rope_parameters", config.faults)
    holder = inside if "rope_theta" in inside else config
    theta = holder.get("rope_theta", number(1, 1e12))
    most = config.get("max_position_embeddings", nothing_or(whole(1, _MOST_TOKENS)), None)
    told = {**older, **{k: v for k, v in newer.items() if k != "rope_theta"}}
    if "type" in told:
        told = {"rope_type": told.pop("type"), **told}
    scaling = Values(told, f"{_FILE}: rope_scaling", config.faults)
    for key in told.keys() - _ROPE.keys():
        scaling.refuse(key, f"is not read; allowed are {', '.join(_ROPE)}")
    found: dict[str, Any] = {"rope_theta": theta}
    if most is not None:
        found["max_position_embeddings"] = most
    if scaling.get("rope_type", _ROPE["rope_type"], "default") != "default":
        read = {key: scaling.get(key, check) for key, check in _ROPE.items() if key in told}
        scaling.get("factor", _ROPE["factor"])
        found["rope_parameters"] = read | {"rope_theta": theta}
    return found


def read_context(checkpoint: Checkpoint, faults: list[str], notes: list[str]) -> int:
    """The longest sequence: what the root config says, and no more than there are positions."""
    llm = checkpoint.llm_config
    positions = llm.get("max_position_embeddings")
    most = positions if type(positions) is int and positions > 0 else None
    for config, where in ((checkpoint.config, "config.json"), (llm, _FILE)):
        if config.get("model_max_length") is not None:
            check = whole(1, _MOST_TOKENS if most is None else _NO_LIMIT)
            value = Values(config, where, faults).get("model_max_length", check)
            if value is None or most is None or value <= most:
                return value or DEFAULT_CONTEXT
            notes.append(
                f"{where}: model_max_length is {value}, more than the {most} positions that the "
                "language model has, which are taken"
            )
            return most
    return min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)


def read_ends(checkpoint: Checkpoint, vocabulary: int, faults: list[str]) -> tuple[int, ...]:
    """The tokens that end an answer: one id, or a list of them."""

    def check(value: Any) -> tuple[int, ...]:
        try:
            found = list_of(whole(0, vocabulary - 1))(value if isinstance(value, list) else [value])
        except ValueError as error:
            raise ValueError(f"{error}, or a list of such") from None
        if not found:
            raise ValueError("allowed is at least one token")
        return found

    config = Values(checkpoint.generation_config, _GENERATION_FILE, faults)
    ends = config.get("eos_token_id", nothing_or(check), None)
    return ends or Values(checkpoint.llm_config, _FILE, faults).get("eos_token_id", check) or ()


def read_generation(checkpoint: Checkpoint, faults: list[str]) -> dict[str, Any]:
    """Settings of answers that a checkpoint brings along, as far as they are used."""
    found = Values(checkpoint.generation_config, _GENERATION_FILE, faults).read(
        {
            "repetition_penalty": nothing_or(number(0, 100, above=True)),
            "top_k": nothing_or(whole(0, _MOST_TOKENS)),
        }
    )
    return {
        "repetition_penalty": found["repetition_penalty"] or 1.0,
        "top_k": found["top_k"] or 0,
    }
