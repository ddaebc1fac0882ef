"""What was watched last, ready for the next question."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from apollo_cli.ui.visit import Looked
from apollo_cli.video_memory import VideoMemory

if TYPE_CHECKING:
    from apollo_cli.conversation import Conversation

KEPT_BYTES = 2_000_000_000


class Shelf:
    """What was watched last, in memory; the rest is found again on disk. Safe for any thread.

    Args:
        videos: most that are kept. bytes_: most that their tokens take.
    """

    def __init__(self, videos: int, bytes_: int = KEPT_BYTES) -> None:
        self._limits = (videos, bytes_)
        self._lock = threading.Lock()
        self._rows: OrderedDict[object, list[VideoMemory]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def find(self, key: object) -> list[VideoMemory] | None:
        """What is kept under a key; it counts as used now."""
        with self._lock:
            found = self._rows.get(key)
            if found is not None:
                self._rows.move_to_end(key)
            return found

    def put(self, key: object, memories: list[VideoMemory]) -> None:
        """Keep what was watched last; what was not used for longest makes room."""
        videos, size = self._limits
        with self._lock:
            self._rows[key] = memories
            while len(self._rows) > 1 and (len(self) > videos or self._size() > size):
                self._rows.popitem(last=False)

    def _size(self) -> int:
        return sum(memory.tokens.nbytes for row in self._rows.values() for memory in row)


def identity(talk: Conversation, looked: Sequence[Looked]) -> object:
    """What decides which tokens a question is asked of."""
    files = tuple(one.key for one in looked)
    return (files, talk.sampling, talk.reading, talk.reserve_tokens)
