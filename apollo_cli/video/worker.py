"""The child process that decodes: it obeys one owner, and ends with it.

Started by ``guard`` with the descriptors of its shared memory as arguments. Requests come as
lines on standard input, answers go out as lines on standard output.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError, UsageError
from apollo_cli.video import progress
from apollo_cli.video.channel import Slot, decode, encode
from apollo_cli.video.container import Limits, identify, unchanged
from apollo_cli.video.info import VideoInfo, pack_info
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import ReadReport, check_pictures, read_clips, read_frames
from apollo_cli.video.transforms import PixelSpec

_BEAT_SECONDS = 0.25

# Without a heartbeat for this long the system ends the process, even inside of native code.
_LAST_RESORT_SECONDS = 300

# Training opens thousands of files with one child; a forgotten one is probed again.
_KEPT_INFOS = 16

Answer = tuple[dict[str, Any], dict[str, np.ndarray]]


class Worker:
    """Serves one request after the other."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._cancelled = -1
        self._infos: dict[tuple[str, int, tuple[int, ...]], VideoInfo] = {}
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        self._writing = threading.Lock()
        # What a library prints must not be taken for an answer.
        os.dup2(2, 1)
        for number in range(len(slots)):
            self._free.put(number)

    def run(self) -> None:
        """Serve until the owner is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        while True:
            request = self._requests.get()
            try:
                for fields, arrays in self._serve(request):
                    if self._cancelled == request["id"]:
                        break
                    self._send(request["id"], fields, arrays)
                self._write({"id": request["id"], "done": True})
            except (MediaError, UsageError) as error:
                parts = [error.received, error.allowed, error.next_step]
                kind = type(error).__name__
                self._write({"id": request["id"], "error": parts, "kind": kind})

    def _listen(self) -> None:
        for line in _lines(0):
            message = decode(line)
            if "free" in message:
                self._free.put(message["free"])
            elif "cancel" in message:
                self._cancelled = message["cancel"]
            else:
                self._requests.put(message)
        # The owner has gone, in whatever way: nobody is left to decode for.
        os._exit(0)

    def _beat(self) -> None:
        last = -1
        wait = threading.Event()
        while not wait.wait(_BEAT_SECONDS):
            if hasattr(signal, "alarm"):
                signal.alarm(_LAST_RESORT_SECONDS)
            now = progress.steps()
            if now != last:
                self._write({"steps": now})
                last = now

    def _write(self, message: dict[str, Any]) -> None:
        with self._writing:
            self._out.write(encode(message))

    def _send(self, request: int, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        slot = self._free.get()
        places = self._slots[slot].write(arrays)
        self._write({"id": request, "fields": fields, "slot": slot, "places": places})

    def _serve(self, request: dict[str, Any]) -> Iterator[Answer]:
        if request["task"] == "probe":
            yield pack_info(self._probe(request))
            return
        info = self._info(request)
        if request["task"] == "check":
            yield {"report": asdict(check_pictures(info))}, {}
            return
        report = ReadReport()
        reading = ReadingOptions(**request["reading"])
        times = np.array(request["times"], dtype=np.float64)
        if request["task"] == "frames":
            for frame in read_frames(info, times, reading, report=report):
                fields = {
                    "position": frame.position,
                    "wanted_seconds": frame.wanted_seconds,
                    "seconds": frame.seconds,
                    "report": asdict(report),
                }
                yield fields, {"rgb": frame.rgb}
        else:
            specs = [_read_spec(spec) for spec in request["specs"]]
            clips = request["batch_clips"]
            for batch in read_clips(info, times, specs, reading, batch_clips=clips, report=report):
                fields = {"first_clip": batch.first_clip, "report": asdict(report)}
                yield fields, {**batch.pixels, "times": batch.times}

    def _probe(self, request: dict[str, Any]) -> VideoInfo:
        info = probe(
            request["path"],
            stream=request["stream"],
            image_fps=request["image_fps"],
            limits=Limits(**request["limits"]),
        )
        # A folder of images has no identity of its own, but is not looked through each time.
        identity = info.identity or identify(info.path)
        self._infos[str(info.path), info.stream_index, identity] = info
        while len(self._infos) > _KEPT_INFOS:
            del self._infos[next(iter(self._infos))]
        return info

    def _info(self, request: dict[str, Any]) -> VideoInfo:
        """What the owner has looked at.

        Raises:
            MediaError: the file is another one by now.
        """
        path, seen = Path(request["path"]), tuple(request["identity"])
        with unchanged(path, seen):
            known = (str(path), request["stream"], seen or identify(path))
            return self._infos.get(known) or self._probe(request)


def _read_spec(fields: dict[str, Any]) -> PixelSpec:
    # JSON knows no tuples.
    tuples: dict[str, Any] = {name: tuple(fields[name]) for name in ("pad_colour", "mean", "std")}
    return PixelSpec(**(fields | tuples))


def _lines(descriptor: int) -> Iterator[bytes]:
    """Lines until the other end closes; unlike a file object this holds no lock while it waits."""
    rest = b""
    while data := os.read(descriptor, 1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def main() -> None:
    """Serve the owner that has started this process."""
    # Ctrl-C reaches the whole group; the owner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Worker([Slot(int(descriptor)) for descriptor in sys.argv[1:]]).run()


if __name__ == "__main__":
    main()
