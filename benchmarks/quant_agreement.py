"""How far a quantised model is from the same one in full: tokens and logits on a small probe.

    python benchmarks/quant_agreement.py [MODEL]

The probe is a few questions of text, and of a clip that is drawn by arithmetic. Both models score
the answers of the full one, so that one token that differs does not put the rest out of step.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache

from apollo_cli.config import GenerationOptions
from apollo_cli.errors import WeightsError
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.generate import generate, prefill
from apollo_cli.model.prompt import PromptBuilder, VisualPart
from apollo_cli.model.tokenizer import load_tokenizer
from apollo_cli.video.transforms import resize_square
from apollo_cli.weights.checkpoint import QuantKind, read_checkpoint, stored_kind
from apollo_cli.weights.load import load_model
from apollo_cli.weights.quantize import bitsandbytes, report_of
from apollo_cli.weights.registry import resolve
from apollo_cli.weights.store import require_local

ANSWER_TOKENS = 24
TEXTS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "How does rain form? Answer in one sentence.",
)
ABOUT_THE_CLIP = (
    "What moves in this video?",
    "Which colour is the moving shape?",
    "Where does it go?",
)


@dataclass(frozen=True)
class Agreement:
    """Result of a comparison.

    Attributes:
        kind: ``4bit`` or ``8bit``. dtype: of the full model.
        tokens: tokens of answers that were compared.
        same: share of them that both models would write.
        distance: length of the difference of logits over the length of the logits, on average.
        divergence: Kullback-Leibler divergence from the full model, nats a token, on average.
        layers: quantised layers. whole: linear layers whose shape cannot be quantised.
    """

    kind: QuantKind
    dtype: str
    tokens: int
    same: float
    distance: float
    divergence: float
    layers: int
    whole: tuple[str, ...]


@dataclass(frozen=True)
class _Probe:
    """A prompt with the answer of the full model, and its logits (tokens, vocabulary)."""

    ids: list[int]
    visual: torch.Tensor | None
    answer: list[int]
    logits: torch.Tensor


def measure_agreement(
    folder: Path | str,
    kind: QuantKind,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Agreement:
    """Compare a checkpoint with itself in fewer bits; one after the other is in memory.

    Args:
        folder: a checkpoint that is not quantised.
        kind: ``4bit`` or ``8bit``.
        device: for both. dtype: of the full model, and of what is not quantised.

    Raises:
        WeightsError: the checkpoint is damaged, or stored quantised.
        DeviceError: bitsandbytes is missing.
    """
    if stored_kind(read_checkpoint(Path(folder))) is not None:
        raise WeightsError(
            f"{folder} is stored quantised, so there is nothing to compare it with",
            next_step="verify the checkpoint that it was made from",
        )
    bitsandbytes(device)
    model, checkpoint = load_model(folder, device=device, dtype=dtype)
    probes = _probe(model, checkpoint.tokenizer)
    del model
    gc.collect()
    model, _ = load_model(folder, device=device, dtype=dtype, quant=kind)
    report = report_of(model.llm)
    full = torch.cat([probe.logits for probe in probes])
    fewer = torch.cat([_forced(model, p.ids, p.visual, p.answer) for p in probes])
    logs = full.log_softmax(-1)
    divergence = (logs.exp() * (logs - fewer.log_softmax(-1))).sum(-1)
    return Agreement(
        kind=kind,
        dtype=str(dtype).removeprefix("torch."),
        tokens=len(full),
        same=float((full.argmax(-1) == fewer.argmax(-1)).float().mean()),
        distance=float(((full - fewer).norm(dim=-1) / full.norm(dim=-1)).mean()),
        divergence=float(divergence.mean()),
        layers=len(report.layers) if report else 0,
        whole=report.whole if report else (),
    )


@torch.inference_mode()
def _probe(model: ApolloModel, tokenizer_folder: Path) -> list[_Probe]:
    config = model.config
    prompts = PromptBuilder(
        load_tokenizer(tokenizer_folder),
        config.clip_seconds,
        config.visual_tokens_per_clip,
        config.template,
        labelled=config.connector.integration in ("timestamps", "both"),
    )
    seconds = float(config.clip_seconds)
    part = VisualPart(((0.0, round(seconds * 0.75, 1)),), seconds)
    visual = model.encode_clips(_drawn_clip(model)).flatten(0, 1)
    asked: list[tuple[list[int], torch.Tensor | None]] = [
        (prompts.suffix_ids(question, visual=False), None) for question in TEXTS
    ]
    before = prompts.prefix_ids([part])
    asked += [(before + prompts.suffix_ids(question), visual) for question in ABOUT_THE_CLIP]
    probes = []
    for ids, tokens in asked:
        cache = DynamicCache(config=model.llm.config)
        logits = prefill(model, model.embed(ids, tokens), cache)
        options = GenerationOptions(max_new_tokens=ANSWER_TOKENS, repetition_penalty=1.0)
        # Answers go on past the end token: what is compared are the numbers, not the words.
        answer = list(generate(model, logits, cache, options, ()))
        probes.append(_Probe(ids, tokens, answer, _forced(model, ids, tokens, answer)))
    return probes


@torch.inference_mode()
def _forced(
    model: ApolloModel, ids: list[int], visual: torch.Tensor | None, answer: list[int]
) -> torch.Tensor:
    """Logits (tokens, vocabulary) with which a model would write each token of an answer."""
    embeddings = model.embed(ids + answer[:-1], visual)
    logits = model.llm(inputs_embeds=embeddings, logits_to_keep=len(answer)).logits
    return logits[0].float().cpu()


def _drawn_clip(model: ApolloModel) -> dict[str, torch.Tensor]:
    """A red disc that crosses a ramp of grey from left to right: uint8 (1, T, 3, S, S) each."""
    config, height, width = model.config, 96, 128
    rows, columns = np.mgrid[:height, :width]
    pictures = []
    for number in range(config.frames_per_clip):
        picture = np.repeat((rows + columns).astype(np.uint8)[..., None], 3, axis=2)
        centre = width * (number + 1) / (config.frames_per_clip + 1)
        disc = (rows - height / 2) ** 2 + (columns - centre) ** 2 < (height / 6) ** 2
        picture[disc] = (220, 30, 30)
        pictures.append(picture)
    return {
        encoder.name: torch.from_numpy(
            np.stack([resize_square(picture, encoder.pixels) for picture in pictures])[None]
        )
        for encoder in config.encoders
    }


def main() -> None:
    """Compare a model in 8 and in 4 bits, and print a line for each."""
    parser = argparse.ArgumentParser(description="Compare a model with itself in fewer bits.")
    parser.add_argument("model", nargs="?", default="apollo-nano", help="a name or folder")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    folder = require_local(resolve(options.model))
    kinds: tuple[QuantKind, ...] = ("8bit", "4bit")
    for kind in kinds:
        found = measure_agreement(folder, kind, device=options.device)
        sys.stdout.write(
            f"{kind}: {found.same:.1%} of {found.tokens} tokens are those of {found.dtype}; logits "
            f"differ by {found.distance:.3f} of their length, {found.divergence:.4f} nats a token; "
            f"{found.layers} layers, whole: {', '.join(found.whole) or 'none'}\n"
        )


if __name__ == "__main__":
    main()
