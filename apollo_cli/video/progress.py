"""How a hang is told from slow work: steps that the child counts, and its owner's patience."""

from __future__ import annotations

import os
import time
from pathlib import Path

_steps = 0


def advance() -> None:
    """Note that a packet or picture has been dealt with."""
    global _steps  # noqa: PLW0603 - one count for the whole process is the point
    _steps += 1


def steps() -> int:
    """How often ``advance`` was called."""
    return _steps


class Patience:
    """Counts the time that a process spends: all that it computes, and all that it waits.

    Time in which it wants to compute and is not let to is not counted: on a busy machine that says
    nothing about the process. Where the system does not tell (other than Linux), all time counts.

    Attributes:
        spent_seconds: counted so far.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self.spent_seconds = 0.0
        self._seen = time.monotonic()
        self._computed = _look(process)[0]

    def look(self) -> float:
        """Count the time since the last look; returns all that has been counted."""
        now = time.monotonic()
        computed, wants_to = _look(self._process)
        self.spent_seconds += computed - self._computed if wants_to else now - self._seen
        self._seen, self._computed = now, computed
        return self.spent_seconds


def _look(process: int) -> tuple[float, bool]:
    """Seconds of CPU time that a process has used, and whether it computes or wants to."""
    try:
        told = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0, False
    # The name in front may hold spaces and brackets.
    state, *fields = told.rpartition(")")[2].split()
    return sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK"), state == "R"
