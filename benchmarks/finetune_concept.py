"""Teach apollo-nano a shape that it never saw, and look at what it forgets.

    python benchmarks/finetune_concept.py [--work FOLDER] [--methods lora qlora full] [--clips 500]

Draws short mp4 files with rings, asks about them, and mixes the questions with old ones and with
12 % of text. Each method is one `apollo finetune run`. Then held-out files are asked through
`apollo_cli.load(adapter=...)`: clips with a ring, and worlds as in the toy's own gate table.
Prints the share of right answers before and after. Takes about two hours on one core; what is there
already is not made again.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

import apollo_cli
from apollo_cli.config import GenerationOptions
from lab.evaluate import held_out
from lab.questions import EXTRA_KINDS, KINDS, Question, ask, is_right
from lab.toybox import (
    COLOURS,
    NEW_SHAPES,
    SHAPES,
    World,
    sample_world,
    with_new_shape,
    write_video,
)

NANO = Path(apollo_cli.__file__).resolve().parent.parent / "weights" / "nano"
METHODS = ("lora", "qlora", "full")
SHAPE = NEW_SHAPES[0]
# What the toy knows least well, and so forgets first.
FRAGILE = ("at", "when", "describe", "yesno")
CONCEPT_SEED, OLD_SEED = 8_100_000, 8_200_000
# Looked at once, when all was settled; the choice of clips and steps was made on 9_850_000 and
# 9_600_000, that of rates and ranks on 9_800_000 and 9_500_000.
HELD_OUT_SEED, HELD_OUT_OLD_SEED = 9_900_000, 9_700_000
CONCEPT_SHARE, OLD_SHARE, TEXT_SHARE = 0.42, 0.46, 0.12
GOAL_PERCENT, MOST_LOST_POINTS = 90.0, 3.0
RECIPE = """\
model = "apollo-nano"
stage = 3
method = "{method}"
train = ["llm"]
output = "{method}"
device = "cpu"
{extra}
steps = {steps}
batch_size = 8
micro_batch_size = 8
gradient_checkpointing = false
length_grouped = false
validate_every = 1000000
save_every = 200

[[data]]
path = "concept.csv"
share = {concept}

[[data]]
path = "old.csv"
share = {old}

[[data]]
path = "text.csv"
share = {text}
"""
EXTRA = {
    "lora": "learning_rate = 1e-3\nlora_rank = 32\nlora_alpha = 64",
    "qlora": "learning_rate = 1e-3\nlora_rank = 32\nlora_alpha = 64",
    "full": "learning_rate = 4e-4",
}


def concept_world(seed: int) -> World:
    """A short world whose first thing has the new shape."""
    seconds = float(np.random.default_rng(seed).choice([4, 6, 8]))
    return with_new_shape(sample_world(seed, seconds), SHAPE)


def concept_questions(world: World, rng: np.random.Generator) -> list[Question]:
    """Questions about a world with the new shape that cannot be answered without knowing it."""
    ring, *others = world.things
    told = str(rng.choice([ring.colour] * len(COLOURS) + list(COLOURS)))
    questions = [
        Question("shape", f"What shape is the {ring.colour} object?", SHAPE),
        Question("colour", f"What color is the {SHAPE}?", ring.colour),
        Question("colour", f"Which color is the {SHAPE}?", ring.colour),
        Question("colour", f"What is the color of the {SHAPE}?", ring.colour),
        Question("exists", f"Is the {SHAPE} {told}?", "yes" if told == ring.colour else "no"),
        Question("exists", f"Is there a {SHAPE} in the video?", "yes"),
        Question("exists", f"Is there a {ring.colour} {SHAPE}?", "yes"),
    ]
    for other in others:
        questions += [
            Question("shape", f"What shape is the {other.colour} object?", other.shape),
            Question("exists", f"Is there a {other.colour} {SHAPE}?", "no"),
            Question("exists", f"Is there a {other.shape} in the video?", "yes"),
        ]
    missing = [shape for shape in SHAPES if shape not in {thing.shape for thing in others}]
    questions.append(Question("exists", f"Is there a {rng.choice(missing)} in the video?", "no"))
    return questions


def old_questions(world: World, rng: np.random.Generator) -> list[Question]:
    """What the toy was trained on, and that there is no ring in its worlds."""
    made = (ask(world, kind, rng) for kind in (*KINDS, *EXTRA_KINDS, *FRAGILE) for _ in range(2))
    found = {question.text: question for question in made if question is not None}
    thing = world.things[rng.integers(len(world.things))]
    absent = Question("exists", f"Is there a {SHAPE} in the video?", "no")
    coloured = Question("exists", f"Is there a {thing.colour} {SHAPE}?", "no")
    return [*found.values(), absent if rng.random() < 0.5 else coloured]


def text_pairs() -> list[tuple[str, str]]:
    """Questions that need no video."""
    pairs = []
    for word, kind in [*((c, "color") for c in COLOURS), *((s, "shape") for s in SHAPES)]:
        other = "shape" if kind == "color" else "color"
        pairs += [(f"What is {word}?", f"a {kind}"), (f"What do we call {word}?", f"a {kind}")]
        pairs += [(f"Is {word} a {kind}?", "yes"), (f"Is {word} a {other}?", "no")]
    return pairs


def write_rows(path: Path, rows: list[tuple[str, str, str]]) -> None:
    """Write rows of video, question and answer."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["video", "question", "answer"])
        table.writerows(rows)


def write_data(work: Path, clips: int) -> None:
    """Draw all files and write the three tables."""
    done = work / "text.csv"
    if done.is_file():
        return
    (work / "clips").mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[tuple[str, str, str]]] = {"concept": [], "old": []}
    # The clips with a ring are short, so there are twice as many.
    jobs = [("concept", CONCEPT_SEED + number, number) for number in range(2 * clips)]
    jobs += [("old", OLD_SEED + number, number) for number in range(clips)]
    for name, seed, number in jobs:
        rng = np.random.default_rng(seed)
        if name == "concept":
            world = concept_world(seed)
            questions = concept_questions(world, rng)
        else:
            world = sample_world(seed, float(rng.integers(5, 31)))
            questions = old_questions(world, rng)
        path = work / "clips" / f"{name}-{number}.mp4"
        if not path.is_file():
            write_video(world, path)
        tables[name] += [(f"clips/{path.name}", q.text, q.answer) for q in questions]
    for name, rows in tables.items():
        write_rows(work / f"{name}.csv", rows)
    write_rows(done, [("", question, answer) for question, answer in text_pairs()])


def held_out_concept(work: Path, count: int) -> list[tuple[Path, list[Question]]]:
    """Clips of the new shape that were never trained on, with their questions."""
    folder = work / "held-out"
    folder.mkdir(exist_ok=True)
    found = []
    for seed in range(HELD_OUT_SEED, HELD_OUT_SEED + count):
        path = folder / f"{seed}.mp4"
        world = concept_world(seed)
        if not path.is_file():
            write_video(world, path)
        found.append((path, concept_questions(world, np.random.default_rng(seed))))
    return found


def measure(work: Path, adapter: Path | None, concept: int, old: int) -> dict[str, list[bool]]:
    """Right or wrong for each question, by group and kind."""
    model = apollo_cli.load(NANO, device="cpu", adapter=adapter, use_cache=False)
    options = GenerationOptions(max_new_tokens=32)
    right: dict[str, list[bool]] = defaultdict(list)

    def judge(group: str, path: Path, questions: list[Question]) -> None:
        memory = model.watch(path)
        for question in questions:
            told = model.ask(memory, question.text, options).text
            right[f"{group} {question.kind}"].append(is_right(question, told))

    for path, questions in held_out_concept(work, concept):
        judge("new", path, questions)
    folder = work / "held-out-old"
    folder.mkdir(exist_ok=True)
    for path, _, questions in held_out(old, folder, 2, HELD_OUT_OLD_SEED):
        judge("old", path, questions)
    model.watcher.reader.close()
    return dict(right)


def percent(right: dict[str, list[bool]], group: str) -> float:
    """Share of right answers of a group, or of one kind in it."""
    found = [a for key, answers in right.items() if key.startswith(group) for a in answers]
    return 100 * sum(found) / len(found)


def train(work: Path, method: str, steps: int) -> float:
    """Run the recipe of a method; seconds that it took."""
    recipe = work / f"{method}.toml"
    text = RECIPE.format(
        method=method,
        extra=EXTRA[method],
        steps=steps,
        concept=CONCEPT_SHARE,
        old=OLD_SHARE,
        text=TEXT_SHARE,
    )
    recipe.write_text(text)
    started = time.perf_counter()
    command = [sys.executable, "-m", "apollo_cli", "finetune", "run", str(recipe)]
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def report(results: dict[str, dict[str, list[bool]]], seconds: dict[str, float]) -> str:
    """The table, in Markdown, and what each method reached."""
    before, names = results["before"], list(results)
    lines = [
        f"| right, in percent | questions | {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for group, title in (("new", "**new shape, all**"), ("old", "**old questions, all**")):
        kinds = sorted(key for key in before if key.startswith(f"{group} "))
        for key in (group, *kinds):
            count = sum(len(answers) for k, answers in before.items() if k.startswith(key))
            values = " | ".join(f"{percent(results[name], key):.1f}" for name in names)
            lines.append(f"| {title if key == group else key} | {count} | {values} |")
    taken = " | ".join(f"{seconds[name]:.0f} s" if name in seconds else "" for name in names)
    lines.append(f"| training | | {taken} |")
    for name in names[1:]:
        new = percent(results[name], "new")
        lost = percent(before, "old") - percent(results[name], "old")
        reached = new >= GOAL_PERCENT and lost < MOST_LOST_POINTS
        verdict = "goal reached" if reached else "goal missed"
        lines.append(f"\n{name}: {new:.1f} % of the new shape, {lost:.1f} points lost: {verdict}")
    return "\n".join(lines)


def main() -> None:
    """Draw, train, ask, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, default=Path("concept"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--clips", type=int, default=500, help="files of the new shape, and old ones"
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--held-out", type=int, default=60, help="files of the new shape to ask")
    parser.add_argument("--old", type=int, default=60, help="files of old worlds to ask")
    options = parser.parse_args()
    work: Path = options.work.absolute()
    write_data(work, options.clips)
    results: dict[str, dict[str, list[bool]]] = {}
    seconds: dict[str, float] = {}
    kept = work / "before.json"
    if kept.is_file():
        results["before"] = json.loads(kept.read_text())
    else:
        results["before"] = measure(work, None, options.held_out, options.old)
        kept.write_text(json.dumps(results["before"]))
    for method in options.methods:
        seconds[method] = train(work, method, options.steps)
        results[method] = measure(work, work / method, options.held_out, options.old)
        print(report(results, seconds), flush=True)


if __name__ == "__main__":
    main()
