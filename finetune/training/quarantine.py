"""Quarantine: samples that cannot be read are written down once, and not tried again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from apollo_cli.atomic import write_whole
from apollo_cli.errors import ApolloError, DataError
from apollo_cli.finetune.data.sample import Sample
from apollo_cli.values import parse_object
from apollo_cli.words import count

QUARANTINE_NAME = "quarantine.jsonl"

_Key = tuple[str, ...]


class Quarantine:
    """Samples that could not be read, remembered in a file. Safe for several threads.

    Args:
        path: of the file; what an earlier, stopped run wrote there counts too, but for samples
            whose files were written anew since.
        say: tells the user. prune: whether to delete the rows that do not count.
    """

    def __init__(self, path: Path, say: Callable[[str], None], *, prune: bool = True) -> None:
        self.path = path
        self._say = say
        self._lock = threading.Lock()
        self._known: set[_Key] = set()
        self._tried: set[_Key] = set()
        self._added = 0
        if prune:
            self._prune()
        self.load()

    def __contains__(self, sample: Sample) -> bool:
        return _key(sample) in self._known

    def __len__(self) -> int:
        return len(self._known)

    def load(self) -> None:
        """Take in what the file holds, from other processes too."""
        for row in read_quarantine(self.path):
            if _counts(row):
                self._known.add((str(row["name"]), *map(str, row["files"])))

    def _prune(self) -> None:
        rows = read_quarantine(self.path)
        kept = [row for row in rows if _counts(row)]
        if len(kept) < len(rows):
            # A row that stays is no loss: it does not count.
            with suppress(OSError):
                write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def note_tried(self, sample: Sample) -> None:
        """Count a sample among those that were tried."""
        with self._lock:
            self._tried.add(_key(sample))

    def exclude(self, sample: Sample, reason: str, *, is_said: bool = False) -> None:
        """Write down a sample that is known to be broken before training, and say so if asked to.

        Raises:
            DataError: the file cannot be written.
        """
        with self._lock:
            if self._write(sample, reason) and is_said:
                self._tell(sample, reason)

    def add(self, sample: Sample, error: ApolloError) -> None:
        """Write down a sample that turned out to be broken, and say so.

        Raises:
            DataError: the file cannot be written, or more than half of all samples went this way.
        """
        with self._lock:
            if not self._write(sample, error.message):
                return
            self._added += 1
            self._tell(sample, error.message)
            if self._added > max(4, len(self._tried) / 2):
                tried = count(len(self._tried), "sample")
                raise DataError(
                    f"{self._added} of the first {tried} cannot be read; "
                    f"the last one: {error.message}",
                    "at least half of the data is needed",
                    f"apollo finetune check names all faults; {self.path} lists these samples",
                )

    def _tell(self, sample: Sample, reason: str) -> None:
        self._say(f"sample {sample.name} is left out: {reason}")

    def _write(self, sample: Sample, reason: str) -> bool:
        """Whether the sample was not there before."""
        if sample in self:
            return False
        self._known.add(_key(sample))
        row = {
            "name": sample.name,
            "files": [str(visual.path) for visual in sample.visuals],
            "stamps": [stamp_of(visual.path) for visual in sample.visuals],
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


def _key(sample: Sample) -> _Key:
    """Two data files of one name may have samples of one name: the videos tell them apart."""
    return (sample.name, *(str(visual.path) for visual in sample.visuals))


def stamp_of(path: str | Path) -> list[int] | None:
    """Size and time of the last change of a file; None where there is none."""
    try:
        status = Path(path).stat()
        return [status.st_size, status.st_mtime_ns]
    except (OSError, ValueError):
        return None


def _counts(row: dict[str, Any]) -> bool:
    """Whether the files of a row are still those that could not be read."""
    now = [stamp_of(str(path)) for path in row["files"]]
    # Where it is not known how they were, only what is gone is not worth another try.
    return row["stamps"] == now if "stamps" in row else not now or None in now


def read_quarantine(path: Path) -> list[dict[str, Any]]:
    """The rows of a quarantine file; a line that was cut off by a crash is left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = parse_object(line)
        except ValueError:
            continue
        if "name" in row and isinstance(row.get("files"), list):
            rows.append(row)
    return rows
