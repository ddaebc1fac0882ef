"""What does not depend on who decodes: memory by length and size, whole commands, many openings.

    python benchmarks/decode_more.py [--memory] [--commands] [--opens 10000]

``--memory`` reads 60 clips spread over files of 10 minutes, an hour and 4 hours, and of 4K, each
in a process of its own. ``--commands`` times the probe, ``apollo plan`` and ``apollo check`` on the
hour. ``--opens`` opens that many short files one after the other, as training does: a probe and two
pictures each, once in this process and once through one guarded child. It looks at the memory and
the open files of the process that reads.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from decode import SIZE, SPECS, make_hour, run_part
from media import make_video

from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import read_clips

MEMORY_FILES = (
    ("10 minutes", 10, SIZE),
    ("1 hour", 60, SIZE),
    ("4 hours", 240, SIZE),
    ("4K, 10 minutes", 10, (3840, 2160)),
)
MEMORY_CLIPS = 60
CLIP_SECONDS = np.array([[0.0, 0.3]])


def measure_memory(folder: Path) -> None:
    """Peak above imports of 60 clips in one process, by length and size of the file."""
    for label, minutes, size in MEMORY_FILES:
        path = folder / "film.mp4"
        make_hour(path, minutes, size)
        part = run_part("ours", path, MEMORY_CLIPS, minutes)
        print(f"memory, {label:16} {part['megabytes']:6.0f} MB above imports", flush=True)
        path.unlink()


def measure_commands(folder: Path) -> None:
    """CPU time of the probe by itself, and of whole commands with their start and their child."""
    path = folder / "hour.mp4"
    make_hour(path, 60)
    start = time.process_time()
    probe(path)
    print(f"probe         {time.process_time() - start:5.2f} s CPU")
    for command in ("plan", "check"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "apollo_cli", command, str(path)],
            check=True,
            capture_output=True,
            cwd=Path(__file__).parent.parent,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"apollo {command:6} {cpu:5.2f} s CPU", flush=True)


def measure_opens(folder: Path, opens: int) -> None:
    """Memory and open files after each tenth of the openings, each of another name."""
    original = make_video(folder / "short.mp4", 20, (160, 90))
    names = [folder / f"{number}.mp4" for number in range(opens)]
    for name in names:
        os.link(original, name)

    def open_here(name: Path) -> None:
        for _ in read_clips(probe(name), CLIP_SECONDS, SPECS[-1:]):
            pass

    _watch("in this process", names, open_here, os.getpid)
    with GuardedReader() as reader:

        def open_guarded(name: Path) -> None:
            for _ in reader.read_clips(reader.probe(name), CLIP_SECONDS, SPECS[-1:]):
                pass

        _watch("in one child", names, open_guarded, lambda: reader.process_id or 0)


def _watch(
    label: str, names: list[Path], open_one: Callable[[Path], None], reading: Callable[[], int]
) -> None:
    started = time.monotonic()
    for number, name in enumerate(names, 1):
        open_one(name)
        if number % max(1, len(names) // 10) == 0 or number == max(1, len(names) // 100):
            process = Path(f"/proc/{reading()}")
            rows = dict(
                line.split(":", 1) for line in (process / "status").read_text().splitlines()
            )
            megabytes = int(rows["RssAnon"].split()[0]) / 1024
            files = len(list((process / "fd").iterdir()))
            print(f"{number:6} opens {label}: {megabytes:6.1f} MB, {files} files", flush=True)
    each = (time.monotonic() - started) / len(names)
    print(json.dumps({"opens": len(names), "where": label, "ms each": round(1000 * each, 1)}))


def main() -> None:
    """Run the sections that were asked for; all of them when none was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--opens", type=int, nargs="?", const=10_000)
    args = parser.parse_args()
    every = not (args.memory or args.commands or args.opens)
    with tempfile.TemporaryDirectory() as folder:
        if args.memory or every:
            measure_memory(Path(folder))
        if args.commands or every:
            measure_commands(Path(folder))
        if args.opens or every:
            measure_opens(Path(folder), args.opens or 10_000)


if __name__ == "__main__":
    main()
