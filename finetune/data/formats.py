"""Data files become samples. A new format is a reader of entries and a row in ``FORMATS``.

A file is recognised by its first bytes. Faults are collected, not raised, so that one reading
names all of them; videos and images are checked from the outside only (path, kind of file, size).
"""

from __future__ import annotations

import csv
import json
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apollo_cli.finetune.data.conversations import read_entry
from apollo_cli.finetune.data.samples import Entry, Fault, MediaFolder, Sample
from apollo_cli.finetune.places import describe_place
from apollo_cli.text import count
from apollo_cli.video.container import shown

if TYPE_CHECKING:
    from apollo_cli.finetune.recipe import DataSource

Entries = Iterator[Entry | Fault]

_HEAD_BYTES = 64 * 2**10
_UTF8_MARK = b"\xef\xbb\xbf"
_NEEDED_COLUMNS = ("question", "answer")
_COLUMNS = (*_NEEDED_COLUMNS, "video", "image", "from", "to", "choices", "id")
# Columns of options, each named by a number or letter, such as a0, option_b or C.
_OPTION = re.compile(r"(?:a|option[ _]?|choice[ _]?)(\d)|(?:option[ _]?|choice[ _]?)?([a-j])")
_START_OF_LIST = re.compile(r"[ \t\r\n]*\[[ \t\r\n]*")
# What stands behind an entry of a list: a comma and another entry, or the end of the list.
_BEHIND_ENTRY = re.compile(r"[ \t\r\n]*+(?:,[ \t\r\n]*+(?!\])|(?=\]))")


def load_samples(source: DataSource, label: str = "") -> tuple[list[Sample], list[Fault]]:
    """Read one file of samples.

    Args:
        source: the file, its format, and the folder of its media.
        label: what to call the file in names of samples; its own name when empty.

    Returns:
        The samples that can be trained on as far as the file itself tells, and all faults.
        A fault that costs the run leaves the samples before it.
    """
    media = MediaFolder(source.media or source.path.parent)
    name = label or shown(source.path.name)
    samples: list[Sample] = []
    faults: list[Fault] = []
    names: dict[tuple[object, ...], str] = {}
    unknown: dict[str, Fault] = {}
    times: Counter[str] = Counter()
    for item in _read_entries(source, name):
        sample, found = (None, [item]) if isinstance(item, Fault) else read_entry(item, media)
        for fault in found:
            if fault.kind == "unknown_field":
                unknown.setdefault(fault.received, fault)
                times[fault.received] += 1
            else:
                faults.append(fault)
        if sample is None:
            continue
        samples.append(sample)
        first = names.setdefault((sample.turns, sample.visuals, sample.choices), sample.name)
        if first is not sample.name:
            faults.append(Fault("duplicate", item.where, f"the same as {first}"))
    for field, fault in unknown.items():
        number = count(times[field], "entry", "entries")
        faults.append(replace(fault, received=f"{field} in {number}"))
    if not samples and not any(fault.cost == "run" for fault in faults):
        faults.append(Fault("no_samples", name, "nothing in it can be trained on"))
    return samples, faults


def is_text(path: Path) -> bool:
    """Whether a file begins as text, unlike a video or an image.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return b"\0" not in file.read(_HEAD_BYTES)


def _read_entries(source: DataSource, name: str) -> Entries:
    """The entries of a file of any format, and the faults of the file itself."""
    path = source.path
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            yield Fault("unreadable_file", name, describe_place(path))
            return
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        start = head.removeprefix(_UTF8_MARK).lstrip()
        first_line = start.split(b"\n", 1)[0].lower()
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head:
            yield Fault("wrong_encoding", name, "is UTF-16, or not text at all")
        elif not start:
            yield Fault("no_samples", name, "is empty")
        elif source.format != "auto":
            yield from FORMATS[source.format](path, name)
        elif start[:1] in b"[{":
            yield from _read_json(path, name)
        elif not any(column.encode() in first_line for column in _NEEDED_COLUMNS):
            yield Fault("unknown_format", name, "is none of the known formats")
        else:
            yield from _read_csv(path, name)
    except UnicodeDecodeError as error:
        yield Fault("wrong_encoding", name, f"has a byte that is not UTF-8 ({error.reason})")
    except OSError as error:
        yield Fault("unreadable_file", name, f"cannot be read ({error.strerror or error})")


def _read_json(path: Path, name: str, needed: str = "") -> Entries:
    """Entries of a JSON list, or of a file with one JSON object a line.

    Args:
        needed: key that each entry has.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES).removeprefix(_UTF8_MARK).lstrip()
    if head.split(b"\n", 1)[0].strip() == b"{":
        yield Fault("unknown_format", name, "is one JSON object over many lines")
        return
    values = _list_values if head.startswith(b"[") else _line_values
    for value in values(path, name):
        if isinstance(value, Fault):
            yield value
        elif not isinstance(value[1], dict):
            yield Fault("wrong_type", value[0], "it is no object", "each entry is a JSON object")
        elif needed and needed not in value[1]:
            yield Fault("wrong_type", value[0], f"it has no {needed}", f"each entry has {needed}")
        else:
            yield Entry(*value)


def _list_values(path: Path, name: str) -> Iterator[tuple[str, Any] | Fault]:
    """Place and value of each entry of a JSON list, up to where the list is cut."""
    text = path.read_text("utf-8-sig")
    decoder = json.JSONDecoder()
    found = _START_OF_LIST.match(text)
    number = 0
    while found and text[found.end() : found.end() + 1] != "]":
        number += 1
        where = f"{name} entry {number}"
        try:
            value, end = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            words = "the file ends in it" if len(text) - found.end() < 2 else _reason(error)
            yield Fault("cut_file", where, f"the entry is cut or broken ({words})")
            return
        yield where, value
        found = _BEHIND_ENTRY.match(text, end)
    if found is None or text[found.end() + 1 :].strip():
        words = "neither another entry nor the end of the file and its list follows it"
        yield Fault("cut_file", f"{name} entry {number}", words)


def _line_values(path: Path, name: str) -> Iterator[tuple[str, Any] | Fault]:
    """Place and value of each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_UTF8_MARK) if number == 1 else line
            if not text.strip():
                continue
            where = f"{name}:{number}"
            try:
                yield where, json.loads(text.decode("utf-8"))
            except UnicodeDecodeError:
                yield Fault("broken_line", where, "it is not UTF-8")
            except (ValueError, RecursionError) as error:
                yield Fault("broken_line", where, f"it is cut or broken ({_reason(error)})")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "brackets in brackets without end"
    return str(error).partition(": line")[0].lower()


def _read_csv(path: Path, name: str) -> Entries:
    """Rows as conversations of one question."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        delimiter = max(",;\t", key=file.readline().count)
        file.seek(0)
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        start = 1
        try:
            header = [column.strip().lower() for column in next(rows, [])]
            missing = [column for column in _NEEDED_COLUMNS if column not in header]
            double = [column for column in _COLUMNS if header.count(column) > 1]
            if missing:
                yield Fault("missing_column", f"{name}:1", f"no column {' and '.join(missing)}")
            elif double:
                yield Fault("double_column", f"{name}:1", f"{' and '.join(double)} is there twice")
            if missing or double:
                return
            start = rows.line_num + 1
            for row in rows:
                where = f"{name}:{start}"
                is_blank = not any(cell.strip() for cell in row)
                if len(row) == len(header) and not is_blank:
                    yield _csv_entry(where, header, row)
                elif not is_blank:
                    words = f"{len(row)} values for {len(header)} columns"
                    allowed = "one value a column, in quotes where it has commas"
                    yield Fault("wrong_type", where, words, allowed)
                start = rows.line_num + 1
        except csv.Error as error:
            yield Fault("cut_file", f"{name}:{start}", f"the row is cut or broken ({error})")


def _csv_entry(where: str, header: list[str], row: list[str]) -> Entry:
    cells: dict[str, Any] = {
        key: cell.strip() or None for key, cell in zip(header, row, strict=True)
    }
    labels: tuple[str, ...] = ()
    options = {key: match for key in header if (match := _OPTION.fullmatch(key))}
    if cells.get("choices"):
        cells["choices"] = cells["choices"].split("|")
    elif len(options) > 1:
        named = {match[1] or match[2]: cells.pop(key) for key, match in options.items()}
        named = {label: text for label, text in named.items() if text}
        labels, cells["choices"] = tuple(named), list(named.values())
    texts = {"user": cells.pop("question"), "assistant": cells.pop("answer")}
    cells["messages"] = [{"role": role, "content": text or ""} for role, text in texts.items()]
    return Entry(where, cells, labels)


# Readers of the formats that a recipe may name. Without a name the first bytes decide.
FORMATS: dict[str, Callable[[Path, str], Entries]] = {
    "jsonl": partial(_read_json, needed="messages"),
    "llava": partial(_read_json, needed="conversations"),
    "messages": partial(_read_json, needed="messages"),
    "csv": _read_csv,
}
