"""Messages between the guarded decoder and its owner: lines of JSON, and arrays in shared memory.

Nothing that arrives is executed: a message is plain values and raw arrays. The memory is an
unnamed file that both sides map; it is gone when both have closed it, however they end.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from typing import Any

import numpy as np

_ALIGNMENT = 64


class Slot:
    """Shared memory for the arrays of one message at a time; it grows as needed.

    Attributes:
        descriptor: of the file, to be passed on to the other side.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = create_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def close(self) -> None:
        """Give up this side's hold of the memory."""
        self._map = None
        os.close(self.descriptor)

    def write(self, arrays: dict[str, np.ndarray]) -> list[list[Any]]:
        """Copy arrays in; returns what the other side needs to find them."""
        places: list[list[Any]] = []
        end = 0
        for name, array in arrays.items():
            places.append([name, array.dtype.str, list(array.shape), end])
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._mapped(end)
        for (_, dtype, shape, start), array in zip(places, arrays.values(), strict=True):
            if array.size:
                np.frombuffer(memory, dtype, array.size, start).reshape(shape)[...] = array
        return places

    def read(self, places: list[list[Any]]) -> dict[str, np.ndarray]:
        """Copy the arrays of one message out."""
        found = {}
        for name, dtype, shape, start in places:
            array = np.empty(shape, dtype)
            if array.size:
                memory = self._mapped(start + array.nbytes)
                array.reshape(-1)[:] = np.frombuffer(memory, dtype, array.size, start)
            found[name] = array
        return found

    def _mapped(self, length: int) -> mmap.mmap:
        length = max(-(-length // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        if self._map is None or len(self._map) < length:
            length = max(length, os.fstat(self.descriptor).st_size)
            os.ftruncate(self.descriptor, length)
            self._map = mmap.mmap(self.descriptor, length)
        return self._map


def create_file() -> int:
    """Descriptor of an empty file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("apollo-decoder")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def encode(message: dict[str, Any]) -> bytes:
    """One line of JSON; names of files keep bytes that are not valid text."""
    return json.dumps(message).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message of one line."""
    return json.loads(line)
