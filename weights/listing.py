"""The listing of a repository: what a hub says of it, every value checked before it is used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.weights.checkpoint import CONNECTOR, LLM, TOWER
from apollo_cli.weights.files import PICKLE_SUFFIXES, is_commit
from apollo_cli.weights.transfer import Hub, RemoteFile, read_listing

PARTS = (LLM, TOWER, CONNECTOR)
_SUFFIXES = frozenset({".json", ".txt", ".safetensors"})
# A name that every system takes as it is, for a file below the folder: relative, neither hidden
# nor with an end that Windows drops or a name that stands for a device there.
_STEP = r"(?!(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|/|$))[\w+=,@-](?:[\w.+=,@ -]{0,198}[\w+=,@-])?"
_NAME = re.compile(rf"{_STEP}(?:/{_STEP}){{0,5}}", re.ASCII | re.IGNORECASE)
_HASHES = {"sha256": re.compile(r"[0-9a-f]{64}"), "blobId": re.compile(r"[0-9a-f]{40}")}
_MOST_BYTES = 1 << 50
_MOST_LABEL = 200


@dataclass(frozen=True)
class Listing:
    """What a hub says of one revision of a repository.

    Attributes:
        commit: 40 hexadecimal digits.
        files: those of the released layout that are read: .json, .txt and .safetensors.
        has_pickles: whether there are weights in files that can run code.
        licence: label of the repository; empty when it has none. licence_link: may be empty.
        gated: whether its terms must be accepted on its page first.
    """

    commit: str
    files: tuple[RemoteFile, ...]
    has_pickles: bool
    licence: str
    licence_link: str
    gated: bool

    @classmethod
    def read(cls, hub: Hub, revision: str) -> Listing:
        """Ask a hub, and check what it says.

        Raises:
            WeightsError: a value is missing, or of another kind than it must be.
        """
        listing = _Reader(hub, read_listing(hub, revision))
        commit = listing.value("sha")
        if not is_commit(commit):
            raise listing.refuse("sha", commit, "40 lower-case hexadecimal digits")
        rows = listing.value("siblings")
        if not isinstance(rows, list):
            raise listing.refuse("siblings", rows, "a list of files")
        rows = [listing.row("siblings", row) for row in rows]
        names = [listing.text(row, "rfilename", 4096) for row in rows]
        files = [listing.file(n, row) for n, row in zip(names, rows, strict=True) if _is_read(n)]
        lower = [file.name.lower() for file in files]
        taken = {str(folder) for name in lower for folder in PurePosixPath(name).parents}
        for name in lower:
            # Where case makes no difference, the second file would take the place of the first.
            if lower.count(name) > 1 or name in taken:
                raise listing.refuse("rfilename", name, "the only file or folder of its name")
        card = listing.row("cardData", listing.value("cardData") or {})
        labels = card.get("license")
        rows = [{"license": one} for one in (labels if isinstance(labels, list) else [labels])]
        label = ", ".join(listing.text(row, "license") for row in rows)[:_MOST_LABEL]
        name = listing.text(card, "license_name")
        return cls(
            commit=str(commit),
            files=tuple(files),
            has_pickles=any(PurePosixPath(name).suffix in PICKLE_SUFFIXES for name in names),
            licence=f"{label} ({name})" if label and name else label,
            licence_link=listing.text(card, "license_link"),
            gated=bool(listing.value("gated")),
        )


@dataclass(frozen=True)
class _Reader:
    """A listing as it came, and how its faults are told."""

    hub: Hub
    listing: dict[str, Any]

    def value(self, key: str) -> object:
        return self.listing.get(key)

    def text(self, row: dict[str, Any], key: str, most: int = _MOST_LABEL) -> str:
        """A text of a row; empty where there is none."""
        value = row.get(key)
        if value is not None and (not isinstance(value, str) or len(value) > most):
            raise self.refuse(key, value, f"a text of up to {most} characters")
        return value or ""

    def row(self, key: str, value: object) -> dict[str, Any]:
        """A value that must be an object."""
        if not isinstance(value, dict):
            raise self.refuse(key, value, "an object")
        return value

    def file(self, name: str, row: dict[str, Any]) -> RemoteFile:
        """A file of the listing."""
        if not _NAME.fullmatch(name):
            raise self.refuse("rfilename", name, "a plain name below the folder of the model")
        is_large = row.get("lfs") is not None
        key, where = ("sha256", self.row("lfs", row["lfs"])) if is_large else ("blobId", row)
        size, digest = where.get("size"), where.get(key)
        if type(size) is not int or not 0 <= size <= _MOST_BYTES:
            raise self.refuse(f"the size of {name}", size, f"a number of bytes up to {_MOST_BYTES}")
        if not isinstance(digest, str) or not _HASHES[key].fullmatch(digest):
            raise self.refuse(f"the {key} of {name}", digest, "a lower-case hexadecimal hash")
        return RemoteFile(name, size, *((digest, None) if is_large else (None, digest)))

    def refuse(self, key: str, value: object, allowed: str) -> WeightsError:
        shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
        return WeightsError(
            f"the hub's listing of {self.hub.repository} has {key} {shown[:80]}",
            f"it must be {allowed}",
            "check HF_ENDPOINT and the proxy settings",
        )


def _is_read(name: str) -> bool:
    """Whether a file is one of the layout, by its first folder and its suffix."""
    steps = name.split("/")
    in_layout = name == "config.json" or (len(steps) > 1 and steps[0] in PARTS)
    return in_layout and PurePosixPath(steps[-1]).suffix in _SUFFIXES
