"""Decode in a child process: a hang or crash of a native library becomes one line.

The child decodes ahead of its owner by as many messages as there are slots, so decoding runs
beside the encoders. It ends when its owner does, since its standard input then ends.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import DeviceError, MediaError, UsageError
from apollo_cli.video.channel import Slot, create_file, decode, encode
from apollo_cli.video.container import DEFAULT_LIMITS, Limits, resolve_file, shown
from apollo_cli.video.info import VideoInfo, unpack_info
from apollo_cli.video.patience import Patience
from apollo_cli.video.reader import DEFAULT_READING, ClipBatch, Frame, ReadReport
from apollo_cli.video.transforms import PixelSpec

_ERRORS = {"MediaError": MediaError, "UsageError": UsageError}
_SLOTS = 3
_READ_BYTES = 1 << 16
_LOOK_SECONDS = 0.25

# On a busy machine the child may need long to load its libraries.
_START_SECONDS = 300


class GuardedReader:
    """Probes and reads like ``probe`` and ``reader``, in a child that may be ended at any time.

    The child starts with the first use and serves one reading after the other; a reading that is
    left early is cancelled. Use it as a context manager, from one thread.

    Args:
        stall_seconds: longest time without any progress before the child is ended. Its start does
            not count, nor does time in which a busy machine does not let it work.
        limits: as in ``probe``.
    """

    def __init__(self, *, stall_seconds: float = 30.0, limits: Limits = DEFAULT_LIMITS) -> None:
        self._stall_seconds = stall_seconds
        self._limits = limits
        self._child: subprocess.Popen[bytes] | None = None
        self._slots: list[Slot] = []
        self._buffer = b""
        self._has_started = False
        self._request = 0
        self._limit_seconds = self._deadline = math.inf

    def __enter__(self) -> GuardedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_id(self) -> int | None:
        """Of the child, None when none runs."""
        return None if self._child is None else self._child.pid

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Give everything that is asked inside so much time together; past it, a MediaError."""
        self._deadline = time.monotonic() + seconds
        self._limit_seconds = seconds
        try:
            yield
        finally:
            self._deadline = math.inf

    def probe(
        self, path: str | Path, *, stream: int | None = None, image_fps: float | None = None
    ) -> VideoInfo:
        """As ``apollo_cli.video.probe.probe``.

        Raises:
            MediaError: also when the decoder hangs or crashes.
        """
        is_folder = image_fps is not None and os.path.isdir(path)
        # Opening a pipe would hang: the owner looks first, so that this costs no child.
        absolute = Path(os.path.abspath(path)) if is_folder else resolve_file(path)
        request = {"task": "probe", "path": str(absolute), "stream": stream, "image_fps": image_fps}
        ((fields, arrays),) = self._ask(absolute, request)
        return unpack_info(fields, arrays)

    def read_frames(
        self,
        info: VideoInfo,
        times: Sequence[float] | np.ndarray,
        reading: ReadingOptions = DEFAULT_READING,
        *,
        report: ReadReport | None = None,
    ) -> Iterator[Frame]:
        """As ``apollo_cli.video.reader.read_frames``.

        Raises:
            MediaError: also when the decoder hangs or crashes.
        """
        request = {"task": "frames", "reading": asdict(reading), **_source(info, times)}
        for fields, arrays in self._ask(info.path, request):
            _copy_report(fields["report"], report)
            yield Frame(
                fields["position"], fields["wanted_seconds"], fields["seconds"], arrays["rgb"]
            )

    def read_clips(
        self,
        info: VideoInfo,
        times: np.ndarray,
        specs: Sequence[PixelSpec],
        reading: ReadingOptions = DEFAULT_READING,
        *,
        batch_clips: int = 4,
        report: ReadReport | None = None,
    ) -> Iterator[ClipBatch]:
        """As ``apollo_cli.video.reader.read_clips``.

        Raises:
            MediaError: also when the decoder hangs or crashes.
        """
        request = {
            "task": "clips",
            "specs": [asdict(spec) for spec in specs],
            "batch_clips": batch_clips,
            "reading": asdict(reading),
            **_source(info, times),
        }
        for fields, arrays in self._ask(info.path, request):
            _copy_report(fields["report"], report)
            seconds = arrays.pop("times")
            yield ClipBatch(fields["first_clip"], arrays, seconds)

    def check_pictures(self, info: VideoInfo) -> ReadReport:
        """As ``apollo_cli.video.reader.check_pictures``.

        Raises:
            MediaError: also when the decoder hangs or crashes.
        """
        ((fields, _),) = self._ask(info.path, {"task": "check", **_source(info, [])})
        return ReadReport(**fields["report"])

    def interrupt(self) -> None:
        """End the child from another thread; what is being read fails with a MediaError."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the child, whatever it is doing."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
            os.close(self._complaints)
        for slot in self._slots:
            slot.close()
        self._slots = []
        self._buffer = b""
        self._has_started = False

    def _start(self) -> subprocess.Popen[bytes]:
        if sys.platform == "win32":
            raise DeviceError(
                "Windows has no way to hand pictures over from the decoder's process",
                next_step="run apollo inside WSL",
            )
        self._slots = [Slot() for _ in range(_SLOTS)]
        descriptors = [slot.descriptor for slot in self._slots]
        self._complaints = create_file()
        self._child = subprocess.Popen(
            # -P: a module that lies about in the user's folder is never imported.
            [sys.executable, "-P", "-m", "apollo_cli.video.worker", *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            pass_fds=descriptors,
            bufsize=0,
            env=child_environment(),
        )
        return self._child

    def _ask(
        self, path: Path, request: dict[str, Any]
    ) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        child = self._child or self._start()
        self._request += 1
        number = self._request
        self._tell(path, {"id": number, "limits": asdict(self._limits), **request})
        finished = False
        try:
            while True:
                message = self._hear(path, child)
                if message.get("id") != number:
                    self._release(path, message)
                elif "done" in message:
                    finished = True
                    return
                elif "error" in message:
                    finished = True
                    raise _ERRORS[message["kind"]](*message["error"])
                else:
                    arrays = self._slots[message["slot"]].read(message["places"])
                    self._release(path, message)
                    yield message["fields"], arrays
        finally:
            if not finished and self._child is child:
                self._tell(path, {"cancel": number})

    def _release(self, path: Path, message: dict[str, Any]) -> None:
        if "slot" in message:
            self._tell(path, {"free": message["slot"]})

    def _tell(self, path: Path, message: dict[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(encode(message))
        except BrokenPipeError:
            raise self._crash(path) from None

    def _hear(self, path: Path, child: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert child.stdout is not None
        patience = Patience(child.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                most = self._stall_seconds if self._has_started else _START_SECONDS
                left = min(_LOOK_SECONDS, self._deadline - time.monotonic())
                if not selector.select(max(0.0, left)):
                    if patience.look() >= most or time.monotonic() >= self._deadline:
                        raise self._give_up(path)
                    continue
                data = os.read(child.stdout.fileno(), _READ_BYTES)
                if not data:
                    raise self._crash(path)
                self._buffer += data
        self._has_started = True
        if time.monotonic() > self._deadline:
            raise self._give_up(path)
        line, self._buffer = self._buffer.split(b"\n", 1)
        return decode(line)

    def _give_up(self, path: Path) -> MediaError:
        self.close()
        late = time.monotonic() >= self._deadline
        return MediaError(
            f"{shown(path)}: "
            + (
                f"reading took longer than {self._limit_seconds:g} s"
                if late
                else f"decoding made no progress for {self._stall_seconds:g} s"
            ),
            next_step="convert the file, or try another decoder",
        )

    def _crash(self, path: Path) -> MediaError:
        assert self._child is not None
        code = self._child.wait()
        size = os.fstat(self._complaints).st_size
        text = os.pread(self._complaints, size, 0).decode(errors="replace")
        last = text.strip().splitlines()[-1:]
        self.close()
        if -code in (signal.SIGKILL, signal.SIGTERM):
            return MediaError(
                f"{shown(path)}: the decoder's process was ended from outside (signal {-code})",
                "systems do so when memory runs out",
                "close other programs, then try again",
            )
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return MediaError(
            f"{shown(path)}: the decoder crashed ({', '.join([how, *last])})",
            next_step="convert the file, or try another decoder",
        )


def child_environment() -> dict[str, str]:
    """The environment of a child that runs a module of this very package, wherever it lies."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _source(info: VideoInfo, times: Sequence[float] | np.ndarray) -> dict[str, Any]:
    wanted = np.asarray(times, dtype=np.float64).tolist()
    image_fps = info.source_fps if info.files else None
    return {
        "path": str(info.path),
        "stream": info.stream_index,
        "image_fps": image_fps,
        "times": wanted,
        "identity": list(info.identity),
    }


def _copy_report(found: dict[str, Any], report: ReadReport | None) -> None:
    if report is not None:
        vars(report).update(found)
