"""The child process that decodes. It serves one owner, and ends with it.

``guard`` starts it, writes requests to its standard input and reads its standard output.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from apollo_cli.errors import MediaError, UsageError
from apollo_cli.video.channel import Reply, Request, receive, send
from apollo_cli.video.container import steps
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import check_pictures, read_clips, read_frames

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
