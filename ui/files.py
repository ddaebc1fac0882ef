"""Which files the page may open: those under given folders, once every link is followed."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apollo_cli.errors import ApolloError, UsageError
from apollo_cli.video.container import MEDIA_SUFFIXES, shown

_LOG = logging.getLogger("apollo_cli.ui")

_MOST_SCANNED = 20_000

# How the folders of uploads are called.
UPLOADS = "apollo-ui-"


def in_utf8(text: str) -> str:
    """Text that can be sent: what is not UTF-8, as bytes of a file name, is escaped.

    The escapes are those of JSON, so what was written as such is still the same.
    """
    return text.encode("utf-8", "backslashreplace").decode()


class UiForbidden(UsageError):
    """A file that the page may not open."""


def note_refusal(error: ApolloError) -> None:
    """A line on stderr, where a visitor named a file that may not be opened."""
    if isinstance(error, UiForbidden):
        _LOG.warning("refused: a visitor of the page: %s", error.message[:300])


@dataclass(frozen=True)
class Entry:
    """One line of a picker.

    Attributes:
        path: absolute. is_folder: it can be listed in turn. size_bytes: 0 for folders.
    """

    name: str
    path: Path
    is_folder: bool
    size_bytes: int


@dataclass(frozen=True)
class Listing:
    """A folder as the picker shows it; ``above`` is the folder around it, empty where none may be
    seen, and ``note`` what to say of it.
    """

    entries: list[Entry]
    above: str
    note: str


class AllowedFolders:
    """The files that may be opened.

    Args:
        folders: these and all below them; the first is where relative names start.
        files: further files, each allowed by itself.
        uploads: folder of what visitors dropped. What lies there is found by ``resolve_upload``
            only: its path, which nobody can guess, is known to the one who brought it.

    Attributes:
        opened: the uploads that a visit has taken; others are deleted after a while.
    """

    def __init__(
        self, folders: Sequence[Path], files: Sequence[Path] = (), uploads: Path | None = None
    ) -> None:
        self.folders = tuple(Path(os.path.realpath(folder)) for folder in folders)
        self.files = frozenset(Path(os.path.realpath(file)) for file in files)
        self.uploads = None if uploads is None else Path(os.path.realpath(uploads))
        self.opened: set[Path] = set()

    def resolve(self, text: str) -> Path:
        """The absolute path of a file or folder, with every link followed.

        Args:
            text: as typed; quotes around it are dropped, ``~`` is the home folder.

        Raises:
            UiForbidden: it lies outside, whether it exists or not.
            UsageError: it is empty, no path, or there is no such file inside.
        """
        path = self._place(text)
        if not self.covers(path):
            raise UiForbidden(
                f"{shown(text)} may not be opened here",
                "allowed are files under " + ", ".join(map(shown, self.folders)),
                "start apollo ui with --allow and its folder",
            )
        if not os.path.exists(path):
            raise UsageError(f"{shown(path)}: no such file", next_step="check the path")
        return path

    def resolve_upload(self, text: str) -> Path:
        """Likewise for the exact path of a file that a visitor dropped, and for no other.

        Raises:
            UiForbidden: it is none, or is not there any more.
        """
        path = self._place(text)
        if str(path) != text or not self.is_upload(path) or not path.is_file():
            raise UiForbidden(f"{shown(text)} is not here any more", next_step="upload it again")
        return path

    def check_still(self, path: Path) -> None:
        """See that a path that was resolved before still leads to where it led.

        Raises:
            UiForbidden: a link was put in its place.
        """
        if Path(os.path.realpath(path)) != path or not (self.covers(path) or self.is_upload(path)):
            raise UiForbidden(f"{shown(path)} has become a link", next_step="open the file again")

    def shorten(self, text: str) -> str:
        """A sentence that names uploads, those of another run too, without where they lie."""
        # Every state of the page asks this, mostly of long text that names none.
        if not any(name in text for name in (UPLOADS, str(self.uploads or UPLOADS))):
            return text
        own = "" if self.uploads is None else f"{re.escape(str(self.uploads))}|"
        place = rf"(?:{own}[^\s'\";]*/{UPLOADS}[^\s/]+)(?:/[^/\s]+)*/([0-9a-f]{{64}}(?![\w.]))?"
        return re.sub(place, lambda found: "a folder of uploads" if found[1] else "", text)

    def covers(self, path: Path) -> bool:
        """Whether a path without links lies inside; uploads do not."""
        if self.is_upload(path):
            return False
        return path in self.files or any(path.is_relative_to(root) for root in self.folders)

    def is_upload(self, path: Path) -> bool:
        """Whether a resolved path lies where visitors' files are dropped."""
        return self.uploads is not None and path.is_relative_to(self.uploads)

    def list_media(self, folder: str = "", most: int = 500) -> tuple[list[Entry], bool]:
        """Folders and likely videos and images of one folder, folders first, by name.

        Args:
            folder: empty for the first of the allowed folders.

        Returns:
            The entries, and whether there are more than ``most``.

        Raises:
            UiForbidden, UsageError: as ``resolve``; also for what is no folder.
        """
        place = self.resolve(folder or str(self.folders[0]))
        found: list[Entry] = []
        try:
            with os.scandir(place) as rows:
                for row in itertools.islice(rows, _MOST_SCANNED):
                    entry = self._entry(row)
                    if entry is not None:
                        found.append(entry)
        except NotADirectoryError:
            raise UsageError(f"{shown(place)} is no folder", next_step="open it") from None
        except OSError as error:
            raise UsageError(f"{shown(place)} cannot be listed ({error.strerror})") from None
        found.sort(key=lambda entry: (not entry.is_folder, entry.name.casefold()))
        return found[:most], len(found) > most

    def browse(self, folder: str) -> Listing | None:
        """What a picker shows of a folder; None is a file.

        Empty is the first that is allowed, which leads to the others.
        """
        try:
            place = self.resolve(folder or str(self.folders[0]))
            if not place.is_dir():
                return None
            found, is_cut = self.list_media(str(place))
        except ApolloError as error:
            note_refusal(error)
            return Listing([], "", error.message)
        first, *others = self.folders
        above = str(place.parent) if self.covers(place.parent) else ""
        if place == first:
            found = [*(Entry(str(other), other, True, 0) for other in others), *found]
        elif not above:
            above = str(first)
        return Listing(found, above, "there are more; type their paths" if is_cut else "")

    def _entry(self, row: os.DirEntry[str]) -> Entry | None:
        if row.name.startswith("."):
            return None
        try:
            is_folder, size = row.is_dir(), row.stat().st_size
            plain = is_folder or row.is_file()
        except OSError:
            return None
        # A picker shows what is likely to open; any other file can be typed.
        if not plain or not (is_folder or Path(row.name).suffix.lower() in MEDIA_SUFFIXES):
            return None
        path = Path(os.path.realpath(row.path))
        if not self.covers(path):
            return None
        return Entry(row.name, path, is_folder, 0 if is_folder else size)

    def _place(self, text: str) -> Path:
        text = text.strip()
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]
        if not text:
            raise UsageError("no file was named", next_step="choose one, or type its path")
        try:
            return Path(os.path.realpath(self.folders[0] / os.path.expanduser(text)))
        except (OSError, ValueError):
            raise UsageError(f"{shown(text)} is not a usable path") from None
