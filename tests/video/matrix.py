"""Runs every handed case on each installed decoder; writes the table of docs/decoders.md.

python -m tests.video.matrix           # prints the table
python -m tests.video.matrix --write   # writes it into the page
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from apollo_cli.config import Decoder, ReadingOptions
from apollo_cli.errors import ApolloError, UsageError
from apollo_cli.video.guard import GuardedReader
from tests.cases import CASES, FOLDER
from tests.cases.marker import read_marker

PAGE = Path(__file__).parents[2] / "docs" / "decoders.md"
HEADING = "## Every case on every decoder\n"

# Each decoder that is installed, with its version.
DECODERS: dict[Decoder, str] = {"pyav": version("av")}
if find_spec("decord"):
    DECODERS["decord"] = version("decord")
# Made by benchmarks/decode.py in another form; far too large to be handed on.
NOT_HERE = ("long60min.mp4",)
# Has no room for a marker: only that all its pictures come is looked at.
UNMARKED = ("tiny16.mp4",)
_SHOWN_LETTERS = 24


def place(name: str, folder: Path) -> Path:
    """The file of a case, made in ``folder`` where it can't be kept in a repository."""
    if (FOLDER / name).is_file():
        return FOLDER / name
    path, target = folder / name, FOLDER / "cfr10_target.mp4"
    make = {
        "folder.mp4": path.mkdir,
        "fifo.mp4": lambda: os.mkfifo(path),
        "dangling.mp4": lambda: path.symlink_to("gone.mp4"),
        "link.mp4": lambda: path.symlink_to(target),
    }
    make.get(name, lambda: shutil.copyfile(target, path))()
    return path


def run_case(guard: GuardedReader, decoder: Decoder, case: dict, path: Path) -> str:
    """``right``, ``refused: reason`` or ``wrong: how many``, for all pictures and some at random.

    Raises:
        UsageError: the decoder can't be loaded.
    """
    reading = ReadingOptions(decoder=decoder)
    wrong, damaged = 0, set[float]()
    try:
        info = guard.probe(path)
        everything = np.arange(info.frame_count)
        marks = case["facts"].get("marks") or everything.tolist()
        count = min(5, len(everything))
        some = np.random.default_rng(7).choice(everything, count, replace=False)
        for indices in (everything, *some[:, None]):
            wrong += len(indices)
            for frame in guard.read_frames(info, info.times[indices], reading):
                damaged.update(frame.damaged)
                # Where a neighbour stands in, it has to be the one whose time is told.
                index = int(indices[frame.position])
                if frame.seconds != info.times[index]:
                    index = int(np.argmin(np.abs(info.times - frame.seconds)))
                mark = read_marker(frame.rgb)
                is_right = mark is not None and (mark.number, mark.turned) == (marks[index], 0)
                wrong -= is_right or case["name"] in UNMARKED
    except UsageError:
        raise
    except ApolloError as error:
        for start in ("can't be read right by decord", str(path), path.name):
            reason = error.message.partition(start)[2]
            if reason:
                reason = reason.partition("; leave out")[0].lstrip(": ")
                return "refused: " + reason.replace("|", "\\|")
        return f"refused: {error.message}"
    if wrong:
        return f"wrong: {wrong} of {len(everything) + len(some)} pictures"
    return f"right; {len(damaged)} damaged, neighbours stand in" if damaged else "right"


def verdict_table() -> str:
    """The versions, the date and a row for each case."""
    told = ", ".join(f"{decoder} {version}" for decoder, version in DECODERS.items())
    rows = [["case", "what it is", "wanted", *DECODERS], ["---"] * (3 + len(DECODERS))]
    with GuardedReader(stall_seconds=10) as guard, tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            results = ["not run: made by the benchmark"] * len(DECODERS)
            if case["name"] not in NOT_HERE:
                path = place(case["name"], Path(folder))
                results = [run_case(guard, decoder, case, path) for decoder in DECODERS]
            rows.append([case_label(case), case["why"], case["klass"], *results])
    lines = ["| " + " | ".join(cell.replace("\n", " ") for cell in row) + " |" for row in rows]
    versions = f"Python {platform.python_version()}, {told}; {datetime.date.today():%d %B %Y}."
    return "\n".join([versions, "", *lines]) + "\n"


def case_label(case: dict) -> str:
    """The name as the page shows it."""
    name = case["name"]
    if len(name) > 2 * _SHOWN_LETTERS:
        name = name[:4] + "…" + name[-_SHOWN_LETTERS // 2 :]
    return f"`{name}`"


if __name__ == "__main__":
    if "--write" in sys.argv:
        kept = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
        PAGE.write_text(f"{kept}{HEADING}\n{verdict_table()}", encoding="utf-8")
    else:
        sys.stdout.write(verdict_table())
