"""What separates a hang from slow work: steps counted by the child, time counted by its owner."""

from __future__ import annotations

import os
import time
from pathlib import Path

_steps = 0


def advance() -> None:
    """Count a packet or picture that has been read."""
    global _steps  # noqa: PLW0603 - one count for the whole process is the point
    _steps += 1


def steps() -> int:
    """Number of packets and pictures read by this process."""
    return _steps


class Patience:
    """Counts the time that a process spends computing or sleeping.

    Time in which it is ready to run and gets no CPU does not count: a busy machine is no hang of
    the process. Where the system does not report this (other than Linux), all time counts.

    Attributes:
        spent_seconds: counted so far.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self.spent_seconds = 0.0
        self._seen = time.monotonic()
        self._computed = _cpu_time(process)[0]

    def update(self) -> float:
        """Add the time since the last call; returns the sum."""
        now = time.monotonic()
        computed, wants_to = _cpu_time(self._process)
        self.spent_seconds += computed - self._computed if wants_to else now - self._seen
        self._seen, self._computed = now, computed
        return self.spent_seconds


def _cpu_time(process: int) -> tuple[float, bool]:
    """Seconds of CPU time that a process has used, and whether it runs or is ready to."""
    try:
        told = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0, False
    # The name in front may hold spaces and brackets.
    state, *fields = told.rpartition(")")[2].split()
    return sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK"), state == "R"
