"""What a training run tells: a log with a line a step, progress, and a picture of the loss."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apollo_cli.atomic import make_whole, write_whole
from apollo_cli.errors import DataError
from apollo_cli.values import Values, number, parse_object, whole

LOG_NAME, CURVE_NAME = "log.jsonl", "loss.png"
# Steps whose pace the remaining time is told from.
_RECENT = 50
_SMOOTHING = 0.9


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step.

    Attributes:
        step: counted from 1. loss: mean over the trained tokens of all processes.
        rates: learning rate of each group of parameters.
        gradient_norm: before clipping.
        tokens: of all samples of all processes. trained_tokens: those that the loss looks at.
        seconds: of the whole step, waiting for data included.
        memory_bytes: peak of the device, of the process on a CPU; None where it is not told.
        samples: names, of this process.
    """

    step: int
    loss: float
    rates: dict[str, float]
    gradient_norm: float
    tokens: int
    trained_tokens: int
    seconds: float
    memory_bytes: int | None
    samples: list[str]


class RunLog:
    """Writes ``log.jsonl`` in the output folder, and TensorBoard's files on request.

    Args:
        folder: of the output. step: the run goes on behind this one; later lines are cut off.
        tensorboard: whether TensorBoard's files are written too.

    Raises:
        DataError: the log cannot be written, or tensorboard is not installed.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool = False) -> None:
        self.path = folder / LOG_NAME
        self._board = _open_board(folder, step) if tensorboard else None
        kept = [row for row in read_log(self.path) if row["step"] <= step] if step else []
        self._measured = {row["step"] for row in kept if "validation" in row}
        try:
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = self.path.open("a")
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def add(self, record: StepRecord) -> None:
        """Write a step."""
        row = asdict(record)
        self._write(row)
        self._show("loss", record.loss, record.step)
        self._show("gradient norm", record.gradient_norm, record.step)
        for name, rate in record.rates.items():
            self._show(f"learning rate/{name}", rate, record.step)

    def add_validation(self, step: int, results: dict[str, float]) -> None:
        """Write what a look at the held-out samples gave; once only of a step."""
        if step in self._measured:
            return
        self._write({"step": step, "validation": results})
        for name, value in results.items():
            self._show(f"validation/{name}", value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _show(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log; a line that was cut off by a crash is left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [row for line in lines if (row := _parse(line)) is not None]


class Progress:
    """Spells a step as one line, with the time that is left.

    Args:
        total: number of steps.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._seconds: list[float] = []

    def line(self, record: StepRecord) -> str:
        """Such as ``step 12/300  loss 1.234  rate 2.0e-04  512 tokens/s  3.1 GB  4 min left``."""
        self._seconds = [*self._seconds, record.seconds][-_RECENT:]
        pace = sum(self._seconds) / len(self._seconds)
        rates = " ".join(f"{rate:.1e}" for rate in dict.fromkeys(record.rates.values()))
        pieces = [
            f"step {record.step}/{self._total}",
            f"loss {record.loss:.4f}",
            f"rate {rates}",
            f"{record.tokens / max(record.seconds, 1e-9):.0f} tokens/s",
        ]
        if record.memory_bytes is not None:
            pieces.append(f"{record.memory_bytes / 1e9:.1f} GB")
        pieces.append(f"{spell_seconds(pace * (self._total - record.step))} left")
        return "  ".join(pieces)


def spell_seconds(seconds: float) -> str:
    """A duration for a reader, such as ``45 s``, ``12 min`` or ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def draw_loss(log: Path, picture: Path) -> None:
    """Draw the loss of a log as a PNG: each step, smoothed, and on the held-out samples.

    Raises:
        DataError: it cannot be written, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _not_installed("matplotlib") from error
    rows = read_log(log)
    steps = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held_out = [
        (row["step"], row["validation"]["loss"])
        for row in rows
        if "loss" in row.get("validation", {})
    ]
    # A figure of its own, without pyplot: no display is looked for and nothing global is kept.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if steps:
        axes.plot(*zip(*steps, strict=True), color="0.8", linewidth=0.8, label="each step")
        axes.plot(*zip(*_smooth(steps), strict=True), color="C0", label="smoothed")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="C1", label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    try:
        make_whole(picture, lambda fresh: figure.savefig(fresh, format="png", dpi=120))
    except OSError as error:
        raise _cannot_write(picture, error) from error


def _smooth(points: list[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """A running mean that forgets, right from the first point on."""
    total = weight = 0.0
    for step, value in points:
        total = _SMOOTHING * total + value
        weight = _SMOOTHING * weight + 1
        yield step, total / weight


def _parse(line: str) -> dict[str, Any] | None:
    faults: list[str] = []
    try:
        row = Values(parse_object(line), "log", faults)
    except ValueError:
        return None
    row.get("step", whole(0))
    row.get("loss", number(-sys.float_info.max, sys.float_info.max), None)
    return None if faults else dict(row.values)


def _open_board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _not_installed("tensorboard") from error
    # Steps behind the checkpoint were written by the run that was cut off: they are hidden.
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def _not_installed(package: str) -> DataError:
    return DataError(
        f"{package} is not installed",
        next_step=f"pip install {package}, or pip install 'apollo-video-cli[finetune]'",
    )


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be written ({error.strerror or error})",
        next_step="make room, then run the same command again",
    )
