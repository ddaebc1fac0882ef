"""What is known of media files, kept among our own, so that a second look is quick."""

from __future__ import annotations

import hashlib
import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from apollo_cli._version import __version__
from apollo_cli.atomic import write_whole
from apollo_cli.video.info import VideoInfo
from apollo_cli.weights.files import apollo_home

_MOST_FRAMES = 10**8
_LARGEST_CACHE = 512 * 2**20


@dataclass(frozen=True)
class FileFacts:
    """What a plan needs to know of a file, small enough to keep of ten thousand files.

    The times of single pictures are left out and taken as evenly spaced. Where they are not, the
    words of a time label may differ by a digit, and so may the length of a sample.

    Attributes:
        first_seconds, last_seconds: when the first and the last picture appear.
        others: as in ``VideoInfo``.
    """

    kind: Literal["video", "image"]
    duration_seconds: float
    frames: int
    first_seconds: float
    last_seconds: float
    source_fps: float | None
    constant_rate: bool
    tick_seconds: float
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, info: VideoInfo) -> FileFacts:
        """The facts of a probed file."""
        return cls(
            info.kind,
            info.duration_seconds,
            len(info.times),
            float(info.times[0]),
            float(info.times[-1]),
            info.source_fps,
            info.constant_rate,
            info.tick_seconds,
            info.warnings,
        )

    def info(self, path: Path) -> VideoInfo:
        """What can be planned with; nothing can be read with it."""
        return VideoInfo(
            path=path,
            kind=self.kind,
            times=np.linspace(self.first_seconds, self.last_seconds, self.frames),
            duration_seconds=self.duration_seconds,
            stored_size=(0, 0),
            display_size=(0, 0),
            codec="",
            container="",
            source_fps=self.source_fps,
            constant_rate=self.constant_rate,
            tick_seconds=self.tick_seconds,
        )


class FactsCache:
    """Facts of files on disk, known by path, size and time of change.

    Args:
        path: a JSON file; one that is missing, damaged or of another version counts as empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[str, list[Any]] = {}
        try:
            if path.stat().st_size <= _LARGEST_CACHE:
                kept = json.loads(path.read_text("utf-8"))
                if kept["version"] == __version__ and isinstance(kept["files"], dict):
                    self._rows = kept["files"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass

    def get(self, path: Path) -> FileFacts | None:
        """The facts of a file that has not changed since."""
        row = self._rows.get(str(path))
        try:
            if row is None or row[:2] != read_stamp(path):
                return None
            facts = FileFacts(**{**row[2], "warnings": tuple(row[2]["warnings"])})
            numbers = (facts.duration_seconds, facts.first_seconds, facts.last_seconds)
            is_sound = all(map(math.isfinite, numbers)) and 0 < facts.frames < _MOST_FRAMES
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        return facts if is_sound and facts.kind in ("video", "image") else None

    def put(self, path: Path, facts: FileFacts) -> None:
        """Remember the facts of a file."""
        self._rows[str(path)] = [*read_stamp(path), asdict(facts)]

    def save(self) -> None:
        """Write them down; a place that cannot be written is no loss."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps({"version": __version__, "files": self._rows}))


def facts_file(output: Path) -> Path:
    """Where facts are kept of the files that a result learns from."""
    name = hashlib.sha256(os.fsencode(output)).hexdigest()[:20]
    return apollo_home() / "facts" / f"{name}.json"


def read_stamp(path: Path) -> list[int]:
    """Size and time of the last change of a file.

    Raises:
        OSError: there is none.
    """
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
