"""What the training loop costs beside the training, and what watching once saves.

    python benchmarks/finetune.py [--steps 40] [--model apollo-nano]

Every figure is a ratio of two runs of the same data on the same machine, made here and in turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from apollo_cli.finetune.recipe import Recipe, load_recipe
from apollo_cli.finetune.training.records import read_log
from tests.finetune.toy import write_toy

# The first steps warm up kernels and the readers.
SKIPPED = 5
TURNS = 3


def ours(recipe: Recipe) -> tuple[float, float]:
    """CPU seconds of a step of ``apollo finetune run``: of its main thread, and of all threads.

    Reading threads run beside the main one where there are cores for them.
    """
    from apollo_cli.finetune.training.loop import run_recipe

    marks: list[tuple[float, float]] = []

    def say(line: str) -> None:
        if line.startswith("step ") and "/" in line:
            marks.append((time.thread_time(), time.process_time()))

    run_recipe(recipe, fresh=True, say=say)
    steps = len(marks) - 1 - SKIPPED
    main, together = (
        (last - first) / steps for first, last in zip(marks[SKIPPED], marks[-1], strict=True)
    )
    return main, together


def straight(recipe: Recipe) -> float:
    """CPU seconds of a step of the shortest loop that does the same: everything in memory."""
    import torch

    from apollo_cli.finetune.adapters import load_base, prepare_network
    from apollo_cli.finetune.data.dataset import load_dataset
    from apollo_cli.finetune.training.examples import ExampleBuilder
    from apollo_cli.finetune.training.trainee import Trainee

    base = load_base(recipe)
    trained = prepare_network(base.network, recipe)
    trainee = Trainee(base.network, recipe.gradient_checkpointing)
    data = load_dataset(recipe)
    mixture = data.build_mixture(recipe.seed)
    with ExampleBuilder(base.planner, recipe.sampling) as builder:
        examples = {s.name: builder.build(s) for s in data.samples}
    with torch.no_grad():
        for name, example in examples.items():
            (tokens,) = trainee.visual_tokens([example])
            examples[name] = replace(example, pixels=None, tokens=tokens)
    optimiser = torch.optim.AdamW(trained.groups())
    size, steps = recipe.batch_size, recipe.total_steps(0)
    begin = 0.0
    for step in range(steps):
        if step == SKIPPED + 1:
            begin = time.thread_time()
        slots = range(step * size, (step + 1) * size)
        batch = [examples[mixture.sample_at(slot).name] for slot in slots]
        total = sum(example.trained_tokens for example in batch)
        optimiser.zero_grad()
        for example in batch:
            loss, _ = trainee([example])
            (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(list(trained.parameters.values()), recipe.clip_norm)
        optimiser.step()
    return (time.thread_time() - begin) / (steps - SKIPPED - 1)


def overhead(recipe: Recipe) -> None:
    """Our loop against the straight one, in turns."""
    recipe = replace(recipe, length_grouped=False)
    found = [(*ours(recipe), straight(recipe)) for _ in range(TURNS)]
    mine, together, plain = (median(column) for column in zip(*found, strict=True))
    print(f"a step of the loop                   {1000 * mine:8.1f} ms of CPU")
    print(f"  with what the readers do beside it {1000 * together:8.1f} ms")
    print(f"a step of a straight-line loop       {1000 * plain:8.1f} ms")
    ratio = median(main / straight for main, _, straight in found)
    print(f"  overhead                           {100 * (ratio - 1):8.1f} %   wanted below 5 %")


def features(recipe: Recipe) -> None:
    """Samples whose video was watched once against decoding and encoding them each time."""
    from apollo_cli.finetune.adapters import load_base
    from apollo_cli.finetune.data.dataset import load_dataset
    from apollo_cli.finetune.training.examples import ExampleBuilder
    from apollo_cli.finetune.training.features import FeatureStore
    from apollo_cli.finetune.training.trainee import Trainee

    base = load_base(recipe)
    trainee = Trainee(base.network, gradient_checkpointing=False)
    samples = [sample for sample in load_dataset(recipe).samples if sample.visuals]
    with ExampleBuilder(base.planner, recipe.sampling) as builder:
        store = FeatureStore(
            recipe.output / "features",
            builder,
            base.network,
            model_name=base.located.name,
            fingerprint=base.fingerprint,
        )
        store.fill(samples)

        def each_time() -> None:
            list(trainee.visual_tokens([builder.build(sample) for sample in samples]))

        builder.remembered = None
        each_time()
        decoded = timed(each_time)
        builder.remembered = store.find
        cached = timed(each_time)
    print(f"visual tokens of {len(samples)} samples, watched each time    {decoded:8.3f} s")
    print(f"visual tokens of {len(samples)} samples, watched once before  {cached:8.3f} s")
    print(f"  each time / once                {decoded / cached:8.1f}   wanted 10 or more")
    pairs = [
        [steps_seconds(replace(recipe, cache_features=kept)) for kept in (False, True)]
        for _ in range(TURNS)
    ]
    ratio = median(each / once for each, once in pairs)
    print(f"  whole steps, each time / once   {ratio:8.1f}")


def timed(work: Callable[[], None]) -> float:
    """Seconds of a piece of work."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def steps_seconds(recipe: Recipe) -> float:
    """Median seconds of a step, waiting for samples included."""
    from apollo_cli.finetune.training.loop import run_recipe

    run_recipe(recipe, fresh=True, say=lambda line: None)
    return median(row["seconds"] for row in rows(recipe)[SKIPPED:])


def rows(recipe: Recipe) -> list[dict[str, float]]:
    """The steps in the log of a run."""
    return [row for row in read_log(recipe.output / "log.jsonl") if "loss" in row]


def processes(recipe: Recipe) -> None:
    """Two processes against one with the same global batch."""
    command = ["-m", "apollo_cli", "finetune", "run", str(recipe.path), "--fresh"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    losses = []
    for extra in ([], launcher):
        subprocess.run(
            [sys.executable, *extra, *command],
            check=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        losses.append([row["loss"] for row in rows(recipe)])
    apart = max(abs(one - two) for one, two in zip(*losses, strict=True))
    print(f"loss of two processes against one, largest difference  {apart:.1e}   wanted 1e-5")


def main() -> None:
    """Make the data and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", default="apollo-nano")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "model": options.model,
            "steps": options.steps,
            "save_every": 10_000,
        }
        frozen = write_toy(
            Path(folder) / "frozen", clips=6, seconds=12.0, texts=1, train=["llm"], **common
        )
        overhead(load_recipe(frozen))
        features(load_recipe(frozen))
        # The loss of a toy at its usual rates makes a great difference of a rounding.
        rates = {"learning_rate": 1e-4, "connector_learning_rate": 1e-4}
        few: dict[str, Any] = common | rates | {"steps": 4}
        processes(load_recipe(write_toy(Path(folder) / "whole", **few)))


if __name__ == "__main__":
    main()
