"""The record of a video memory: how it was made. Read without torch.

Source of truth for the file's name, its format number, and the place of the record in it.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import get_args

from safetensors import SafetensorError, safe_open

from apollo_cli._version import __version__
from apollo_cli.config import SubtitleStyle
from apollo_cli.errors import MediaError
from apollo_cli.values import (
    NEEDED,
    Check,
    Values,
    any_text,
    flag,
    list_of,
    number,
    one_of,
    parse_object,
    row_of,
    show,
    whole,
)

SUFFIX = ".apollo"
FORMAT = 2
RECORD_KEY = "apollo_memory"
# Thirty years, and the clips of as many: no number beyond is one of a video.
MOST_SECONDS, MOST_CLIPS = 1e9, 10**9


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


_SECONDS = number(-MOST_SECONDS, MOST_SECONDS)
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("model", "fingerprint", "source", "path", "decoder"), any_text),
    **dict.fromkeys(("digest", "version"), any_text),
    "kind": one_of("video", "image"),
    "duration_seconds": number(0, MOST_SECONDS),
    "clip_seconds": number(0, MOST_SECONDS, above=True),
    "window": list_of(_SECONDS, count=2),
    "span_seconds": number(0, MOST_SECONDS, above=True),
    "clips": whole(1, MOST_CLIPS),
    "wanted_clips": whole(0, MOST_CLIPS),
    "notes": list_of(any_text),
    "subtitles": list_of(row_of(_SECONDS, _SECONDS, any_text)),
    "subtitle_style": one_of(*get_args(SubtitleStyle)),
    "is_uniform": flag,
    "damaged": whole(-1, MOST_CLIPS),
    "format": one_of(FORMAT),
}


def read_record(path: Path) -> MemoryRecord:
    """Read how a memory was made.

    Raises:
        MediaError: the file is missing, damaged, or not a video memory.
    """
    again = "remember the video again"
    try:
        with safe_open(path, framework="np") as file:
            values = parse_object((file.metadata() or {})[RECORD_KEY])
    except FileNotFoundError as error:
        raise MediaError(f"{path}: no such file") from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise MediaError(f"{path.name}: not a video memory, or damaged", next_step=again) from error
    if values.get("format") != FORMAT:
        raise MediaError(
            f"{path.name}: a video memory of format {show(values.get('format'))}",
            f"this version reads format {FORMAT}",
            again,
        )
    record = Values(values, path.name, faults := [])
    # Files of earlier versions leave out what has a default.
    found = {
        field.name: record.get(
            field.name, _CHECKS[field.name], NEEDED if field.default is MISSING else field.default
        )
        for field in fields(MemoryRecord)
    }
    for key in values.keys() - found.keys():
        record.refuse(show(key), "is no part of a record")
    if faults:
        raise MediaError("; ".join(faults), next_step=again)
    # As it is written: an int is printed as an int in the prompt.
    return MemoryRecord(**found | {"clip_seconds": values["clip_seconds"]})
