"""QLoRA of the 3B shapes with random weights inside a memory budget: does it fit, how fast is it?

    python benchmarks/finetune_gpu.py [--models apollo-3b] [--budget 24] [--dry]

For each length of video it runs stage 3 of `apollo finetune run` on checkpoints of the true sizes,
and prints tokens of a sample, seconds of a step, peak memory, and what `apollo finetune check`
computes. A card with more memory is held to the budget. With --dry, a tiny shape runs on the CPU:
that proves the script, not the numbers. The checkpoint takes up to 16 GB of a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from apollo_cli.errors import ApolloError
from apollo_cli.finetune.estimate import SampleSize, Training, estimate_training
from apollo_cli.finetune.recipe import Recipe, load_recipe
from apollo_cli.finetune.training.loop import run_recipe
from apollo_cli.finetune.training.records import read_log
from apollo_cli.hardware import choose_device
from apollo_cli.memory_plan import Run
from apollo_cli.model.config import NetworkConfig
from apollo_cli.weights.network import released_network
from apollo_cli.weights.registry import known_models
from benchmarks.media import make_video
from benchmarks.random_checkpoint import Shape, network, save_network

STEPS, BATCH, ANSWER = 6, 2, "It shows a pattern that moves slowly across the picture. " * 4


def write_project(folder: Path, model: Path, seconds: int, device: str) -> Recipe:
    """Questions about one video, and the recipe of stage 3 as QLoRA."""
    folder.mkdir()
    make_video(folder / "clip.mp4", seconds)
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": ANSWER}]
    row = {"video": "clip.mp4", "messages": turns}
    (folder / "data.jsonl").write_text((json.dumps(row) + "\n") * BATCH)
    keys = {
        "model": str(model),
        "stage": 3,
        "method": "qlora",
        "output": "out",
        "device": device,
        "steps": STEPS,
        "batch_size": BATCH,
        "micro_batch_size": 1,
        "optimizer": "adamw8bit",
        "validation_share": 0.0,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join([*lines, "", "[[data]]", 'path = "data.jsonl"', ""]))
    return load_recipe(recipe)


def measure(name: str, config: NetworkConfig, lengths: list[int], device: str) -> None:
    """One model: a row of the table for each length of video."""
    hardware = choose_device(device)
    kind = hardware.device.split(":")[0]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "checkpoint"
        save_network(model, config, getattr(torch, hardware.dtype))
        for seconds in lengths:
            recipe = write_project(Path(folder) / f"{seconds}", model, seconds, device)
            if kind == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                run_recipe(recipe, say=lambda line: print(line, file=sys.stderr))
            except ApolloError as error:
                print(f"| {name} | {seconds} | {error.message} | | | |", flush=True)
                continue
            rows = read_log(recipe.output / "log.jsonl")
            tokens = rows[-1]["tokens"] // BATCH
            size = SampleSize(tokens, rows[-1]["trained_tokens"] // BATCH, -(-seconds // 2))
            run = Run(config, kind, hardware.dtype, fused=hardware.attention != "sdpa")
            computed = estimate_training(Training(recipe, run), size).peak
            print(
                f"| {name} | {seconds} | {tokens} | {median(r['seconds'] for r in rows[1:]):.2f} "
                f"| {rows[-1]['memory_bytes'] / 1e9:.2f} | {computed / 1e9:.2f} |",
                flush=True,
            )


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["apollo-3b"])
    parser.add_argument("--budget", type=float, default=24.0, help="gigabytes of the card")
    parser.add_argument("--seconds", nargs="+", type=int, default=[30, 120, 300])
    parser.add_argument("--dry", action="store_true", help="a tiny shape on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.dry else choose_device("cuda").device
    if not options.dry:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.budget * 1e9 / total), device)
        print(torch.cuda.get_device_name(device), "torch", torch.__version__)
    print("| model | seconds of video | tokens of a sample | s a step | peak GB | computed GB |")
    print("|---|---|---|---|---|---|")
    for name in ["tiny"] if options.dry else options.models:
        config = network(Shape()) if options.dry else released_network(known_models()[name]).config
        measure(name, config, [10] if options.dry else options.seconds, device)


if __name__ == "__main__":
    main()
