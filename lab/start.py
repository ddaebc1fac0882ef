"""How the nano's language model starts: habits that are found late from random weights.

Nothing is added to the architecture; these are first values of its ordinary weights. Some heads
look back over a fixed distance, some look for tokens like their own, and the words for what the
visual tokens tell start in the directions in which the visual tokens tell it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from apollo_cli.model.tokenizer import TextTokenizer
from lab.clips import MOTIONS
from lab.connector import Readout
from lab.data import QUERIES, TARGETS
from lab.network import WORD_RMS
from lab.phrases import NAMES
from lab.toybox import COLOURS, DIRECTIONS, SHAPES, SPEEDS

# Tokens from the seconds of a label to its visual tokens, and from a clip to the one before.
_LABEL_DISTANCE, _CLIP_DISTANCE = 8, 16
_SHARP, _BROAD, _SLOW = slice(0, 8), slice(1, 5), slice(8, 16)


def seed_distance(llm: Any, layer: int, head: int, distance: int, *, sharp: bool) -> None:
    """Let one head look back over a distance, through its biases alone.

    A bias on queries and keys, turned by the rotary positions, scores a pair of tokens by how far
    they are apart.
    """
    attention = llm.model.layers[layer].self_attn
    width = attention.head_dim
    half = width // 2
    rate = llm.config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    chosen = _SHARP if sharp else _BROAD
    peak = 40.0 if sharp else 12.0
    size = torch.zeros(half)
    size[chosen] = math.sqrt(peak / (chosen.stop - chosen.start)) * width**0.25
    start = head * width
    with torch.no_grad():
        attention.k_proj.bias[start : start + half] = size
        attention.k_proj.bias[start + half : start + width] = 0
        attention.q_proj.bias[start : start + half] = size * torch.cos(distance * rate)
        attention.q_proj.bias[start + half : start + width] = -size * torch.sin(distance * rate)


def seed_likeness(llm: Any, layer: int, head: int, peak: float = 10.0) -> None:
    """Let one head look for tokens like its own and take over a part of what they hold.

    Only channels that the rotary positions hardly turn are used, so distance does not matter.
    """
    attention = llm.model.layers[layer].self_attn
    width, hidden = attention.head_dim, llm.config.hidden_size
    start = head * width
    slow = [*range(_SLOW.start, _SLOW.stop), *(i + width // 2 for i in range(*_SLOW.indices(16)))]
    rows = torch.linalg.qr(torch.randn(hidden, hidden)).Q
    with torch.no_grad():
        like = torch.zeros(width, hidden)
        like[slow] = rows[: len(slow)] * (peak * math.sqrt(width) / len(slow)) ** 0.5
        attention.q_proj.weight[start : start + width] += like
        attention.k_proj.weight[start : start + width] += like
        taken = rows[len(slow) : len(slow) + width]
        attention.v_proj.weight[start : start + width] = taken
        attention.o_proj.weight[:, start : start + width] = taken.T * WORD_RMS


def seed_language_model(llm: Any) -> None:
    """Give the first layers their habits: near tokens, labels, previous clips, likeness."""
    for head, distance in enumerate((1, 2, 3)):
        seed_distance(llm, 0, head, distance, sharp=True)
    seed_distance(llm, 0, 3, _LABEL_DISTANCE, sharp=False)
    seed_distance(llm, 1, 0, 1, sharp=True)
    seed_distance(llm, 1, 1, _CLIP_DISTANCE, sharp=True)
    seed_likeness(llm, 1, 2)
    seed_likeness(llm, 1, 3)
    for head, distance in enumerate((1, 2)):
        seed_distance(llm, 2, head, distance, sharp=True)


def align_words(llm: Any, readout: Readout, tokenizer: TextTokenizer) -> None:
    """Start the words of the drawn world where the readout found their meaning."""
    embedding = llm.get_input_embeddings().weight
    for word, direction in word_directions(readout).items():
        (index,) = tokenizer.encode(word)
        unit = direction / direction.norm()
        with torch.no_grad():
            embedding[index] = unit * WORD_RMS * math.sqrt(len(unit))


@torch.no_grad()
def word_directions(readout: Readout) -> dict[str, torch.Tensor]:
    """For each word the direction (H,) of visual tokens that mean it."""
    heads = dict(readout.heads.named_parameters())
    rows = {name: _centred(heads[f"{name}.weight"][1:]) for name in TARGETS}
    keys = readout.query @ readout.key.weight
    shape_keys, colour_keys = _centred(keys[: len(SHAPES)]), _centred(keys[len(SHAPES) : -1])
    words: dict[str, torch.Tensor] = {}
    for i, shape in enumerate(SHAPES):
        for name in NAMES[shape]:
            words[f" {name}"] = _unit(rows["shape"][i]) + _unit(shape_keys[i])
    for i, colour in enumerate(COLOURS):
        words[f" {colour}"] = _unit(rows["colour"][i]) + _unit(colour_keys[i])
    motions = dict(zip(MOTIONS[1:], rows["motion"], strict=True))
    for word in (*DIRECTIONS, *SPEEDS):
        words[f" {word}"] = torch.stack([v for k, v in motions.items() if word in k.split()]).sum(0)
    words[" still"] = motions["still"]
    words |= {str(value): rows["digit"][value] for value in range(10)}
    words[" digit"] = words[" number"] = keys[QUERIES.index("digit")] - keys[:-1].mean(0)
    return words


def _unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()


def _centred(rows: torch.Tensor) -> torch.Tensor:
    return rows - rows.mean(0)
