"""Data files into samples: JSON lines, LLaVA and ShareGPT lists, messages with videos, and CSV.

A file is recognised by its content. What is wrong in it is collected, never raised, so that one
look finds everything; media files are looked at from the outside only.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apollo_cli.finetune.data.conversations import Entry, build_sample
from apollo_cli.finetune.data.keys import stray_keys
from apollo_cli.finetune.data.samples import Fault, MediaFolder, Refused, Sample, shorten
from apollo_cli.finetune.places import describe_place
from apollo_cli.video.container import shown

if TYPE_CHECKING:
    from apollo_cli.finetune.recipe import DataSource

# A longer line is no talk; reading it would only fill the memory.
_LONGEST_LINE = 64 * 2**20
_HEAD_BYTES = 64 * 2**10
_NEEDED_COLUMNS = ("question", "answer")
_COLUMNS = (*_NEEDED_COLUMNS, "video", "image", "from", "to", "choices", "id")
# Columns of options, each named by a number or letter, such as a0, option_b or C.
_OPTION = re.compile(r"(?:a|option[ _]?|choice[ _]?)(\d)|(?:option[ _]?|choice[ _]?)?([a-j])")
_KEYS = {"llava": "conversations", "messages": "messages", "jsonl": "messages"}
_SPACE = re.compile(r"[ \t\r\n]*")


def load_samples(source: DataSource, label: str = "") -> tuple[list[Sample], list[Fault]]:
    """Read one file of samples.

    Args:
        source: the file, its format, and the folder of its media.
        label: what to call the file in names of samples; its own name when empty.

    Returns:
        The samples that can be trained on as far as the file itself tells, and everything that
        is wrong or worth knowing. A fault that costs the run leaves the samples before it.
    """
    media = MediaFolder(source.media or source.path.parent)
    samples: list[Sample] = []
    faults: list[Fault] = []
    seen: dict[bytes, str] = {}
    unused: dict[str, tuple[str, int]] = {}
    name = label or shown(source.path.name)
    for item in _entries(source, name):
        if isinstance(item, Fault):
            faults.append(item)
            continue
        for field in stray_keys(item.fields):
            where, number = unused.get(field, (item.where, 0))
            unused[field] = where, number + 1
        notes: list[Fault] = []
        try:
            sample = build_sample(item, media, notes)
        except Refused as refused:
            faults += refused.faults
            continue
        faults += notes
        samples.append(sample)
        first = seen.setdefault(_digest(sample), sample.name)
        if first is not sample.name:
            faults.append(Fault("duplicate", item.where, f"the same as {first}"))
    for field, (where, number) in unused.items():
        entries = "1 entry" if number == 1 else f"{number} entries"
        faults.append(Fault("unknown_field", where, f'"{shorten(field, 60)}" in {entries}'))
    if not samples and not any(fault.cost == "run" for fault in faults):
        faults.append(Fault("no_samples", name, "nothing in it can be trained on"))
    return samples, faults


def is_text(path: Path) -> bool:
    """Whether a file begins as one of samples may, not as a video or a picture.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return b"\0" not in file.read(_HEAD_BYTES)


def _digest(sample: Sample) -> bytes:
    content = repr((sample.turns, sample.visuals, sample.choices)).encode(
        "utf-8", "backslashreplace"
    )
    return hashlib.blake2b(content, digest_size=16).digest()


def _entries(source: DataSource, name: str) -> Iterator[Entry | Fault]:
    """The entries of a file of any format, and what is wrong with the file itself."""
    path = source.path
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            yield Fault("unreadable_file", name, describe_place(path))
            return
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        form = source.format
        start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head:
            yield Fault("wrong_encoding", name, "is UTF-16, or not text at all")
        elif not start:
            yield Fault("no_samples", name, "is empty")
        elif form == "csv" or (form == "auto" and start not in b"[{"):
            yield from _csv_entries(path, name, is_sure=form == "csv")
        elif start == b"[":
            yield from _checked(_list_values(path, name), form)
        elif head.lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0].strip() == b"{":
            yield Fault("unknown_format", name, "is one JSON object over many lines")
        else:
            yield from _checked(_line_values(path, name), form)
    except UnicodeDecodeError as error:
        yield Fault("wrong_encoding", name, f"has a byte that is not UTF-8 ({error.reason})")
    except OSError as error:
        yield Fault("unreadable_file", name, f"cannot be read ({error.strerror or error})")


def _checked(values: Iterator[tuple[str, Any] | Fault], form: str) -> Iterator[Entry | Fault]:
    """Entries of the values that are objects of the wanted form."""
    key = _KEYS.get(form)
    for value in values:
        if isinstance(value, Fault):
            yield value
        elif not isinstance(value[1], dict):
            yield Fault("wrong_type", value[0], "it is no object", "each entry is a JSON object")
        elif key and key not in value[1]:
            yield Fault("wrong_type", value[0], f"it has no {key}", f"format {form} needs {key}")
        else:
            yield Entry(*value)


def _list_values(path: Path, name: str) -> Iterator[tuple[str, Any] | Fault]:
    """The values of a JSON list, one after the other, up to where it is cut."""
    text = path.read_text("utf-8-sig")
    decoder = json.JSONDecoder()

    def skip(position: int) -> int:
        found = _SPACE.match(text, position)
        return found.end() if found else position

    position, number = skip(skip(0) + 1), 0
    while text[position : position + 1] != "]" or number:
        if text[position : position + 1] == "]":
            words = "a comma stands behind the last entry"
            yield Fault("cut_file", f"{name} entry {number}", words, next_step="take it out")
            return
        number += 1
        where = f"{name} entry {number}"
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            words = "the file ends in it" if len(text) - position < 2 else _reason(error)
            yield Fault("cut_file", where, f"the entry is cut or broken ({words})")
            return
        yield where, value
        position = skip(position)
        if text[position : position + 1] != ",":
            break
        position = skip(position + 1)
    if text[position : position + 1] != "]" or text[position + 1 :].strip():
        yield Fault("cut_file", f"{name} entry {number}", "the list does not end after it")


def _line_values(path: Path, name: str) -> Iterator[tuple[str, Any] | Fault]:
    """The value of each line that is not blank."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            where = f"{name}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                words = f"it is longer than {_LONGEST_LINE / 1e6:.0f} MB"
                yield Fault("broken_line", where, words, "one talk a line", "part it into lines")
                while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                continue
            try:
                yield where, json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                yield Fault("broken_line", where, "it is not UTF-8")
            except (ValueError, RecursionError) as error:
                yield Fault("broken_line", where, f"it is cut or broken ({_reason(error)})")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "brackets in brackets without end"
    return str(error).partition(": line")[0].lower()


def _csv_entries(path: Path, name: str, *, is_sure: bool) -> Iterator[Entry | Fault]:
    """Rows as talks of one question."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        delimiter = max(",;\t", key=first.count)
        file.seek(0)
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        start = 1
        try:
            header = [column.strip().lower() for column in next(rows, [])]
            missing = [column for column in _NEEDED_COLUMNS if column not in header]
            if len(missing) == len(_NEEDED_COLUMNS) and not is_sure:
                yield Fault("unknown_format", name, "is none of the known formats")
                return
            if missing:
                yield Fault("missing_column", f"{name}:1", f"no column {' and '.join(missing)}")
                return
            double = [column for column in _COLUMNS if header.count(column) > 1]
            if double:
                yield Fault(
                    "double_column", f"{name}:1", f"{' and '.join(double)} stand there twice"
                )
                return
            start = rows.line_num + 1
            for row in rows:
                if any(cell.strip() for cell in row):
                    yield _csv_entry(f"{name}:{start}", header, row)
                start = rows.line_num + 1
        except csv.Error as error:
            yield Fault("cut_file", f"{name}:{start}", f"the row is cut or broken ({error})")


def _csv_entry(where: str, header: list[str], row: list[str]) -> Entry | Fault:
    if len(row) != len(header):
        return Fault(
            "wrong_type",
            where,
            f"{len(row)} values for {len(header)} columns",
            "one value a column, in quotes where it has commas",
        )
    cells: dict[str, Any] = {
        key: cell.strip() or None for key, cell in zip(header, row, strict=True)
    }
    talk = [("user", cells.pop("question")), ("assistant", cells.pop("answer"))]
    fields: dict[str, Any] = {"messages": [{"role": r, "content": text or ""} for r, text in talk]}
    if cells.get("choices"):
        return Entry(where, cells | fields | {"choices": cells["choices"].split("|")})
    found = [(key, match) for key in header if (match := _OPTION.fullmatch(key))]
    if len(found) < 2:
        return Entry(where, cells | fields)
    named = {match[1] or match[2]: cells.pop(key) for key, match in found}
    options = {name: text for name, text in named.items() if text}
    return Entry(where, cells | fields | {"choices": list(options.values())}, tuple(options))
