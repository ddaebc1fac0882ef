"""Train apollo-nano from a fixed seed.

    python -m lab.train --work DIR --out DIR

Every stage leaves its result in the work folder; run again after a stop, it goes on from there.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.prompt import PromptBuilder
from apollo_cli.model.tokenizer import TextTokenizer
from lab.language import LanguageStage, align_words, seed_language_model, train_language
from lab.network import CLIP_SECONDS, TOKENS_PER_CLIP, build_nano, save_nano
from lab.optimizer import Optimizer
from lab.questions import EXTRA_KINDS, KINDS
from lab.tokenizer import build_tokenizer
from lab.toybox import sample_world
from lab.videos import Videos, clip_times, encode_worlds
from lab.vision import train_connector, train_encoders

SEED, KEEP_EVERY = 0, 100
ENCODER_STEPS, ENCODER_BATCH = 1800, 32
CONNECTOR_STEPS, CONNECTOR_BATCH = 700, 48
SHORT_VIDEOS, LONG_VIDEOS = 4000, 3500
# Seeds of worlds, far apart: nothing trained on is ever tested on.
SHORT_SEED, LONG_SEED, HELD_OUT_SEED = 1_000_000, 2_000_000, 9_000_000


def _shares(*percent: int) -> dict[str, float]:
    """The share of each kind of question, in the order of ``KINDS`` and ``EXTRA_KINDS``."""
    kinds = (*KINDS, *EXTRA_KINDS)
    return {kind: value / 100 for kind, value in zip(kinds, percent, strict=False)}


LOOKUP_WEIGHTS = _shares(25, 20, 20, 20, 15)
ALL_WEIGHTS = _shares(6, 8, 8, 7, 6, 17, 14, 16, 15, 3)
CHOICES_WEIGHTS = _shares(4, 5, 6, 5, 3, 27, 15, 11, 19, 5)
TIMES_WEIGHTS = _shares(4, 5, 6, 5, 3, 36, 24, 8, 6, 3)
STAGES = (
    LanguageStage("lookups", 500, LOOKUP_WEIGHTS, 0.015, 2e-3, token_budget=1500),
    LanguageStage("short", 700, ALL_WEIGHTS, 0.012, 1.5e-3, token_budget=1800),
    LanguageStage("long", 2600, ALL_WEIGHTS, 0.012, 1.5e-3, token_budget=2500),
    LanguageStage("choices", 1150, CHOICES_WEIGHTS, 0.008, 1e-3, token_budget=2500),
    LanguageStage("times", 2400, TIMES_WEIGHTS, 0.012, 1.5e-3, token_budget=2500),
)
ON_SHORT_VIDEOS = ("lookups", "short")
BLIND = LanguageStage("blind", 450, ALL_WEIGHTS, 0.012, 1.5e-3, token_budget=2500, blind=True)


class Workshop:
    """The work folder of one training: what is done is read back instead of done again."""

    def __init__(self, folder: Path, share: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.share = folder, share
        self.model = build_nano(SEED)
        seed_language_model(self.model.llm)
        self.builder = PromptBuilder(
            TextTokenizer(build_tokenizer()), CLIP_SECONDS, TOKENS_PER_CLIP
        )

    def log(self, text: str) -> None:
        """Tell progress on stdout."""
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stdout.flush()

    def count(self, number: int) -> int:
        """Scale a number of steps or videos, for trials."""
        return max(2, round(number * self.share))

    def path(self, name: str) -> Path:
        """Where a stage leaves its result."""
        return self.folder / f"{name}.safetensors"

    def restore(self, name: str) -> bool:
        """Take a finished stage's weights, if it is finished."""
        if not self.path(name).is_file():
            return False
        load_weights(self.model, self.path(name))
        return True

    def keep(self, name: str) -> None:
        """Leave a finished stage's weights."""
        save_weights(self.model, self.path(name))

    def videos(self, name: str, seed: int, count: int, short: bool) -> Videos:
        """Draw and encode worlds, or read their features back."""
        rng = np.random.default_rng(seed)
        lengths = rng.choice([3, 4, 4, 5, 6, 6], size=count)
        jobs = [(seed + i, float(lengths[i]) if short else None) for i in range(count)]
        if self.path(name).is_file():
            worlds = [sample_world(*job) for job in jobs]
            times = [clip_times(world) for world in worlds]
            features = load_file(self.path(name))["features"]
            first = np.cumsum([0, *(len(t) for t in times)])
            return Videos(worlds, times, features, first)
        videos = encode_worlds(self.model, jobs)
        save_file({"features": videos.features}, self.path(name))
        self.log(f"{name}: {count} videos, {len(videos.features)} clips")
        return videos


def save_weights(
    model: ApolloModel, path: Path, extra: dict[str, torch.Tensor] | None = None
) -> None:
    """Write all parameters, and perhaps an optimizer's state, as float32 safetensors."""
    tensors = {f"model.{k}": v.detach().contiguous() for k, v in model.named_parameters()}
    tensors |= {f"optimiser.{k}": v.contiguous() for k, v in (extra or {}).items()}
    partial = path.with_suffix(".writing")
    save_file(tensors, partial)
    partial.replace(path)


def load_weights(model: ApolloModel, path: Path) -> dict[str, torch.Tensor]:
    """Read parameters back in place; return the optimizer's state, if there is one."""
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    start = "optimiser."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def run_language(shop: Workshop, stage: LanguageStage, videos: Videos, seed: int) -> None:
    """Run one language stage, from the middle where it was stopped there."""
    partial = shop.path(f"{stage.name}-partial")
    state = load_weights(shop.model, partial) if partial.is_file() else None

    def keep(optimizer: Optimizer) -> None:
        if optimizer.done % KEEP_EVERY == 0:
            save_weights(shop.model, partial, optimizer.state())

    train_language(
        shop.model, videos, shop.builder, stage, seed=seed, log=shop.log, resume=state, keep=keep
    )
    shop.keep(stage.name)
    partial.unlink(missing_ok=True)


def join_videos(first: Videos, second: Videos) -> Videos:
    """Two sets of videos as one."""
    return Videos(
        first.worlds + second.worlds,
        first.times + second.times,
        torch.cat((first.features, second.features)),
        np.concatenate((first.first, second.first[1:] + first.first[-1])),
    )


def train(shop: Workshop, out: Path) -> None:
    """Run all stages and write the checkpoint."""
    model, log = shop.model, shop.log
    if not shop.restore("encoders"):
        steps = shop.count(ENCODER_STEPS)
        train_encoders(model, SEED + 1, steps, ENCODER_BATCH, log)
        shop.keep("encoders")
    model.encoders.requires_grad_(False).eval()
    short = shop.videos("features-short", SHORT_SEED, shop.count(SHORT_VIDEOS), short=True)
    if not shop.restore("connector"):
        steps = shop.count(CONNECTOR_STEPS)
        readout = train_connector(
            model, short, seed=SEED, steps=steps, batch=CONNECTOR_BATCH, log=log
        )
        align_words(model.llm, readout, shop.builder.tokenizer)
        shop.keep("connector")
    whole = shop.videos("features-long", LONG_SEED, shop.count(LONG_VIDEOS), short=False)
    mixed = join_videos(short, whole)
    for number, stage in enumerate((*STAGES, BLIND)):
        if not shop.restore(stage.name):
            videos = short if stage.name in ON_SHORT_VIDEOS else mixed
            scaled = replace(stage, steps=shop.count(stage.steps))
            run_language(shop, scaled, videos, SEED + number)
        if stage is STAGES[-1]:
            save_nano(model, out)
            log(f"written: {out}")
    save_nano(model, shop.folder / "blind")
    log(f"written: {shop.folder / 'blind'}, which never saw a pixel")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train apollo-nano from its fixed seed.")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is in between")
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint is written")
    parser.add_argument("--share", type=float, default=1.0, help="share of all steps, for trials")
    parser.add_argument("--threads", type=int, default=1, help="threads for torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(Workshop(options.work, options.share), options.out)


if __name__ == "__main__":
    main()
