"""Quarantine: samples that cannot be read are written down once, and not tried again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from apollo_cli.errors import ApolloError, DataError
from apollo_cli.finetune.sample import Sample

QUARANTINE_NAME = "quarantine.jsonl"


class Quarantine:
    """Samples that could not be read, remembered in a file. Safe for several threads.

    Args:
        path: of the file; what an earlier, stopped run wrote there counts too.
        say: tells the user.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._tried: set[str] = set()
        self._added = 0
        self.load()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def load(self) -> None:
        """Take in what the file holds, from other processes too."""
        self._names |= {row["name"] for row in read_quarantine(self.path)}

    def note_tried(self, name: str) -> None:
        """Count a sample among those that were tried."""
        with self._lock:
            self._tried.add(name)

    def exclude(self, sample: Sample, reason: str) -> None:
        """Write down a sample that is known to be broken before training.

        Raises:
            DataError: the file cannot be written.
        """
        with self._lock:
            self._write(sample, reason)

    def add(self, sample: Sample, error: ApolloError) -> None:
        """Write down a sample that turned out to be broken, and say so.

        Raises:
            DataError: the file cannot be written, or more than half of all samples went this way.
        """
        with self._lock:
            if not self._write(sample, error.message):
                return
            self._added += 1
            self._say(f"sample {sample.name} is left out: {error.message}")
            if self._added > max(4, len(self._tried) / 2):
                raise DataError(
                    f"{self._added} of the first {len(self._tried)} samples cannot be read; "
                    f"the last one: {error.message}",
                    "at least half of the data is needed",
                    f"apollo finetune check names all faults; {self.path} lists these samples",
                )

    def _write(self, sample: Sample, reason: str) -> bool:
        """Whether the sample was not there before."""
        if sample.name in self._names:
            return False
        self._names.add(sample.name)
        row = {
            "name": sample.name,
            "files": [str(visual.path) for visual in sample.visuals],
            "reason": reason,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as fault:
            raise DataError(
                f"{self.path} cannot be written ({fault.strerror or fault})",
                next_step="make room, then run the same command again",
            ) from fault
        return True


def read_quarantine(path: Path) -> list[dict[str, str]]:
    """The rows of a quarantine file; a line that was cut off by a crash is left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("name"), str):
            rows.append(row)
    return rows
