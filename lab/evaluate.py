"""The gate table of apollo-nano, on held-out mp4 files through the whole path of a user.

    python -m lab.evaluate [CHECKPOINT] [--blind CHECKPOINT] [--card]

Worlds that were never trained on are written as H.264 files, read back, sampled, encoded and asked
about; every answer is greedy text. A kind is supported when it passes its gate, and beats the
best that can be done without looking by twenty points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from apollo_cli.config import GenerationOptions
from apollo_cli.engine import Apollo, load
from apollo_cli.errors import ApolloError
from apollo_cli.video_memory import VideoMemory
from apollo_cli.weights.registry import resolve
from lab.phrases import KIND_PATTERNS
from lab.questions import EXTRA_KINDS, KINDS, Question, ask, is_right
from lab.toybox import sample_world, write_video

HELD_OUT_SEED = 9_500_000
GATES = {
    "colour": 95,
    "shape": 95,
    "direction": 85,
    "speed": 85,
    "digit": 85,
    "at": 75,
    "when": 75,
    "yesno": 85,
    "choice": 85,
    "describe": 75,
}
MARGIN_POINTS = 20
SCALES = (1, 2, 3)
LENGTHS = ((5, 12), (12, 30), (30, 61))


@dataclass(frozen=True)
class Asked:
    """One question about one held-out file, and the answers to it."""

    question: Question
    duration_seconds: float
    answer: str
    blind_answer: str


@dataclass(frozen=True)
class Score:
    """One line of the table; percentages of right answers.

    Attributes:
        baseline: the better of a constant answer and a model that sees no pixels.
        by_length: percentage for short, middle and long files (``LENGTHS``, in seconds).
    """

    kind: str
    questions: int
    score: float
    baseline: float
    gate: int
    by_length: tuple[float, ...]

    @property
    def supported(self) -> bool:
        """Whether the gate is passed."""
        return self.score >= self.gate and self.score >= self.baseline + MARGIN_POINTS


def held_out(
    count: int, folder: Path, per_kind: int, first_seed: int = HELD_OUT_SEED
) -> Iterator[tuple[Path, float, list[Question]]]:
    """Write held-out worlds as files, each with its questions."""
    for number in range(count):
        seed = first_seed + number
        world, rng = sample_world(seed), np.random.default_rng(seed)
        path = folder / f"{seed}.mp4"
        write_video(world, path, SCALES[number % len(SCALES)])
        kinds = (*KINDS, *EXTRA_KINDS)
        made = (ask(world, kind, rng) for kind in kinds for _ in range(per_kind))
        unique = {question.text: question for question in made if question is not None}
        yield path, world.duration_seconds, list(unique.values())
        path.unlink()


def without_pixels(memory: VideoMemory) -> VideoMemory:
    """The same memory with nothing in its visual tokens."""
    return replace(memory, tokens=torch.zeros_like(memory.tokens))


def collect(model: Apollo, blind: Apollo, videos: int, per_kind: int) -> list[Asked]:
    """Ask everything about every held-out file."""
    options = GenerationOptions(max_new_tokens=32)
    asked = []
    with tempfile.TemporaryDirectory() as folder:
        for path, seconds, questions in held_out(videos, Path(folder), per_kind):
            memory = model.watch(path)
            answers = [model.ask(memory, q.text, options).text for q in questions]
            unseen = without_pixels(memory)
            blindly = [blind.ask(unseen, q.text, options).text for q in questions]
            asked += [
                Asked(q, seconds, a, b) for q, a, b in zip(questions, answers, blindly, strict=True)
            ]
    return asked


def percentage(right: list[bool]) -> float:
    """Share of true values in percent; 0 for none."""
    return round(100 * sum(map(bool, right)) / len(right), 1) if right else 0.0


def best_constant(rows: list[Asked]) -> float:
    """The best that one fixed answer can reach."""
    common = [answer for answer, _ in Counter(r.question.answer for r in rows).most_common(8)]
    return max(percentage([is_right(r.question, answer) for r in rows]) for answer in common)


def score(asked: list[Asked]) -> list[Score]:
    """One line for each kind."""
    by_kind: dict[str, list[Asked]] = defaultdict(list)
    for row in asked:
        by_kind[row.question.kind].append(row)
    lines = []
    for kind in (*KINDS, *EXTRA_KINDS):
        rows = by_kind[kind]
        if not rows:
            continue
        blind = percentage([is_right(r.question, r.blind_answer) for r in rows])
        lengths = tuple(
            percentage(
                [is_right(r.question, r.answer) for r in rows if low <= r.duration_seconds < high]
            )
            for low, high in LENGTHS
        )
        right = percentage([is_right(r.question, r.answer) for r in rows])
        baseline = max(blind, best_constant(rows))
        lines.append(Score(kind, len(rows), right, baseline, GATES[kind], lengths))
    return lines


def table(lines: list[Score]) -> str:
    """The scores as a Markdown table."""
    spans = " | ".join(f"{low}-{high - 1 if high > 60 else high} s" for low, high in LENGTHS)
    rows = [
        f"| kind | questions | right % | without pixels % | gate | supported | {spans} |",
        "|---|---|---|---|---|---|" + "---|" * len(LENGTHS),
    ]
    for line in lines:
        lengths = " | ".join(f"{value:.0f}" for value in line.by_length)
        told = "yes" if line.supported else "**no**"
        rows.append(
            f"| {line.kind} | {line.questions} | {line.score:.1f} | {line.baseline:.1f} "
            f"| {line.gate} | {told} | {lengths} |"
        )
    return "\n".join(rows)


def write_card(lines: list[Score], folder: Path, videos: int) -> None:
    """Put the scores beside the weights, for programs, and into the card's table, for people."""
    kinds = {line.kind: {**asdict(line), "supported": line.supported} for line in lines}
    for kind, pattern in KIND_PATTERNS.items():
        if kind in kinds:
            kinds[kind]["pattern"] = pattern
    order = list(KIND_PATTERNS)
    card = {
        "held_out_videos": videos,
        "margin_points": MARGIN_POINTS,
        "pattern_order": order,
        "kinds": kinds,
    }
    (folder / "nano_card.json").write_text(json.dumps(card, indent=2) + "\n", "utf-8")
    readme = folder / "README.md"
    start, end = "<!-- table -->", "<!-- end of table -->"
    before, _, rest = readme.read_text("utf-8").partition(start)
    _, _, after = rest.partition(end)
    readme.write_text(f"{before}{start}\n{table(lines)}\n{end}{after}", "utf-8")


def main() -> None:
    """Read the command line, ask, and print the table."""
    parser = argparse.ArgumentParser(description="Print the gate table of apollo-nano.")
    parser.add_argument("checkpoint", nargs="?", default="apollo-nano", help="a name or folder")
    parser.add_argument("--blind", type=Path, help="checkpoint that was trained without pixels")
    parser.add_argument("--videos", type=int, default=150)
    parser.add_argument("--per-kind", type=int, default=2, help="questions of a kind on each video")
    parser.add_argument("--card", action="store_true", help="write the card beside the weights")
    parser.add_argument("--wrong", action="store_true", help="list wrong answers")
    options = parser.parse_args()
    try:
        folder = resolve(options.checkpoint).folder
        model = load(options.checkpoint, device="cpu", use_cache=False)
        blind = load(options.blind, device="cpu", use_cache=False) if options.blind else model
    except ApolloError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    if options.card and (folder is None or not (folder / "README.md").is_file()):
        parser.error(f"{options.checkpoint} has no README.md to write the card into")
    asked = collect(model, blind, options.videos, options.per_kind)
    lines = score(asked)
    sys.stdout.write(table(lines) + "\n")
    if options.wrong:
        for row in asked:
            if not is_right(row.question, row.answer):
                told = f"{row.question.text!r}: {row.answer!r}, right is {row.question.answer!r}"
                sys.stdout.write(f"{row.question.kind} ({row.duration_seconds:g} s) {told}\n")
    if options.card and folder is not None:
        write_card(lines, folder, options.videos)


if __name__ == "__main__":
    main()
