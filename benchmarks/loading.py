"""Host memory while a checkpoint loads: in bf16, 8-bit and 4-bit, each in a process of its own.

    python benchmarks/loading.py [--megabytes 1000]

Makes a random checkpoint of one shard in a temporary folder. Prints for each precision the growth
of anonymous memory at its peak and when loaded, its ratio to the shard, and the seconds. Fails
when a peak is more than 1.3 times the shard. Linux only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ALLOWED_RATIO = 1.3
PRECISIONS = ("bf16", "8bit", "4bit")
LAYER_MEGABYTES = 33.0


def measure(folder: Path, precision: str) -> None:
    """Load in this process and print what it took."""
    import time

    import torch
    from memory import PeakMemory

    from apollo_cli.weights.load import load_model
    from apollo_cli.weights.quantize import bitsandbytes

    torch.set_num_threads(1)
    quant = None if precision == "bf16" else precision
    if quant is not None:
        bitsandbytes()
    begin = time.perf_counter()
    with PeakMemory() as memory:
        _kept = load_model(folder, dtype=torch.bfloat16, quant=quant)  # pyright: ignore[reportArgumentType]
    seconds = time.perf_counter() - begin
    print(json.dumps([memory.peak - memory.start, memory.end - memory.start, seconds]))


def main() -> int:
    """Returns 0 when every peak stays below the allowed one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the checkpoint")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "PRECISION"), help="used inside")
    options = parser.parse_args()
    if options.measure:
        measure(Path(options.measure[0]), options.measure[1])
        return 0
    from random_checkpoint import Shape, save

    # A layer of this width takes 33 MB in bf16.
    layers = max(1, round(options.megabytes / LAYER_MEGABYTES) - 2)
    shape = Shape(llm_width=1536, llm_hidden=2560, llm_layers=layers, vocabulary=8192)
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = save(Path(temporary) / "checkpoint", shape)
        shard = max(path.stat().st_size for path in folder.rglob("*.safetensors"))
        print(f"largest shard {shard / 1e6:.0f} MB")
        for precision in PRECISIONS:
            command = [sys.executable, __file__, "--measure", str(folder), precision]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            peak, end, seconds = json.loads(shown.splitlines()[-1])
            worst = max(worst, peak / shard)
            print(
                f"{precision:5} peak {peak / 1e6:6.0f} MB   loaded {end / 1e6:6.0f} MB   "
                f"ratio {peak / shard:5.3f}   {seconds:5.1f} s"
            )
    print(f"worst ratio {worst:.3f}   allowed {ALLOWED_RATIO:g}")
    return int(worst > ALLOWED_RATIO)


if __name__ == "__main__":
    sys.exit(main())
