"""The two functions inside of apollo that recorders call: times of clips, and ids of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from apollo_cli.config import SamplingOptions
from apollo_cli.errors import ApolloError
from apollo_cli.model.prompt import TEMPLATES, PromptBuilder, Turn, VisualPart
from apollo_cli.model.tokenizer import load_tokenizer
from apollo_cli.video.sampler import plan_clips

TOKENIZER = Path(__file__).parents[1] / "golden" / "tiny-checkpoint" / "llm"


def clip_times(duration: float, options: dict[str, Any]) -> np.ndarray | str:
    """Times of the frames, (clips, frames a clip), seconds; or the kind of the refusal."""
    try:
        sampling = SamplingOptions(**options)
        plan = plan_clips(duration, clip_seconds=2, frames_per_clip=4, limit=40, options=sampling)
    except ApolloError as error:
        return type(error).__name__
    return plan.times


def prompt_ids() -> dict[str, list[int]]:
    """Ids of prompts about nothing, a video, an image with a video, and a talk."""
    spans = ((0.0, 1.5), (2.0, 3.5), (58.04, 61.0))
    video, image = VisualPart(spans, 3723.5), VisualPart(((0.0, 0.0),), 0.0, is_image=True)
    spoken = VisualPart(spans[:2], 9.0, clip_seconds=2.0, words=("hello there", ""))
    shown = {"nothing": [], "video": [video], "both": [image, video], "spoken": [spoken]}
    talk = [Turn("Who?", "a man")]
    tokenizer = load_tokenizer(TOKENIZER)
    found: dict[str, list[int]] = {}
    for template in TEMPLATES:
        for labelled in (True, False):
            builder = PromptBuilder(tokenizer, 2, 3, template, labelled)
            for name, parts in shown.items():
                key = f"{template}, {'labelled' if labelled else 'bare'}, {name}"
                found[key] = builder.ids(parts, "What then?", talk if name == "video" else ())
    return found
