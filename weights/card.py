"""The card of the embedded toy: which kinds of question it answers, as measured, and a warning.

The card is written by ``python -m lab.evaluate --card`` beside the weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from apollo_cli.weights.files import read_json

CARD_FILE = "nano_card.json"
TOY_NOTICE = "this answer is by apollo-nano, a toy trained on drawn shapes; it knows nothing else"


@dataclass(frozen=True)
class KindScore:
    """One kind of question on held-out videos.

    Attributes:
        score, baseline, gate: in percent; the baseline is the same without the video.
        supported: whether the gate was met.
        pattern: regular expression of questions of this kind; None where words do not tell.
    """

    score: float
    baseline: float
    gate: float
    supported: bool
    pattern: str | None


def read_card(folder: Path) -> dict[str, KindScore]:
    """The scores by kind, in the order in which their patterns are tried; empty without a card.

    Raises:
        WeightsError: the card is damaged.
    """
    if not (folder / CARD_FILE).is_file():
        return {}
    card = read_json(folder / CARD_FILE)
    kinds = card["kinds"]
    return {
        name: KindScore(
            row["score"], row["baseline"], row["gate"], row["supported"], row.get("pattern")
        )
        for name in card["pattern_order"]
        for row in [kinds[name]]
    }


def question_kind(card: dict[str, KindScore], question: str) -> str | None:
    """Which kind of question this is, as far as its words tell; the first that fits decides."""
    for kind, score in card.items():
        if score.pattern and re.search(score.pattern, question.strip(), re.IGNORECASE):
            return kind
    return None


def toy_remarks(card: dict[str, KindScore], question: str) -> list[str]:
    """What a user of the toy should know about its answer to a question."""
    kind = question_kind(card, question)
    if kind is None:
        return [
            TOY_NOTICE,
            "this question has a kind, phrase or word that was not part of its training",
        ]
    score = card[kind]
    if score.supported:
        return [TOY_NOTICE]
    return [
        TOY_NOTICE,
        f"questions of the kind {kind!r} are unsupported: {score.score:.0f} % of them were "
        f"right on held-out videos",
    ]
