"""Encoding clips: batches, as the engine does, against a loop clip by clip.

    python benchmarks/encoding.py [--clips 32] [--threads 1]

For the tiny golden checkpoint, for apollo-nano where it is here, and for a random one that is
wider. Prints for each way clips a CPU second and the growth of memory, and their ratio. Both ways
run in turns in one process; memory is measured in processes of their own. CPU and Linux only.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "tiny": ROOT / "tests" / "golden" / "tiny-checkpoint",
    "nano": ROOT / "weights" / "nano",
}
WAYS = {"batches": 4, "loop": 1}


def measure(folder: Path, clips: int, rounds: int, threads: int, ways: list[str]) -> None:
    """Encode in this process and print CPU seconds a round and growth of memory for each way."""
    import torch
    from memory import PeakMemory

    from apollo_cli.weights.load import load_model

    torch.set_num_threads(threads)
    model, _ = load_model(folder)
    generator = torch.Generator().manual_seed(0)
    pixels = {
        encoder.name: torch.randint(
            0, 256, (clips, 4, 3, encoder.pixels.size, encoder.pixels.size), generator=generator
        ).to(torch.uint8)
        for encoder in model.config.encoders
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    tokens: dict[str, torch.Tensor] = {}
    with torch.inference_mode(), PeakMemory() as memory:
        for _ in range(rounds):
            for way in ways:
                begin = time.process_time()
                parts = zip(*(p.split(WAYS[way]) for p in pixels.values()), strict=True)
                found = [model.encode_clips(dict(zip(pixels, part, strict=True))) for part in parts]
                seconds[way].append(time.process_time() - begin)
                tokens[way] = torch.cat(found)
    if len(tokens) > 1:
        one, other = tokens.values()
        assert torch.allclose(one, other, atol=1e-4), "the two ways disagree"
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    print(json.dumps([medians, memory.peak - memory.start]))


def ask(folder: Path, options: argparse.Namespace, rounds: int, ways: list[str]) -> list:
    """Run a measurement in a process of its own."""
    numbers = [str(options.clips), str(rounds), str(options.threads)]
    command = [sys.executable, __file__, "--measure", str(folder), *numbers, *ways]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(shown.splitlines()[-1])


def main() -> int:
    """Returns 0; it measures and does not judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clips", type=int, default=32, help="clips to encode")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--measure", nargs="+", help="used inside")
    options = parser.parse_args()
    if options.measure:
        folder, clips, rounds, threads, *ways = options.measure
        measure(Path(folder), int(clips), int(rounds), int(threads), ways)
        return 0
    from random_checkpoint import Shape, save

    with tempfile.TemporaryDirectory() as temporary:
        shape = Shape(video_width=352, image_width=288, image_side=224)
        folders = FOLDERS | {"wider": save(Path(temporary) / "checkpoint", shape)}
        for name, folder in folders.items():
            if not (folder / "config.json").is_file():
                print(f"{name:6} is not here")
                continue
            medians, _ = ask(folder, options, options.rounds, list(WAYS))
            for way in WAYS:
                _, growth = ask(folder, options, 1, [way])
                rate = options.clips / medians[way]
                print(f"{name:6} {way:8} {rate:8.1f} clips/CPU-s   memory +{growth / 1e6:6.0f} MB")
            print(f"{name:6} loop / batches {medians['loop'] / medians['batches']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
