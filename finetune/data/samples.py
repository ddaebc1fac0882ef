"""Faults of training data and recipes: each kind has a name, a cost, and a way out."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from apollo_cli.model.prompt import Turn
from apollo_cli.video.container import shown

Cost = Literal["run", "sample", "note"]


@dataclass(frozen=True)
class FaultKind:
    """What all faults of one name share.

    Attributes:
        cost: what is lost: the whole ``run``, this ``sample``, or nothing (a ``note``).
        allowed: what would have been accepted. next_step: what to do.
    """

    cost: Cost
    allowed: str = ""
    next_step: str = ""


_UTF8 = "data files are UTF-8"
_FORMATS = "data is JSON lines, a JSON list, or CSV with the columns question and answer"

FAULT_KINDS: dict[str, FaultKind] = {
    # Whole files.
    "unreadable_file": FaultKind("run", "a plain file that can be read", "check the path"),
    "wrong_encoding": FaultKind("run", _UTF8, "save the file as UTF-8"),
    "unknown_format": FaultKind("run", _FORMATS, "set format in the recipe, or convert the file"),
    "cut_file": FaultKind("run", "a whole JSON list or CSV file", "copy or write the file again"),
    "missing_column": FaultKind("run", "a CSV needs question and answer", "add the column"),
    "double_column": FaultKind("run", "each column once", "take one out"),
    "no_samples": FaultKind("run", "at least one sample to train on", "repair or add samples"),
    # The form of one sample.
    "broken_line": FaultKind("sample", f"one JSON object a line; {_UTF8}", "repair the line"),
    "wrong_type": FaultKind("sample", "", "repair the sample"),
    "unknown_key": FaultKind("sample", "", "take it out: it would be dropped without effect"),
    "option_number": FaultKind("sample", "the text of one choice", "write it as the answer"),
    "wrong_role": FaultKind(
        "sample", "a question, its answer, and so on; a system message first", "repair the order"
    ),
    "nothing_to_train": FaultKind("sample", "at least one answer", "add an answer"),
    "empty_answer": FaultKind("sample", "every answer has words", "write it, or leave it out"),
    "tag_without_file": FaultKind("sample", "as many tags as files", "name the file"),
    "file_without_tag": FaultKind("sample", "as many tags as files, or no tag", "add the tag"),
    "tag_in_answer": FaultKind("sample", "tags stand in questions only", "take it out"),
    "special_token": FaultKind(
        "sample", "plain text: such a token would end the turn", "take it out"
    ),
    "wrong_window": FaultKind(
        "sample", "times with 0 <= from < to, for one video", "repair from and to"
    ),
    # Its files.
    "web_address": FaultKind("sample", "files on this machine", "download it first"),
    "outside_folder": FaultKind(
        "sample",
        "files inside the folder of the data file, links followed",
        "set media in [[data]]",
    ),
    "missing_file": FaultKind("sample", "paths start at the folder of the data", "check the path"),
    "not_a_file": FaultKind("sample", "a plain file", "save it to a file first"),
    "broken_video": FaultKind("sample"),
    "broken_image": FaultKind("sample"),
    "wrong_kind": FaultKind("sample", "videos under video, images under image", "swap the field"),
    "outside_video": FaultKind("sample", "from lies inside the video", "repair from"),
    "too_long": FaultKind("sample", next_step="shorten it or raise max_tokens"),
    # What happens to a sample all the same.
    "tag_of_other_kind": FaultKind("note", "the tag is taken for the file that is there"),
    "system_moved": FaultKind("note", "it is put in front of the first question"),
    "unanswered_question": FaultKind("note", "the last question is left out"),
    "answer_not_a_choice": FaultKind("note", "accuracy will count it as wrong"),
    "option_spelled_out": FaultKind("note", "a letter or number alone teaches nothing"),
    "unknown_field": FaultKind("note", "it is not used", "check the spelling"),
    "duplicate": FaultKind("note", "it is learned more often than others"),
    "odd_file": FaultKind("note", "it is read all the same"),
    "end_after_video": FaultKind("note", "the video's own end is taken"),
    "thinned": FaultKind("note", "clips are spaced out", "raise max_tokens, or set from and to"),
    "held_out_twice": FaultKind(
        "note", "validation says little about what was trained on", "leave it out of one"
    ),
    "nothing_held_out": FaultKind(
        "note", "no validation loss for it", "name other samples under [[validation]]"
    ),
    # The mixture and the recipe.
    "recipe": FaultKind("run"),
    "mostly_too_long": FaultKind("run"),
    "result_not_there": FaultKind(
        "note", "a result to start from", "run the recipe that writes it first, or both in a row"
    ),
    "unknown_model": FaultKind("run"),
    "unfit_start": FaultKind("run"),
    "output_not_writable": FaultKind(
        "run", "a folder that can be written", "choose another output in the recipe"
    ),
    "device_not_there": FaultKind(
        "run", "a device of this machine", 'set device = "cpu" in the recipe, or leave it out'
    ),
    "images_in_stage_2": FaultKind(
        "run",
        "encoders are trained on video only (paper, finding 9)",
        "leave images out, or set images_in_stage_2 = true",
    ),
    "kind_not_in_stage": FaultKind("note", "they are left out in this stage"),
    "text_teaches_nothing": FaultKind(
        "note",
        "text does not pass through these parts",
        'leave it out, or name "llm" in train',
    ),
    "text_share": FaultKind(
        "note", "10 to 14 % text keeps the language model's skills (paper, finding 10)"
    ),
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong or worth knowing.

    Attributes:
        kind: a name in ``FAULT_KINDS``.
        where: the file, line or entry, such as ``bees.jsonl:12``.
        received: what was found there, without ``where``.
        allowed, next_step: where the kind's own words are not exact enough.
    """

    kind: str
    where: str
    received: str
    allowed: str = ""
    next_step: str = ""

    @property
    def cost(self) -> Cost:
        """What is lost."""
        return FAULT_KINDS[self.kind].cost

    @property
    def remedy(self) -> str:
        """What is allowed, and what to do."""
        kind = FAULT_KINDS[self.kind]
        parts = (self.allowed or kind.allowed, self.next_step or kind.next_step)
        return "; ".join(part for part in parts if part)

    @property
    def message(self) -> str:
        """The whole sentence on one line."""
        text = "; ".join(filter(None, (f"{self.where}: {self.received}", self.remedy)))
        return " ".join(text.split())


def count_lost(faults: Iterable[Fault]) -> int:
    """Number of samples that are left out; each may have several faults."""
    return len({fault.where for fault in faults if fault.cost == "sample"})


class Refused(Exception):
    """A part of an entry that cannot be read; the reader of the entry reports the fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.message)


Kind = Literal["text", "image", "multi-image", "video"]
VisualKind = Literal["video", "image"]
KINDS: tuple[Kind, ...] = ("text", "image", "multi-image", "video")

# An answer of at most so many words is compared as a whole when accuracy is measured.
_SHORT_WORDS = 3


@dataclass(frozen=True)
class Visual:
    """A video or image that a sample shows.

    Attributes:
        path: absolute, with links resolved.
        start_seconds, end_seconds: the part of a video that is looked at; None is its end.
    """

    path: Path
    kind: VisualKind
    start_seconds: float = 0.0
    end_seconds: float | None = None


@dataclass(frozen=True)
class Sample:
    """A talk about videos and images, or about text alone.

    Attributes:
        name: the sample's own id, else its file and line or entry, such as ``bees.jsonl:12``.
        turns: at least one; every answer is trained on.
        visuals: in the order of the prompt, all of them in front of the first question.
        choices: the answers to choose from, where the data names them.
    """

    name: str
    turns: tuple[Turn, ...]
    visuals: tuple[Visual, ...] = ()
    choices: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """Which part of the mixture this is; one video is enough to be a video sample."""
        if any(visual.kind == "video" for visual in self.visuals):
            return "video"
        if len(self.visuals) > 1:
            return "multi-image"
        return "image" if self.visuals else "text"

    @property
    def is_short_answer(self) -> bool:
        """Whether the last answer can be judged by comparing it."""
        return bool(self.choices) or len(self.turns[-1].answer.split()) <= _SHORT_WORDS


@dataclass(frozen=True)
class Entry:
    """One conversation of a data file, in the keys of the formats ``jsonl`` and ``llava``.

    Attributes:
        where: its place, such as ``bees.jsonl:12``. fields: its keys and values.
        labels: names of its choices, where the file has them; else letters from A on.
    """

    where: str
    fields: dict[str, Any]
    labels: tuple[str, ...] = ()


_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)


def kind_of(value: Any) -> str:
    """What a value of JSON is, such as ``a list``."""
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return words.get(type(value), "nothing" if value is None else "a number")


def shorten(text: str, longest: int = 200) -> str:
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
        self._found: dict[str, Path] = {}

    def find(self, where: str, name: Any, kind: VisualKind) -> Path:
        """The file of a name, absolute and with links resolved.

        Args:
            where: place in the data file, for the fault. name: as the data has it.

        Raises:
            Refused: it is no path, leaves the folder, is missing, or is no plain file.
        """
        if not isinstance(name, str) or not name.strip() or "\0" in name:
            what = "an empty path" if isinstance(name, str) else kind_of(name)
            raise Refused(Fault("wrong_type", where, f"{kind} is {what}", f"{kind} is a path"))
        if name in self._found:
            return self._found[name]
        fault = words = ""
        path, status = self.root, None
        try:
            path = Path(os.path.realpath(self.root / name))
            if path.is_relative_to(self.root):
                status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            fault, words = "missing_file", f"is not in {shown(self.root)}"
        except (OSError, ValueError) as error:
            fault, words = "missing_file", f"cannot be looked at ({error.args[-1]})"
        if _ADDRESS.match(name):
            fault, words = "web_address", "is an address, and nothing is fetched"
        elif status is None:
            fault = fault or "outside_folder"
            words = words or f"lies outside {shown(self.root)}"
        elif not stat.S_ISREG(status.st_mode):
            kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe"}
            what = kinds.get(stat.S_IFMT(status.st_mode), "a device or socket")
            fault, words = "not_a_file", f"is {what}"
        elif not status.st_size:
            fault, words = f"broken_{kind}", "is empty (0 bytes); copy it again"
        if fault:
            raise Refused(Fault(fault, where, f"{shorten(name)} {words}"))
        self._found[name] = path
        return path
