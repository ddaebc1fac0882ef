"""Anonymous memory of this process: what it has written, without the files it has mapped."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Anonymous memory that is resident now; Linux only."""
    row = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(row.split()[1]) * 1024


class PeakMemory:
    """Watches the anonymous memory from a thread, about every millisecond.

    Attributes:
        start: bytes when the watch began. peak: the most that was seen. end: bytes at the end.
    """

    def __init__(self) -> None:
        self.start = self.peak = self.end = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.end = anonymous_bytes()
        self.peak = max(self.peak, self.end)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.001)
