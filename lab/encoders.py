"""Stage 0 of apollo-nano: both encoders learn what every patch shows.

The released encoders come pretrained on images and videos; labels for every patch stand in for
that here. The heads are thrown away.
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
from lab.clips import CLASSES, MOTIONS, ClipBatch, stream_clips
from lab.network import FRAMES, IMAGE_NAME, PIXELS, VIDEO_NAME, VISION_WIDTH
from lab.optim import Optimiser

BACKGROUND_WEIGHT = 0.08
IMAGE_FRAMES = 2


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


def patch_losses(
    logits: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Sum of the weighted losses, and the accuracy on patches that are not background."""
    total = torch.zeros(())
    accuracy = {}
    for name, value in logits.items():
        target = labels[name].long()
        weight = torch.ones(value.shape[-1])
        weight[0] = BACKGROUND_WEIGHT
        total = total + F.cross_entropy(value.flatten(0, -2), target.flatten(), weight)
        owned = target > 0
        accuracy[name] = (value.argmax(-1)[owned] == target[owned]).float().mean().item()
    return total, accuracy


def train_encoders(
    model: ApolloModel, seed: int, steps: int, batch: int, log: Callable[[str], None]
) -> None:
    """Train both encoders on freshly drawn clips, in place."""
    video, image = model.encoders
    heads = nn.ModuleList([PatchHeads(FRAMES, motion=True), PatchHeads(1, motion=False)])
    optimiser = Optimiser({video: 1.0, image: 1.0, heads: 1.0}, steps, muon_lr=0.02, adam_lr=2e-3)
    started, shown = time.monotonic(), {}
    clips: Iterable[ClipBatch] = stream_clips(seed, steps, batch, PIXELS)
    for step, clip in enumerate(clips):
        labels = {name: torch.from_numpy(value) for name, value in clip.labels.items()}
        pixels = {name: torch.from_numpy(value) for name, value in clip.pixels.items()}
        loss, right = _video_loss(video, heads[0], pixels[VIDEO_NAME], labels)
        picked = np.random.default_rng(seed + step).permutation(FRAMES)[:IMAGE_FRAMES]
        image_loss, image_right = _image_loss(image, heads[1], pixels[IMAGE_NAME], labels, picked)
        optimiser.step(loss + image_loss)
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
    return patch_losses(heads(video(ready).flatten(1, 3)), labels)


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
    return patch_losses(heads(features), chosen)
