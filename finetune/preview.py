"""What is learned from a sample, as text: the prompt that the network sees, and what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from apollo_cli.finetune.data.sample import Sample
from apollo_cli.finetune.data.survey import Ruler
from apollo_cli.finetune.training.examples import IGNORED, plan_sample, spell_turns
from apollo_cli.model.prompt import VISUAL_ID
from apollo_cli.video.info import VideoInfo

Role = Literal["given", "trained", "visual"]


@dataclass(frozen=True)
class Piece:
    """A stretch of a prompt. role: whether it is text that is given, trained on, or seen."""

    text: str
    role: Role


@dataclass(frozen=True)
class Preview:
    """One sample as the network takes it."""

    name: str
    pieces: tuple[Piece, ...]


def build_preview(sample: Sample, infos: Sequence[VideoInfo], ruler: Ruler) -> Preview:
    """Spell out a sample from its real ids and labels; nothing is decoded.

    Args:
        infos: of its videos and images.

    Raises:
        FitError: it is too long.
    """
    planner = ruler.planner
    planned = plan_sample(planner, sample, infos, ruler.sampling, ruler.max_tokens)
    parts = [planner.part(*told) for told in zip(infos, planned.plans, strict=True)]
    prefix = planner.prompts.prefix_ids(parts) if parts else []
    ids, labels = spell_turns(planner.prompts, sample.turns, bool(parts))
    marked = zip(prefix + ids, [IGNORED] * len(prefix) + labels, strict=True)

    def role(token: tuple[int, int]) -> Role:
        if token[0] == VISUAL_ID:
            return "visual"
        return "given" if token[1] == IGNORED else "trained"

    pieces: list[Piece] = []
    for kind, group in groupby(marked, key=role):
        run = [token for token, _ in group]
        # Unlike for an answer, special tokens are what one wants to see here.
        spell = planner.prompts.tokenizer.backend.decode
        is_visual = kind == "visual"
        text = f"<{len(run)} visual tokens>" if is_visual else spell(run, skip_special_tokens=False)
        pieces.append(Piece(text, kind))
    return Preview(sample.name, tuple(pieces))
