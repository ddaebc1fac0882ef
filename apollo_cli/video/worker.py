"""The child process that decodes, and the messages between it and its owner.

``guard`` starts it, writes requests to its standard input and reads its standard output. It serves
one owner, and ends with it. A message is JSON, with the raw bytes of arrays behind it. Nothing
that arrives is executed: a message holds plain values, arrays, and the dataclasses that are listed
here, each taken apart into its fields.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError, UsageError
from apollo_cli.video.container import steps
from apollo_cli.video.info import Timeline, VideoInfo
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import Frames, check_pictures, read_clips, read_frames
from apollo_cli.video.transforms import PixelSpec

# What may be asked for. An iterator is answered by one result for each of its items.
TASKS: dict[str, Callable[..., Any]] = {
    "probe": probe,
    "read_frames": read_frames,
    "read_clips": read_clips,
    "check_pictures": check_pictures,
}

_BEAT_SECONDS = 0.25

# Without a heartbeat for this long the system ends the process, even inside of native code.
_LAST_RESORT_SECONDS = 300

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Request:
    """What the owner wants.

    Attributes:
        number: of the request, from 1.
        task: a name among ``worker.TASKS``, or ``cancel`` for the request of that number.
        arguments: of the task, by name.
    """

    number: int
    task: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the child answers.

    Attributes:
        number: of the request; 0 for a heartbeat.
        kind: ``result`` (any number of them), then ``done`` or the name of an error class.
        content: the result, or the three parts of the error's message.
    """

    number: int
    kind: str
    content: Any = None


_CLASSES: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (Request, Reply, ReadingOptions, VideoInfo, Timeline, PixelSpec, Frames)
}


def encode(message: Request | Reply) -> list[memoryview]:
    """The bytes of a message, to be written one after the other."""
    arrays: list[np.ndarray] = []

    def pack(value: Any) -> dict[str, Any]:
        if isinstance(value, np.ndarray):
            arrays.append(np.asarray(value, order="C"))
            return {"class": "array", "dtype": value.dtype.str, "shape": value.shape}
        if isinstance(value, (Path, Fraction)):
            return {"class": "Path" if isinstance(value, Path) else "Fraction", "text": str(value)}
        assert is_dataclass(value)
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"class": type(value).__name__, **parts}

    # JSON in ASCII keeps the bytes of a file's name that are not valid text.
    text = json.dumps(message, default=pack).encode("ascii")
    return [memoryview(len(text).to_bytes(_LENGTH_BYTES, "big") + text), *map(_bytes_of, arrays)]


def send(pipe: int, message: Request | Reply, wait: Callable[[], None] = lambda: None) -> None:
    """Write a message.

    Args:
        wait: is called before each part of it.
    """
    for part in encode(message):
        rest = part
        while rest:
            wait()
            rest = rest[os.write(pipe, rest) :]


def receive(pipe: int, wait: Callable[[], None] = lambda: None) -> Any:
    """Read the next message; unlike a file object this holds no lock while it waits.

    Args:
        wait: is called before each part of it.

    Raises:
        EOFError: the other process has ended.
    """

    def read(memory: memoryview) -> memoryview:
        rest = memory
        while rest:
            wait()
            count = os.readv(pipe, [rest])
            if not count:
                raise EOFError
            rest = rest[count:]
        return memory

    def unpack(parts: dict[str, Any]) -> Any:
        match parts.pop("class", None):
            case None:
                return parts
            case "array":
                # Arrays stand behind the JSON in the order in which they are named in it.
                array = np.empty(parts["shape"], parts["dtype"])
                read(_bytes_of(array))
                return array
            case "Path":
                return Path(parts["text"])
            case "Fraction":
                return Fraction(parts["text"])
            case name:
                # JSON knows no tuples; fields hold no lists.
                plain = {k: _tuple(v) if isinstance(v, list) else v for k, v in parts.items()}
                return _CLASSES[name](**plain)

    length = int.from_bytes(read(memoryview(bytearray(_LENGTH_BYTES))), "big")
    return json.loads(bytes(read(memoryview(bytearray(length)))), object_hook=unpack)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _tuple(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(value) if isinstance(value, list) else value for value in values)


class Worker:
    """Serves one request after the other."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._cancelled = 0
        self._out = os.dup(1)
        self._writing = threading.Lock()
        # What a library prints must not be taken for a reply.
        os.dup2(2, 1)

    def run(self) -> None:
        """Serve until the owner is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        while True:
            request = self._requests.get()
            number = request.number
            try:
                made = TASKS[request.task](**request.arguments)
                for result in made if isinstance(made, Iterator) else [made]:
                    if self._cancelled == number:
                        break
                    self._reply(number, "result", result)
                self._reply(number, "done")
            except (MediaError, UsageError) as error:
                parts = [error.received, error.allowed, error.next_step]
                self._reply(number, type(error).__name__, parts)

    def _reply(self, number: int, kind: str, content: Any = None) -> None:
        with self._writing:
            send(self._out, Reply(number, kind, content))

    def _listen(self) -> None:
        try:
            while True:
                request = receive(0)
                if request.task == "cancel":
                    self._cancelled = request.number
                else:
                    self._requests.put(request)
        finally:
            # The owner has ended, so this process does, too.
            os._exit(0)

    def _beat(self) -> None:
        """Report progress, so that the owner does not take slow work for a hang."""
        last = -1
        while True:
            time.sleep(_BEAT_SECONDS)
            if hasattr(signal, "alarm"):
                signal.alarm(_LAST_RESORT_SECONDS)
            # Never wait for the pipe here: that would delay the next alarm. A full pipe, or one in
            # use, shows progress by itself.
            if steps() != last and self._writing.acquire(blocking=False):
                try:
                    if select.select([], [self._out], [], 0)[1]:
                        last = steps()
                        send(self._out, Reply(0, "heartbeat"))
                finally:
                    self._writing.release()


if __name__ == "__main__":
    # Ctrl-C reaches both processes; the owner handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Worker().run()
