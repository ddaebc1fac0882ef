"""The card of the embedded toy: which kinds of question it answers, as measured, and a warning.

The card is written by ``python -m apollo_cli.finetune.evaluate_nano --card`` beside the weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from apollo_cli.weights.files import read_json

CARD_FILE = "nano_card.json"
TOY_NOTICE = "this answer is by apollo-nano, a toy trained on drawn shapes; it knows nothing else"
# The first that fits decides: a choice may ask about a colour, and is a choice all the same.
KIND_WORDS = {
    "choice": r"\(b\)|\bb[.)]|\bA \w+ B \w+",
    "digit": r"\bdigit|\bnumber",
    "when": r"\bwhen\b|\bat what time|\bwhat second",
    "at": r"\bat (second )?\d|\bafter \d+ s|\bat time",
    "speed": r"\bfast\b|\bspeed|\bslow",
    "direction": r"\bwhich way|\bdirection|\bwhere (is|does)\b|\bhow does\b",
    "yesno": r"^(is|are|does|do|can|was|were|has|did)\b",
    "colour": r"\bcolou?r",
    "shape": r"\bshape",
}


@dataclass(frozen=True)
class KindScore:
    """One kind of question on held-out videos.

    Attributes:
        score, baseline, gate: in percent; the baseline is the same without the video.
        supported: whether the gate was met.
    """

    score: float
    baseline: float
    gate: float
    supported: bool


def read_card(folder: Path) -> dict[str, KindScore]:
    """The scores by kind; empty when there is no card.

    Raises:
        WeightsError: the card is damaged.
    """
    if not (folder / CARD_FILE).is_file():
        return {}
    kinds = read_json(folder / CARD_FILE).get("kinds", {})
    return {
        name: KindScore(row["score"], row["baseline"], row["gate"], row["supported"])
        for name, row in kinds.items()
    }


def question_kind(question: str) -> str | None:
    """Which kind of question this is, as far as its words tell."""
    for kind, words in KIND_WORDS.items():
        if re.search(words, question, re.IGNORECASE):
            return kind
    return None


def toy_remarks(card: dict[str, KindScore], question: str) -> list[str]:
    """What a user of the toy should know about its answer to a question."""
    kind = question_kind(question)
    if kind is None:
        return [TOY_NOTICE, "this kind of question was not part of its training"]
    score = card.get(kind)
    if score is None or score.supported:
        return [TOY_NOTICE]
    return [
        TOY_NOTICE,
        f"questions of the kind {kind!r} are unsupported: {score.score:.0f} % of them were "
        f"right on held-out videos",
    ]
