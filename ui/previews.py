"""Which files a browser plays, and light copies of the others, made on the side and kept."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from apollo_cli.memory_cache import identify
from apollo_cli.video.container import shown
from apollo_cli.video.guard import child_environment
from apollo_cli.weights.files import apollo_home

_LOG = logging.getLogger("apollo_cli.ui")
_LOOK_SECONDS, _STALL_SECONDS = 20.0, 60.0
_MOST_BYTES = 5_000_000_000
_KEPT_LOOKS = 1000
_LOOKS_AT_ONCE = 2
# A file that changed within this time is taken as one that is still being written.
_WRITING_SECONDS = 2.0


@dataclass(frozen=True)
class Look:
    """What a browser makes of a file.

    Attributes:
        kind: which element shows it. media_type: for the player; empty for ``none``.
        reason: why it does not play; empty when it does.
    """

    kind: Literal["video", "image", "none"]
    media_type: str = ""
    reason: str = ""

    @property
    def plays(self) -> bool:
        """Whether the file itself can be given to the player."""
        return self.kind != "none" and not self.reason


@dataclass
class Job:
    """One preview.

    Attributes:
        source: the file. target: where the preview goes. share: done, 0 to 1.
        failure: why there will be none; empty while there is hope.
        is_dropped: nobody looks at the file any more, or it has changed.
    """

    source: Path
    target: Path
    share: float = 0.0
    failure: str = ""
    is_dropped: bool = False


class Previews:
    """Looks at files and makes previews, one at a time, each in a child of low priority.

    All methods may be called from any thread.

    Args:
        folder: where previews are kept; None for the one of this user.
        most_bytes: that the folder may take; the ones that were used least lately go first.

    Attributes:
        is_wanted: whether somebody looks at a file; the preview of another is not gone on with.
    """

    def __init__(self, folder: Path | None = None, most_bytes: int = _MOST_BYTES) -> None:
        self.folder = folder or apollo_home() / "previews"
        self._most_bytes = most_bytes
        self._looks: dict[tuple[str, int, int], Look] = {}
        self._jobs: dict[Path, Job] = {}
        self.is_wanted: Callable[[Path], bool] = lambda path: True
        self._waiting: list[Job] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._looking = threading.Semaphore(_LOOKS_AT_ONCE)
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def look(self, path: Path, *, is_patient: bool = False) -> Look:
        """Judge a file by its content; a later call for the unchanged file costs nothing.

        Args:
            is_patient: while a file that needs a preview is written, what it was before will do.
        """
        try:
            facts = path.stat()
        except OSError as error:
            return Look("none", reason=f"it cannot be read ({error.strerror})")
        key = (str(path), facts.st_size, facts.st_mtime_ns)
        seen = self._looks.get(key)
        if seen is None and is_patient and is_being_written(facts):
            with self._lock:
                looks = [seen for known, seen in self._looks.items() if known[0] == key[0]]
            if looks and looks[-1].kind != "none" and not looks[-1].plays:
                return looks[-1]
        if seen is None:
            with self._looking:
                seen = self._looks.get(key) or _look(path)
            with self._lock:
                self._looks[key] = seen
                while len(self._looks) > _KEPT_LOOKS:
                    del self._looks[next(iter(self._looks))]
        return seen

    def job(self, path: Path) -> Job:
        """The preview of a file that a browser does not play; it is begun when there is none.

        Raises:
            OSError: the file is gone.
        """
        target = self.target(path)
        with self._lock:
            job = self._jobs.get(target)
            # One that was made may have been deleted since, by hand or by the limit.
            is_lost = job is not None and job.share >= 1 and not target.exists()
            if job is None or job.is_dropped or is_lost:
                for other in self._jobs.values():
                    other.is_dropped |= other.source == path
                job = self._jobs[target] = Job(path, target)
                if target.exists():
                    job.share = 1.0
                elif self._closed:
                    job.failure = "the server is ending"
                else:
                    self._start()
                    self._waiting.append(job)
                    self._changed.notify()
        if job.share >= 1:
            with contextlib.suppress(OSError):
                os.utime(target)
        return job

    def target(self, path: Path) -> Path:
        """Where the preview of a file stands, once it does.

        Raises:
            OSError: the file is gone.
        """
        suffix = ".jpg" if self.look(path).kind == "image" else ".mp4"
        return self.folder / f"{identify(path)[:40]}{suffix}"

    def forget_failure(self, path: Path) -> None:
        """Forget what went wrong with a file: a full disk, say, may have room by now.

        It is asked for anew, so its preview comes before the others.
        """
        with self._lock:
            self._waiting.sort(key=lambda job: job.source == path)
            jobs, looks = self._jobs.items(), self._looks.items()
            self._jobs = {
                target: job for target, job in jobs if not (job.source == path and job.failure)
            }
            self._looks = {
                key: seen for key, seen in looks if key[0] != str(path) or seen.kind != "none"
            }

    def close(self) -> None:
        """End the child and the thread."""
        with self._lock:
            self._closed = True
            thread, child = self._thread, self._child
            self._changed.notify()
        if child is not None:
            child.kill()
        if thread is not None:
            thread.join(timeout=10)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="previews", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                job.failure = self._make(job)
            except OSError as error:
                job.failure = f"no preview could be written ({error.strerror})"
            if job.is_dropped:
                self._forget(job)
                # It may have been done just before that was noticed.
                with contextlib.suppress(OSError):
                    job.target.unlink()
            elif job.failure:
                _LOG.warning("no preview of %s: %s", shown(job.source.name), job.failure)
            elif not self._closed:
                job.share = 1.0
                self._prune(job.target)

    def _take(self) -> Job | None:
        """Of the jobs that are wanted, the one that was asked for last; None at the end."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return None
                job = self._waiting.pop()
            if not self._is_over(job):
                return job
            self._forget(job)

    def _is_over(self, job: Job) -> bool:
        job.is_dropped = job.is_dropped or not self.is_wanted(job.source)
        return job.is_dropped or self._closed

    def _forget(self, job: Job) -> None:
        with self._lock:
            if self._jobs.get(job.target) is job:
                del self._jobs[job.target]

    def _make(self, job: Job) -> str:
        """Make one preview; returns why it failed, or nothing."""
        child = _start_child("make", job.source, job.target)
        with self._lock:
            self._child = child
        try:
            for message in _messages(child, _STALL_SECONDS, lambda: self._is_over(job)):
                if "error" in message:
                    return str(message["error"])
                if "done" in message:
                    return ""
                job.share = min(0.999, float(message["share"]))
            return "" if self._closed or job.is_dropped else "it could not be converted"
        finally:
            with self._lock:
                self._child = None
            _end(child)
            for part in self.folder.glob(f"{job.target.name}.{child.pid}.part"):
                part.unlink(missing_ok=True)

    def _prune(self, keep: Path) -> None:
        found = []
        for path in self.folder.glob("*"):
            with contextlib.suppress(OSError):
                facts = path.lstat()
                if stat.S_ISREG(facts.st_mode):
                    found.append((facts.st_mtime, facts.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._most_bytes:
                break
            if path != keep:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size


def is_being_written(facts: os.stat_result) -> bool:
    """Whether a file changed just now, so that what is made of it would soon be of the past."""
    return 0 <= time.time() - facts.st_mtime < _WRITING_SECONDS


def _look(path: Path) -> Look:
    child = _start_child("look", path)
    try:
        for message in _messages(child, _LOOK_SECONDS, lambda: False):
            if "error" in message:
                return Look("none", reason=str(message["error"]))
            return Look(message["kind"], message["type"], message["reason"])
    finally:
        _end(child)
    return Look("none", reason=f"{shown(path.name)} could not be looked at")


def _start_child(task: str, *paths: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: a module that lies about in the user's folder is never imported.
        [sys.executable, "-P", "-m", "apollo_cli.ui.encoding", task, *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
    )


def _messages(
    child: subprocess.Popen[bytes], stall_seconds: float, is_unwanted: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """Messages of a child until it ends, stalls, or nobody wants it any more."""
    assert child.stdout is not None
    buffer, deadline = b"", time.monotonic() + stall_seconds
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline and not is_unwanted():
            if not selector.select(0.25):
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                yield json.loads(line)
            deadline = time.monotonic() + stall_seconds


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
