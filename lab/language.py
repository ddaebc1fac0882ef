"""Stages 2 and 3 of apollo-nano: connector and language model learn to answer.

The loss looks at answers only. Questions about one video share its prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn

from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.prompt import PromptBuilder
from lab.data import (
    QuestionBatch,
    Videos,
    embed_batch,
    lay_out,
    plan_batches,
)
from lab.network import TEXT_WIDTH, TOKENS_PER_CLIP
from lab.optim import Optimiser


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
    keep: Callable[[Optimiser], None] | None = None,
    every: int = 25,
) -> None:
    """Train connector and language model in place.

    Args:
        resume: state of the optimiser at a stop.
        keep: may save such a state; called after each line of ``log``.
        every: steps between two lines of ``log``.
    """
    trained: dict[nn.Module, float] = {model.llm: 1.0}
    if stage.connector_lr:
        trained[model.connector] = stage.connector_lr
    elif not stage.blind:
        videos = connect_all(model, videos)
    model.connector.requires_grad_(bool(stage.connector_lr))
    optimiser = Optimiser(trained, stage.steps, stage.muon_lr, stage.adam_lr)
    if resume is not None:
        optimiser.restore(resume)
    plan = plan_batches(
        videos,
        token_budget=stage.token_budget,
        questions=stage.questions,
        tokens_per_clip=builder.tokens_per_clip,
        seed=seed,
    )
    started, running = time.monotonic(), 0.0
    for step, (picked, asked) in enumerate(islice(plan, stage.steps)):
        if step < optimiser.done:
            continue
        batch = lay_out(
            videos, picked, stage.weights, builder, questions=stage.questions, seed=asked
        )
        logits, targets = answer_logits(model, videos, batch, stage.blind)
        loss = F.cross_entropy(logits, targets)
        optimiser.step(loss)
        running = 0.95 * running + 0.05 * loss.item() if running else loss.item()
        if step % every == every - 1:
            seconds = time.monotonic() - started
            log(f"{stage.name} {step + 1}/{stage.steps} {seconds:.0f}s loss {running:.4f}")
            if keep is not None:
                keep(optimiser)
