"""The record of a video memory: how it was made. Read without torch.

Source of truth for the file's name, its format number, and the place of the record in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from apollo_cli._version import __version__
from apollo_cli.config import SubtitleStyle
from apollo_cli.errors import MediaError

SUFFIX = ".apollo"
FORMAT = 2
RECORD_KEY = "apollo_memory"


@dataclass(frozen=True)
class MemoryRecord:
    """How a memory was made.

    Attributes:
        model: name of the model. fingerprint: of its encoders and connector.
        source: identity of the file, as ``memory_cache.identify`` gives it.
        path, kind, duration_seconds, clip_seconds: as in ``VideoMemory``.
        window: start and end in seconds. span_seconds: length of a clip.
        clips: how many there are. wanted_clips: how many would show everything.
        notes: as in ``VideoMemory``.
        subtitles: start, end and text of each. subtitle_style: how they are told.
        is_uniform: as in ``ClipPlan``.
        decoder: who read the pictures. damaged: how many were; -1 in files that do not tell.
        digest: SHA-256 of times and tokens as they are stored; empty until the file is finished.
    """

    model: str
    fingerprint: str
    source: str
    path: str
    kind: str
    duration_seconds: float
    clip_seconds: float
    window: tuple[float, float]
    span_seconds: float
    clips: int
    wanted_clips: int
    notes: tuple[str, ...] = ()
    subtitles: tuple[tuple[float, float, str], ...] = ()
    subtitle_style: SubtitleStyle = "listed"
    is_uniform: bool = False
    decoder: str = ""
    damaged: int = -1
    digest: str = ""
    version: str = __version__
    format: int = FORMAT

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.__dict__, ensure_ascii=True, sort_keys=True)


def read_record(path: Path) -> MemoryRecord:
    """Read how a memory was made.

    Raises:
        MediaError: the file is missing, damaged, or not a video memory.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        values = json.loads(metadata[RECORD_KEY])
        if values["format"] != FORMAT:
            raise MediaError(
                f"{path.name}: a video memory of format {values['format']}",
                f"this version reads format {FORMAT}",
                "remember the video again",
            )
        for field in ("window", "notes"):
            values[field] = tuple(values[field])
        values["subtitles"] = tuple(tuple(row) for row in values["subtitles"])
        return MemoryRecord(**values)
    except FileNotFoundError as error:
        raise MediaError(f"{path}: no such file") from error
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise MediaError(
            f"{path.name}: not a video memory, or damaged", next_step="remember the video again"
        ) from error
