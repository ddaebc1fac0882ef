"""Messages between the guarded decoder and its owner: JSON, and the raw bytes of arrays behind it.

Nothing that arrives is executed: a message holds plain values, arrays, and the dataclasses that are
listed here, each taken apart into its fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from apollo_cli.config import ReadingOptions
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.reader import Frames
from apollo_cli.video.timeline import Timeline
from apollo_cli.video.transforms import PixelSpec

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


# For each name in a message: the type, how it becomes plain, and how it is made again. Arrays stand
# behind the JSON.
_Kind = tuple[type, Callable[[Any], Any], Callable[[Any], Any]]
_KINDS: dict[str, _Kind] = {
    "Path": (Path, str, Path),
    "Fraction": (Fraction, str, Fraction),
    "tuple": (tuple, list, tuple),
    "dict": (dict, lambda value: [list(item) for item in value.items()], dict),
}
for _class in (Request, Reply, ReadingOptions, VideoInfo, Timeline, PixelSpec, Frames):
    _KINDS[_class.__name__] = (
        _class,
        lambda value: [getattr(value, field.name) for field in fields(value)],
        lambda values, made=_class: made(*values),
    )


def encode(message: Request | Reply) -> list[memoryview]:
    """The bytes of a message, to be written one after the other."""
    arrays: list[np.ndarray] = []
    plain = _pack(message, arrays)
    layout = [[array.dtype.str, array.shape] for array in arrays]
    # JSON in ASCII keeps the bytes of a file's name that are not valid text.
    text = json.dumps([layout, plain]).encode("ascii")
    length = len(text).to_bytes(_LENGTH_BYTES, "big")
    return [memoryview(length + text), *map(_bytes_of, arrays)]


def decode(read: Callable[[memoryview], None]) -> Any:
    """The next message.

    Args:
        read: fills the memory that it is given with the bytes that come next.
    """
    length = bytearray(_LENGTH_BYTES)
    read(memoryview(length))
    text = bytearray(int.from_bytes(length, "big"))
    read(memoryview(text))
    layout, plain = json.loads(text)
    arrays = [np.empty(shape, dtype) for dtype, shape in layout]
    for array in arrays:
        read(_bytes_of(array))
    return _unpack(plain, arrays)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _pack(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(np.asarray(value, order="C"))
        return {"array": len(arrays) - 1}
    if isinstance(value, list):
        return [_pack(item, arrays) for item in value]
    for name, (kind, to_plain, _) in _KINDS.items():
        if isinstance(value, kind):
            return {name: _pack(to_plain(value), arrays)}
    return value


def _unpack(plain: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(plain, list):
        return [_unpack(item, arrays) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((name, content),) = plain.items()
    return arrays[content] if name == "array" else _KINDS[name][2](_unpack(content, arrays))
