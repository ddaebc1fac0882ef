"""What it costs to start: `apollo --help` against `python -c "import torch"`.

    python benchmarks/startup.py [--runs 7]

Prints the median of each in seconds, the largest peak memory of each, and their ratio. The order
alternates, so that a busy machine slows both alike.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

HELP = [sys.executable, "-c", "from apollo_cli.cli import main; main()", "--help"]
TORCH = [sys.executable, "-c", "import torch"]
ALLOWED_SECONDS = 0.3
ALLOWED_RATIO = 0.1


def run_once(command: list[str]) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of one run of a command, which must succeed."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, usage.ru_maxrss * unit


def main() -> int:
    """Returns 0 when both limits hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="runs of each command")
    runs = parser.parse_args().runs
    seconds: dict[str, list[float]] = {"apollo --help": [], "import torch": []}
    peak_bytes = dict.fromkeys(seconds, 0)
    for round_index in range(runs + 1):
        for name, command in zip(seconds, (HELP, TORCH), strict=True):
            taken, peak = run_once(command)
            if round_index:  # the first round only warms the disk cache
                seconds[name].append(taken)
                peak_bytes[name] = max(peak_bytes[name], peak)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, median in medians.items():
        print(f"{name:14} {median:6.3f} s   peak {peak_bytes[name] / 2**20:5.0f} MiB")
    ours, theirs = medians.values()
    print(f"ratio          {ours / theirs:6.3f}     allowed {ALLOWED_RATIO:g}")
    return int(ours > ALLOWED_SECONDS or ours > ALLOWED_RATIO * theirs)


if __name__ == "__main__":
    sys.exit(main())
