"""Stages 2 and 3 of apollo-nano: how the language model starts, and how it learns to answer.

Nothing is added to the architecture; the start gives first values to its ordinary weights, habits
that are found late from random weights. Some heads look back over a fixed distance, some look for
tokens like their own, and the words for what the visual tokens tell start in the directions in
which the visual tokens tell it. The loss looks at answers only; questions about one video share
its prefix.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.prompt import PromptBuilder
from apollo_cli.model.tokenizer import TextTokenizer
from lab.network import TEXT_WIDTH, TOKENS_PER_CLIP, WORD_RMS
from lab.optimizer import Optimizer
from lab.phrases import NAMES
from lab.toybox import COLOURS, DIRECTIONS, SHAPES, SPEEDS
from lab.videos import (
    MOTIONS,
    QUERIES,
    TARGETS,
    QuestionBatch,
    Videos,
    embed_batch,
    lay_out,
    plan_batches,
)
from lab.vision import Readout

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


@dataclass(frozen=True)
class LanguageStage:
    """One stage: how long, on what, how fast.

    Attributes:
        weights: share of each kind of question. questions: on each video.
        token_budget: tokens of a batch.
        connector_lr: share of the rates that the connector learns with; 0 freezes it.
        blind: visual tokens are replaced by zeros (for the text-only baseline).
    """

    name: str
    steps: int
    weights: dict[str, float]
    muon_lr: float
    adam_lr: float
    token_budget: int = 6000
    questions: int = 10
    connector_lr: float = 0.0
    blind: bool = False


@torch.no_grad()
def connect_all(model: ApolloModel, videos: Videos, clips: int = 64) -> Videos:
    """The same videos with the visual tokens of a connector that stays as it is."""
    pieces = [model.connector(part.float()) for part in videos.features.split(clips)]
    return replace(videos, visual=torch.cat(pieces))


def answer_logits(
    model: ApolloModel, videos: Videos, batch: QuestionBatch, blind: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (answer tokens, vocabulary) and their targets."""
    if blind:
        tokens = (len(batch.clips), TOKENS_PER_CLIP, TEXT_WIDTH)
        visual = torch.zeros(tokens)
    elif videos.visual is not None:
        visual = videos.visual[batch.clips]
    else:
        visual = model.connector(videos.features[batch.clips].float())
    hidden = model.llm.model(
        inputs_embeds=embed_batch(model, batch, visual),
        attention_mask=batch.mask,
        position_ids=batch.positions,
        use_cache=False,
    ).last_hidden_state
    wanted = batch.targets >= 0
    return model.llm.lm_head(hidden[wanted]), batch.targets[wanted]


def train_language(
    model: ApolloModel,
    videos: Videos,
    builder: PromptBuilder,
    stage: LanguageStage,
    *,
    seed: int,
    log: Callable[[str], None],
    resume: dict[str, torch.Tensor] | None = None,
    keep: Callable[[Optimizer], None] | None = None,
    every: int = 25,
) -> None:
    """Train connector and language model in place.

    Args:
        resume: state of the optimizer at a stop.
        keep: may save such a state; called after each line of ``log``.
        every: steps between two lines of ``log``.
    """
    trained: dict[nn.Module, float] = {model.llm: 1.0}
    if stage.connector_lr:
        trained[model.connector] = stage.connector_lr
    elif not stage.blind:
        videos = connect_all(model, videos)
    model.connector.requires_grad_(bool(stage.connector_lr))
    optimizer = Optimizer(trained, stage.steps, stage.muon_lr, stage.adam_lr)
    if resume is not None:
        optimizer.restore(resume)
    plan = plan_batches(
        videos,
        token_budget=stage.token_budget,
        questions=stage.questions,
        tokens_per_clip=builder.tokens_per_clip,
        seed=seed,
    )
    started, running = time.monotonic(), 0.0
    for step, (picked, asked) in enumerate(islice(plan, stage.steps)):
        if step < optimizer.done:
            continue
        batch = lay_out(
            videos, picked, stage.weights, builder, questions=stage.questions, seed=asked
        )
        logits, targets = answer_logits(model, videos, batch, stage.blind)
        loss = F.cross_entropy(logits, targets)
        optimizer.step(loss)
        running = 0.95 * running + 0.05 * loss.item() if running else loss.item()
        if step % every == every - 1:
            seconds = time.monotonic() - started
            log(f"{stage.name} {step + 1}/{stage.steps} {seconds:.0f}s loss {running:.4f}")
            if keep is not None:
                keep(optimizer)
