"""Decode in a child process, so that a hang or crash of a native library is one error message.

The child decodes one result ahead of its owner, beside the encoders. It ends when its owner does,
since its standard input then ends.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import DeviceError, MediaError, UsageError
from apollo_cli.video.container import DEFAULT_READING, resolve_file, shown
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.reader import Frames
from apollo_cli.video.transforms import PixelSpec
from apollo_cli.video.worker import Request, receive, send

_ERRORS = {"MediaError": MediaError, "UsageError": UsageError}
_POLL_SECONDS = 0.25
_PIPE_BYTES = 1 << 20

# On a busy machine the child may need long to load its libraries.
_START_SECONDS = 300


class GuardedReader:
    """Probes and reads as ``probe`` and ``reader`` do, in a child that may be ended at any time.

    The child starts at the first call and serves one reading after the other; a reading that the
    caller leaves early is cancelled. Use it as a context manager, from one thread. Each method also
    raises a MediaError when the decoder hangs or crashes.

    Attributes:
        stall_seconds: longest time without any progress before the child is ended. Its start does
            not count, nor does time in which a busy machine does not let it work.
    """

    def __init__(self, *, stall_seconds: float = 30.0) -> None:
        self.stall_seconds = stall_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._has_started = False
        self._number = 0
        self._limit_seconds = self._deadline = math.inf

    def __enter__(self) -> GuardedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_id(self) -> int | None:
        """Process number of the child; None when none runs."""
        return None if self._child is None else self._child.pid

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Limit the time of all calls inside together; past it they raise a MediaError."""
        self._deadline = time.monotonic() + seconds
        self._limit_seconds = seconds
        try:
            yield
        finally:
            self._deadline = math.inf

    def probe(self, path: str | Path, reading: ReadingOptions = DEFAULT_READING) -> VideoInfo:
        """As ``apollo_cli.video.probe.probe``."""
        is_folder = reading.image_fps is not None and os.path.isdir(path)
        # Opening a named pipe would hang: checked here, it costs no child.
        absolute = Path(os.path.abspath(path)) if is_folder else resolve_file(path)
        (info,) = self._call(absolute, "probe", path=absolute, reading=reading)
        return info

    def read_frames(
        self,
        info: VideoInfo,
        times: Sequence[float] | np.ndarray,
        reading: ReadingOptions = DEFAULT_READING,
    ) -> Iterator[Frames]:
        """As ``apollo_cli.video.reader.read_frames``."""
        wanted = np.asarray(times, np.float64)
        return self._call(info.path, "read_frames", info=info, times=wanted, reading=reading)

    def read_clips(
        self,
        info: VideoInfo,
        times: np.ndarray,
        specs: Sequence[PixelSpec],
        reading: ReadingOptions = DEFAULT_READING,
        *,
        batch_clips: int = 4,
    ) -> Iterator[Frames]:
        """As ``apollo_cli.video.reader.read_clips``."""
        arguments = {"specs": list(specs), "reading": reading, "batch_clips": batch_clips}
        return self._call(info.path, "read_clips", info=info, times=times, **arguments)

    def check_pictures(self, info: VideoInfo) -> list[float]:
        """As ``apollo_cli.video.reader.check_pictures``."""
        (damaged,) = self._call(info.path, "check_pictures", info=info)
        return list(damaged)

    def interrupt(self) -> None:
        """End the child from another thread; the reading in progress raises a MediaError."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout, self._complaints):
                if pipe is not None:
                    pipe.close()
        self._has_started = False

    def _start(self) -> subprocess.Popen[bytes]:
        if sys.platform == "win32":
            raise DeviceError(
                "Windows has no way to hand pictures over from the decoder's process",
                next_step="run apollo inside WSL",
            )
        import fcntl

        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - close does
        self._child = subprocess.Popen(
            # -P: Python imports no module from the user's current folder.
            [sys.executable, "-P", "-m", "apollo_cli.video.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,
            env=child_environment(),
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(AttributeError, OSError):
            # Where the system may do so: a batch of clips passes in fewer steps.
            fcntl.fcntl(self._child.stdout.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # A child that hangs reads nothing: a write must not wait for it.
        os.set_blocking(self._child.stdin.fileno(), False)
        return self._child

    def _call(self, path: Path, task: str, /, **arguments: Any) -> Iterator[Any]:
        """Run a task in the child; yields its results as they come."""
        child = self._child or self._start()
        assert child.stdout is not None
        answers = child.stdout.fileno()
        self._number += 1
        number, is_finished = self._number, False
        try:
            self._send(child, path, Request(number, task, arguments))
            while not is_finished:
                with self._whole_message(child, path):
                    reply = receive(answers, lambda: self._wait(answers, select.POLLIN))
                    self._has_started = True
                    if time.monotonic() > self._deadline:
                        raise TimeoutError
                # Others are heartbeats, or belong to a reading that was left early.
                if reply.number == number:
                    is_finished = reply.kind != "result"
                    if reply.kind in _ERRORS:
                        raise _ERRORS[reply.kind](*reply.content)
                    if reply.kind == "result":
                        yield reply.content
        finally:
            if not is_finished and self._child is child:
                self._send(child, path, Request(number, "cancel", {}))

    def _send(self, child: subprocess.Popen[bytes], path: Path, request: Request) -> None:
        assert child.stdin is not None
        pipe = child.stdin.fileno()
        with self._whole_message(child, path):
            send(pipe, request, lambda: self._wait(pipe, select.POLLOUT))

    def _wait(self, pipe: int, event: int) -> None:
        """Wait until a pipe is ready, as long as the child makes progress."""
        assert self._child is not None
        poll = select.poll()
        poll.register(pipe, event)
        most = self.stall_seconds if self._has_started else _START_SECONDS
        # Waits are counted instead of clocked: while both processes are stopped none passes.
        waited, (computed, _) = 0.0, _cpu_time(self._child.pid)
        while not poll.poll(1000 * max(0, min(_POLL_SECONDS, self._deadline - time.monotonic()))):
            before, (computed, wants_to_run) = computed, _cpu_time(self._child.pid)
            # A child that is ready to run and gets no CPU does not hang: the machine is busy.
            waited += computed - before if wants_to_run else _POLL_SECONDS
            if waited >= most or time.monotonic() >= self._deadline:
                raise TimeoutError

    @contextmanager
    def _whole_message(self, child: subprocess.Popen[bytes], path: Path) -> Iterator[None]:
        """End the child when a message breaks off: the bytes behind it would be misread.

        Raises:
            MediaError: the child has crashed, hangs, or has used up its time.
        """
        next_step = "convert the file, or try another decoder"
        try:
            yield
            return
        except TimeoutError:
            what = f"decoding made no progress for {self.stall_seconds:g} s"
            if time.monotonic() >= self._deadline:
                what = f"reading took longer than {self._limit_seconds:g} s"
        except (BrokenPipeError, EOFError):
            code = child.wait()
            self._complaints.seek(0)
            last = self._complaints.read().decode(errors="replace").strip().splitlines()[-1:]
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            what = f"the decoder crashed ({', '.join([how, *last])})"
            if -code in (signal.SIGKILL, signal.SIGTERM):
                what = f"the decoder's process was ended from outside ({how})"
                next_step = "close other programs, if memory has run out, then try again"
        except BaseException:
            self.close()
            raise
        self.close()
        raise MediaError(f"{shown(path)}: {what}", next_step=next_step)


def _cpu_time(process: int) -> tuple[float, bool]:
    """Seconds of CPU time of a process, and whether it runs or is ready to; 0, False elsewhere."""
    try:
        told = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0, False
    # The name in front may hold spaces and brackets.
    state, *fields = told.rpartition(")")[2].split()
    return sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK"), state == "R"


def child_environment() -> dict[str, str]:
    """The environment in which a child imports this very package, wherever it is installed."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
