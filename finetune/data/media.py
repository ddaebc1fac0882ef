"""Media files that samples name: found inside their folder, from the outside, never opened."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, Literal

from apollo_cli.finetune.data.faults import Fault, Refused
from apollo_cli.video.container import shown

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)
_LONGEST_SHOWN = 200


def kind_of(value: Any) -> str:
    """What a value of JSON is, such as ``a list``."""
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return words.get(type(value), "nothing" if value is None else "a number")


def shorten(text: str, longest: int = _LONGEST_SHOWN) -> str:
    """Text from elsewhere on one line, without control characters, and not endless."""
    text = shown(text)
    return text if len(text) <= longest else text[: longest - 3] + "..."


class MediaFolder:
    """The folder that media paths start from and may not leave.

    Args:
        root: the folder; links in it are followed, and may not lead out of it.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._found: dict[str, Path | tuple[str, str]] = {}

    def find(self, where: str, name: Any, kind: Literal["video", "image"]) -> Path:
        """The file of a name, absolute and with links resolved.

        Args:
            where: place in the data file, for the fault. name: as the data has it.

        Raises:
            Refused: it is no path, leaves the folder, is missing, or is no plain file.
        """
        if not isinstance(name, str) or not name.strip() or "\0" in name:
            what = "an empty path" if isinstance(name, str) else kind_of(name)
            raise Refused(Fault("wrong_type", where, f"{kind} is {what}", f"{kind} is a path"))
        if name not in self._found:
            self._found[name] = self._look(name)
        found = self._found[name]
        if isinstance(found, tuple):
            fault, words = found
            fault = f"broken_{kind}" if fault == "empty" else fault
            raise Refused(Fault(fault, where, f"{shorten(name)} {words}"))
        return found

    def _look(self, name: str) -> Path | tuple[str, str]:
        """The file, or the fault and what is wrong with it in words."""
        if _ADDRESS.match(name):
            return "web_address", "is an address, and nothing is fetched"
        try:
            path = Path(os.path.realpath(self.root / name))
            if not path.is_relative_to(self.root):
                return "outside_folder", f"lies outside {shown(self.root)}"
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return "missing_file", f"is not in {shown(self.root)}"
        except (OSError, ValueError) as error:
            return "missing_file", f"cannot be looked at ({error.args[-1]})"
        if not stat.S_ISREG(status.st_mode):
            words = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe"}
            what = words.get(stat.S_IFMT(status.st_mode), "a device or socket")
            return "not_a_file", f"is {what}"
        return path if status.st_size else ("empty", "is empty (0 bytes); copy it again")
