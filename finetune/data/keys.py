"""Keys of data files: which are read, which are harmless, and which are refused where unknown.

Inside a message, a part of its content or a file object every unknown key is a fault: dropping it
would change what is learned. In a row, metadata passes, and a stray key is a note, unless its name
says that it was meant to change what is learned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from apollo_cli.finetune.data.samples import Fault, shorten

SOUND = ("audio", "audios")
ROW = (
    *("messages", "conversations", "system", "video", "videos", "image", "images", *SOUND),
    *("from", "to", "choices", "id"),
)
MESSAGE = ("role", "content", "from", "value")
TEXT_PART = ("type", "text")
# A file stands in a message as a part, and beside the messages as an object of the same keys.
FILE = {"video": ("type", "video", "path", "from", "to"), "image": ("type", "image", "path")}

# What other tools call what we read, or read and we do not; with the key of ours, if there is one.
_MEANT = (
    dict.fromkeys(("start", "start_time", "start_seconds", "video_start", "begin"), "from")
    | dict.fromkeys(("end", "end_time", "end_seconds", "video_end", "stop"), "to")
    | dict.fromkeys(("options", "candidates", "multi_choice"), "choices")
    | dict.fromkeys(("video_path", "video_file", "video_name", "videopath"), "video")
    | dict.fromkeys(("image_path", "image_file", "image_name", "imagepath"), "image")
    | {"system_prompt": "system", "conversation": "conversations", "text": "content"}
)
_UNREAD = frozenset(
    [
        *("loss", "loss_mask", "loss_weight", "loss_scale", "weight", "mask", "train", "masked"),
        *("tools", "tool_calls", "functions", "chosen", "rejected", "rejected_response"),
        *("clip", "clips", "window", "segment", "span", "timestamps", "fps", "nframes", "frames"),
        *("num_frames", "max_frames", "min_frames", "max_pixels", "min_pixels", "crop", "bbox"),
        *("rotate", "objects", "answer", "answers", "answer_idx", "answer_index", "correct"),
    ]
)
_HARMLESS = frozenset(
    [
        *("", "index", "idx", "no", "number", "key", "name", "uuid", "source", "data_source"),
        *("dataset", "origin", "split", "subset", "task", "type", "question_type", "category"),
        *("domain", "topic", "tags", "level", "difficulty", "language", "lang", "license"),
        *("author", "annotator", "date", "created", "version", "url", "model", "note", "notes"),
        *("comment", "comments", "meta", "metadata", "extra", "info", "duration", "length"),
        *("frame_count", "width", "height", "resolution"),
    ]
)
# Names of metadata are short and like each other: only a near miss counts.
_NEAR = 0.75


def key_faults(
    where: str, what: str, found: Mapping[str, Any], known: Collection[str]
) -> list[Fault]:
    """A fault for each key that is not known; one without a value says nothing and passes.

    Args:
        where: the row. what: the object in it, such as ``message 2``.
    """
    return [
        _fault(where, what, key, known)
        for key, value in found.items()
        if key not in known and value is not None
    ]


def row_key_faults(where: str, row: Mapping[str, Any]) -> list[Fault]:
    """A fault for each key of a row that was meant to change what is learned."""
    return [_fault(where, "the row", key, ROW) for key in _unread(row) if _matters(key)]


def stray_keys(row: Mapping[str, Any]) -> list[str]:
    """Keys of a row that are neither read nor known to be harmless, nor a fault."""
    return [key for key in _unread(row) if not _is_harmless(key) and not _matters(key)]


def _unread(row: Mapping[str, Any]) -> list[str]:
    return [key for key, value in row.items() if value is not None and key not in ROW]


def _is_harmless(key: str) -> bool:
    name = key.lower()
    return name in _HARMLESS or name.endswith(("id", "ids")) or name.startswith("unnamed:")


def _matters(key: str) -> bool:
    return not _is_harmless(key) and (key.lower() in _UNREAD or bool(_nearest(key, ROW)))


def _nearest(key: str, known: Collection[str]) -> str:
    """The known key that was probably meant, or nothing."""
    meant = _MEANT.get(key.lower(), "")
    near = get_close_matches(key.lower(), known, n=1, cutoff=_NEAR)
    return meant if meant in known else near[0] if near else ""


def _fault(where: str, what: str, key: str, known: Collection[str]) -> Fault:
    nearest = _nearest(key, known)
    return Fault(
        "unknown_key",
        where,
        f'{what} has the key "{shorten(key, 60)}", which is not read',
        f"known are {', '.join(known)}",
        f"did you mean {nearest}?" if nearest else "",
    )
