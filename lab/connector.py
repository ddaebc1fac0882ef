"""Stage 1 of apollo-nano: the connector learns to carry the facts of a clip.

A readout by cross-attention ("what about the star?", "what about red?") asks for every fact in
the eight visual tokens, and is thrown away. Through the language model alone this takes far
longer: it settles on "a colour that is there" before it learns which thing has it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from apollo_cli.model.apollo import ApolloModel
from lab.data import QUERIES, TARGETS, Videos, clip_targets
from lab.network import TEXT_WIDTH, WORD_RMS
from lab.optim import Optimiser

ABSENT_WEIGHT = 0.2
READOUT_WIDTH = 64


class Readout(nn.Module):
    """One learned query for each shape, each colour and the digit, one attention head, no more.

    It is kept this weak on purpose. What it can read lies in one visual token, key and values side
    by side and linear, so the language model finds it with one head as well; a stronger readout
    lets the connector scatter the facts, and the language model then learns each pair of key and
    value anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(len(QUERIES), READOUT_WIDTH))
        self.key = nn.Linear(TEXT_WIDTH, READOUT_WIDTH, bias=False)
        # What a query finds when nothing answers to it.
        self.nothing_query = nn.Parameter(torch.zeros(len(QUERIES), 1))
        self.nothing = nn.Parameter(torch.zeros(1, 1, TEXT_WIDTH))
        self.heads = nn.ModuleDict({name: nn.Linear(TEXT_WIDTH, n) for name, n in TARGETS.items()})

    def forward(self, visual: torch.Tensor) -> dict[str, torch.Tensor]:
        """Map visual tokens (B, R, H) to logits (B, queries, classes) for each target."""
        visual = visual / WORD_RMS
        scores = self.query @ self.key(visual).transpose(1, 2) / READOUT_WIDTH**0.5
        absent = self.nothing_query.expand(len(visual), -1, -1)
        weights = torch.cat((scores, absent), dim=-1).softmax(-1)
        values = torch.cat((visual, self.nothing.expand(len(visual), -1, -1)), dim=1)
        found = weights @ values
        return {name: head(found) for name, head in self.heads.items()}


def readout_losses(
    logits: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Sum of the weighted losses, and the accuracy where something is there."""
    total, accuracy = torch.zeros(()), {}
    for name, value in logits.items():
        target = targets[name]
        weight = torch.ones(value.shape[-1])
        weight[0] = ABSENT_WEIGHT
        total = total + F.cross_entropy(value.flatten(0, 1), target.flatten(), weight)
        there = target > 0
        accuracy[name] = (value.argmax(-1)[there] == target[there]).float().mean().item()
    return total, accuracy


def all_targets(videos: Videos) -> dict[str, torch.Tensor]:
    """Targets (C, queries) of every clip."""
    rows = [
        clip_targets(world, times)
        for world, video in zip(videos.worlds, videos.times, strict=True)
        for times in video
    ]
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in TARGETS}


def train_connector(
    model: ApolloModel,
    videos: Videos,
    *,
    seed: int,
    steps: int,
    batch: int,
    log: Callable[[str], None],
) -> Readout:
    """Train the connector on frozen features, in place; return what it was trained against."""
    targets, rng = all_targets(videos), np.random.default_rng(seed)
    busy = (targets["shape"] > 0).any(1).numpy().astype(float) + 0.1
    torch.manual_seed(seed)
    readout = Readout()
    optimiser = Optimiser({model.connector: 1.0, readout: 1.0}, steps, muon_lr=0.02, adam_lr=2e-3)
    for step in range(steps):
        picked = torch.from_numpy(rng.choice(len(busy), batch, p=busy / busy.sum()))
        visual = model.connector(videos.features[picked].float())
        loss, right = readout_losses(
            readout(visual), {name: value[picked] for name, value in targets.items()}
        )
        optimiser.step(loss)
        if step % 25 == 24:
            told = ", ".join(f"{name} {value:.2f}" for name, value in right.items())
            log(f"connector {step + 1}/{steps} loss {loss.item():.3f}: {told}")
    return readout
