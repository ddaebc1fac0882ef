"""Stages 0 and 1 of apollo-nano: encoders learn what patches show, the connector what clips show.

Stage 0. The released encoders come pretrained on images and videos; labels for every patch stand
in for that. Stage 1. A readout by cross-attention ("what about the star?", "what about red?") asks
for every fact in the eight visual tokens. Through the language model alone this takes far longer:
it settles on "a colour that is there" before it learns which thing has it. The heads of both
stages are thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.encoders import normalise
from lab.network import FRAMES, IMAGE_NAME, PIXELS, TEXT_WIDTH, VIDEO_NAME, VISION_WIDTH, WORD_RMS
from lab.optimizer import Optimizer
from lab.videos import (
    CLASSES,
    MOTIONS,
    QUERIES,
    TARGETS,
    ClipBatch,
    Videos,
    clip_targets,
    stream_clips,
)

BACKGROUND_WEIGHT = 0.08
IMAGE_FRAMES = 2
ABSENT_WEIGHT = 0.2
READOUT_WIDTH = 64


class PatchHeads(nn.Module):
    """Linear readouts of every label from the features of one encoder."""

    def __init__(self, frames: int, motion: bool) -> None:
        super().__init__()
        self.frames = frames
        sizes = {name: frames * count for name, count in CLASSES.items()}
        if motion:
            sizes["motion"] = len(MOTIONS)
        self.heads = nn.ModuleDict({k: nn.Linear(VISION_WIDTH, n) for k, n in sizes.items()})

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """Map (B, P, D) to logits (B, frames, P, classes), for motion (B, P, classes)."""
        logits = {name: head(features) for name, head in self.heads.items()}
        return {
            name: value
            if name == "motion"
            else value.unflatten(-1, (self.frames, -1)).transpose(1, 2)
            for name, value in logits.items()
        }


def class_losses(
    logits: dict[str, torch.Tensor], labels: dict[str, torch.Tensor], absent: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Sum of the losses, and the accuracy where something is there.

    Args:
        absent: weight of class 0, which stands for nothing.
    """
    total, accuracy = torch.zeros(()), {}
    for name, value in logits.items():
        target = labels[name].long()
        weight = torch.ones(value.shape[-1])
        weight[0] = absent
        total = total + F.cross_entropy(value.flatten(0, -2), target.flatten(), weight)
        there = target > 0
        accuracy[name] = (value.argmax(-1)[there] == target[there]).float().mean().item()
    return total, accuracy


def train_encoders(
    model: ApolloModel, seed: int, steps: int, batch: int, log: Callable[[str], None]
) -> None:
    """Train both encoders on freshly drawn clips, in place."""
    video, image = model.encoders
    heads = nn.ModuleList([PatchHeads(FRAMES, motion=True), PatchHeads(1, motion=False)])
    optimizer = Optimizer({video: 1.0, image: 1.0, heads: 1.0}, steps, muon_lr=0.02, adam_lr=2e-3)
    started, shown = time.monotonic(), {}
    clips: Iterable[ClipBatch] = stream_clips(seed, steps, batch, PIXELS)
    for step, clip in enumerate(clips):
        labels = {name: torch.from_numpy(value) for name, value in clip.labels.items()}
        pixels = {name: torch.from_numpy(value) for name, value in clip.pixels.items()}
        loss, right = _video_loss(video, heads[0], pixels[VIDEO_NAME], labels)
        picked = np.random.default_rng(seed + step).permutation(FRAMES)[:IMAGE_FRAMES]
        image_loss, image_right = _image_loss(image, heads[1], pixels[IMAGE_NAME], labels, picked)
        optimizer.step(loss + image_loss)
        for name, value in right.items():
            shown[f"video {name}"] = value
        for name, value in image_right.items():
            shown[f"image {name}"] = value
        if step % 25 == 24:
            told = ", ".join(f"{name} {value:.2f}" for name, value in shown.items())
            seconds = time.monotonic() - started
            log(f"encoders {step + 1}/{steps} {seconds:.0f}s loss {loss + image_loss:.3f}: {told}")


def _video_loss(
    video: nn.Module, heads: nn.Module, pixels: torch.Tensor, labels: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    ready = normalise(pixels, PIXELS[0], torch.float32)
    return class_losses(heads(video(ready).flatten(1, 3)), labels, BACKGROUND_WEIGHT)


def _image_loss(
    image: nn.Module,
    heads: nn.Module,
    pixels: torch.Tensor,
    labels: dict[str, torch.Tensor],
    picked: np.ndarray,
) -> tuple[torch.Tensor, dict[str, float]]:
    frames = torch.from_numpy(picked)
    ready = normalise(pixels[:, frames], PIXELS[1], torch.float32)
    features = image(ready).flatten(2, 3).flatten(0, 1)
    chosen = {name: labels[name][:, frames].flatten(0, 1).unsqueeze(1) for name in CLASSES}
    return class_losses(heads(features), chosen, BACKGROUND_WEIGHT)


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
    optimizer = Optimizer({model.connector: 1.0, readout: 1.0}, steps, muon_lr=0.02, adam_lr=2e-3)
    for step in range(steps):
        picked = torch.from_numpy(rng.choice(len(busy), batch, p=busy / busy.sum()))
        visual = model.connector(videos.features[picked].float())
        wanted = {name: value[picked] for name, value in targets.items()}
        loss, right = class_losses(readout(visual), wanted, ABSENT_WEIGHT)
        optimizer.step(loss)
        if step % 25 == 24:
            told = ", ".join(f"{name} {value:.2f}" for name, value in right.items())
            log(f"connector {step + 1}/{steps} loss {loss.item():.3f}: {told}")
    return readout
