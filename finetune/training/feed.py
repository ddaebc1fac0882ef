"""Quarantine: samples that cannot be read are written down once, and not tried again."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

from apollo_cli.atomic import write_whole
from apollo_cli.errors import ApolloError, DataError, FitError, MediaError, UsageError
from apollo_cli.finetune.data.dataset import Mixture
from apollo_cli.finetune.data.samples import Sample
from apollo_cli.finetune.training.examples import Example
from apollo_cli.text import count
from apollo_cli.values import parse_object

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


Say = Callable[[str], None]

# Global batches that are sorted by length together.
_WINDOW = 16
# Pixels take up to 150 kB for each token: read-ahead stays within a few gigabytes.
_TOKENS_AHEAD = 20_000
_ATTEMPTS = 32
_SLOW_SECONDS = 15.0
# What one sample can be guilty of; anything else is a fault of the machine or of ours.
_OF_A_SAMPLE = (MediaError, FitError, DataError, UsageError)


class Builder(Protocol):
    """What reads samples: an ``ExampleBuilder``, safe for several threads."""

    def build(self, sample: Sample) -> Example:
        """Read one sample."""
        ...

    def interrupt(self) -> None:
        """Let the readings under way fail."""
        ...


class SlotOrder:
    """Which slots of the mixture each step takes, the same for every process and every run.

    Args:
        batch_size: slots of a step, over all processes. steps: of the whole run.
        seed: of the order of batches.
        length_of: tokens of a slot's sample. Batches then hold samples of like length: within a
            window of some batches, slots are sorted and the batches shuffled. None keeps the
            mixture's own order.
    """

    def __init__(
        self, batch_size: int, steps: int, seed: int, length_of: Callable[[int], int] | None
    ) -> None:
        self.batch_size = batch_size
        self.steps = steps
        self._seed = seed
        self._length_of = length_of
        self._window: tuple[int, list[list[int]]] = (-1, [])

    def slots(self, step: int, process: int = 0, processes: int = 1) -> list[int]:
        """The slots that one process takes in a step.

        Args:
            step: 0 or more. process: of ``processes``; they share the slots evenly.
        """
        return self._batch(step)[process::processes]

    def _batch(self, step: int) -> list[int]:
        size = self.batch_size
        if self._length_of is None:
            return list(range(step * size, (step + 1) * size))
        window, place = divmod(step, _WINDOW)
        if self._window[0] != window:
            # The last window ends with the run, so that no sample of an epoch is left behind.
            first, end = window * _WINDOW, min((window + 1) * _WINDOW, self.steps)
            slots = sorted(range(first * size, end * size), key=self._length_of)
            batches = [slots[i : i + size] for i in range(0, len(slots), size)]
            random.Random(f"{self._seed}/{window}").shuffle(batches)
            self._window = window, batches
        return self._window[1][place]


class Feed:
    """Reads samples in threads, ahead of their use and in order. Use it in a ``with``.

    Args:
        mixture: of all samples. builder: reads one.
        slots: of the mixture, in the order in which they are taken.
        quarantine: of this run. readers: number of threads.
        ahead: samples that are read before they are taken, at most.
        length_of: tokens of a slot's sample, which bound what is held in memory.
        say: tells the user what is slow.
        slow_seconds: a sample that training waits for longer is named.
    """

    def __init__(
        self,
        mixture: Mixture,
        builder: Builder,
        slots: Iterable[int],
        quarantine: Quarantine,
        *,
        readers: int,
        ahead: int,
        length_of: Callable[[int], int],
        say: Say,
        slow_seconds: float = _SLOW_SECONDS,
    ) -> None:
        self._mixture = mixture
        self._builder = builder
        self._slots = iter(slots)
        self._quarantine = quarantine
        self._ahead = ahead
        self._length_of = length_of
        self._waiting = deque[tuple[int, Future[Example]]]()
        self._tokens = 0
        self._ending = threading.Event()
        self._say = say
        self._slow_seconds = slow_seconds
        self._pool = ThreadPoolExecutor(readers, "reader", initializer=_shield_children)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self) -> Example:
        """The next example; the one of another sample of its source where its own is broken.

        Raises:
            DataError: too many samples cannot be read.
        """
        self._look_ahead()
        slot, future = self._waiting[0]
        started = time.monotonic()
        while not wait([future], timeout=self._slow_seconds).done:
            sample = self._mixture.sample_at(slot)
            files = ", ".join(visual.path.name for visual in sample.visuals)
            seconds = time.monotonic() - started
            self._say(f"still reading {files or sample.name}, {seconds:.0f} s")
        example = future.result()
        self._waiting.popleft()
        self._tokens -= self._length_of(slot)
        return example

    def close(self) -> None:
        """End all readings, their decoders and all threads."""
        self._ending.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        while running := [future for _, future in self._waiting if not future.done()]:
            self._builder.interrupt()
            wait(running, timeout=0.1)
        self._pool.shutdown()

    def _look_ahead(self) -> None:
        while not self._waiting or (
            len(self._waiting) < self._ahead and self._tokens < _TOKENS_AHEAD
        ):
            slot = next(self._slots, None)
            if slot is None:
                return
            self._tokens += self._length_of(slot)
            self._waiting.append((slot, self._pool.submit(self._read, slot)))

    def _read(self, slot: int) -> Example:
        last = ""
        for attempt in range(_ATTEMPTS):
            sample = self._mixture.sample_at(slot, attempt)
            if sample in self._quarantine:
                continue
            if self._ending.is_set():
                raise CancelledError
            self._quarantine.note_tried(sample)
            try:
                return self._builder.build(sample)
            except _OF_A_SAMPLE as error:
                if self._ending.is_set():
                    raise
                self._quarantine.add(sample, error)
                last = error.message
        sample = self._mixture.sample_at(slot)
        raise DataError(
            f"neither {sample.name} nor any of {_ATTEMPTS - 1} samples in its place can be read"
            + (f"; the last one: {last}" if last else ""),
            next_step=f"apollo finetune check names all faults; {self._quarantine.path} lists "
            "the samples that were left out: delete it to try them again",
        )


def _shield_children() -> None:
    """A Ctrl-C reaches the decoders of a terminal too: they inherit that it is held back here."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
