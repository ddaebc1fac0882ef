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
from apollo_cli.errors import ApolloError, MediaError, UsageError
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.info import VideoInfo
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


def place(case: dict, folder: Path) -> Path:
    """The file of a case, made in ``folder`` where it can't be kept in a repository."""
    name = case["name"]
    if (FOLDER / name).is_file():
        return FOLDER / name
    path, target = folder / name, FOLDER / "cfr10_target.mp4"
    if name == "folder.mp4":
        path.mkdir()
    elif name == "fifo.mp4":
        os.mkfifo(path)
    elif name == "dangling.mp4":
        path.symlink_to("gone.mp4")
    elif name == "link.mp4":
        path.symlink_to(target)
    else:
        shutil.copyfile(target, path)
    return path


def run_case(guard: GuardedReader, decoder: Decoder, case: dict, path: Path) -> str:
    """``right``, ``refused: reason`` or ``wrong: how many``, for all pictures and some at random.

    Raises:
        UsageError: the decoder can't be loaded.
    """
    try:
        info = guard.probe(path)
        damaged: list[float] = []
        everything = np.arange(info.frame_count)
        count = min(5, len(everything))
        some = np.random.default_rng(7).choice(everything, count, replace=False)
        wrong = _wrong(guard, decoder, case, info, indices=everything, damaged=damaged)
        wrong += sum(
            _wrong(guard, decoder, case, info, indices=some[[k]], damaged=[])
            for k in range(len(some))
        )
    except UsageError:
        raise
    except ApolloError as error:
        return f"refused: {_reason(error, path)}"
    if wrong:
        return f"wrong: {wrong} of {len(everything) + len(some)} pictures"
    if damaged:
        return f"right; {len(damaged)} damaged, neighbours stand in"
    return "right"


def _wrong(
    guard: GuardedReader,
    decoder: Decoder,
    case: dict,
    info: VideoInfo,
    *,
    indices: np.ndarray,
    damaged: list[float],
) -> int:
    marks = case["facts"].get("marks") or list(range(info.frame_count))
    came = wrong = 0
    for frame in guard.read_frames(info, info.times[indices], ReadingOptions(decoder=decoder)):
        came += 1
        damaged += frame.damaged
        # Where a neighbour stands in, it has to be the one whose time is told.
        index = int(np.argmin(np.abs(info.times - frame.seconds)))
        if frame.seconds == info.times[indices[frame.position]]:
            index = int(indices[frame.position])
        mark = read_marker(frame.rgb)
        if case["name"] not in UNMARKED:
            wrong += mark is None or (mark.number, mark.turned) != (marks[index], 0)
    return wrong + len(indices) - came


def _reason(error: ApolloError, path: Path) -> str:
    refusal = "can't be read right by "
    if isinstance(error, MediaError) and refusal in error.message:
        return error.message.rpartition(refusal)[2].partition(": ")[2].partition("; leave out")[0]
    for name in (str(path), path.name):
        at = error.message.find(name)
        if at >= 0:
            return error.message[at + len(name) :].lstrip(": ").replace("|", "\\|")
    return error.message


def verdict_table() -> str:
    """The versions, the date and a row for each case."""
    with GuardedReader(stall_seconds=10) as guard, tempfile.TemporaryDirectory() as folder:
        rows = [_row(guard, case, Path(folder)) for case in CASES]
    told = ", ".join(f"{decoder} {version}" for decoder, version in DECODERS.items())
    head = [
        f"Python {platform.python_version()}, {told}; {datetime.date.today():%d %B %Y}.",
        "",
        "| case | what it is | wanted | " + " | ".join(DECODERS) + " |",
        "| --- " * (3 + len(DECODERS)) + "|",
    ]
    return "\n".join(head + rows) + "\n"


def _row(guard: GuardedReader, case: dict, folder: Path) -> str:
    if case["name"] in NOT_HERE:
        results = ["not run: made by the benchmark"] * len(DECODERS)
    else:
        path = place(case, folder)
        results = [run_case(guard, decoder, case, path) for decoder in DECODERS]
    cells = [case_label(case), case["why"], case["klass"], *results]
    return "| " + " | ".join(cell.replace("\n", " ") for cell in cells) + " |"


def case_label(case: dict) -> str:
    """The name as the page shows it."""
    name = case["name"]
    if len(name) > 2 * _SHOWN_LETTERS:
        name = name[:4] + "…" + name[-_SHOWN_LETTERS // 2 :]
    return f"`{name}`"


def main() -> None:
    """Print the table, or write it into the page."""
    table = verdict_table()
    if "--write" in sys.argv:
        kept = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
        PAGE.write_text(f"{kept}{HEADING}\n{table}", encoding="utf-8")
    else:
        sys.stdout.write(table)


if __name__ == "__main__":
    main()
