"""Waiting in tests: for a condition, never for a time, whatever the pace of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only what would never come reaches it.
PATIENCE_SECONDS = 600.0


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
