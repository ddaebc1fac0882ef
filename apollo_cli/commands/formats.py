"""How answers are written: as text, JSON lines, CSV, subtitles or Markdown."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from apollo_cli.atomic import write_whole
from apollo_cli.errors import MediaError, UsageError
from apollo_cli.text import clean_cell, clean_markdown, clean_markdown_line, count

_SUBTITLE_TAG = re.compile(r"<(?=[^<>]*>)|\{(?=[^{}]*\})")


def choose_format(asked: str | None, output: Path | None) -> str:
    """The format that was asked for, else the one that a file's ending names, else text."""
    ending = (output or Path()).suffix.lower().lstrip(".")
    named = "jsonl" if ending == "json" else ending
    return asked or (named if named in WRITERS else "text")


@contextmanager
def open_output(output: Path | None, *, append: bool = False) -> Iterator[TextIO]:
    """Where answers go: stdout, a file that is written whole at the end, or one that grows.

    Args:
        output: None is stdout.
        append: add to the file line by line; a last line that was stopped half-way is cut off.

    Raises:
        UsageError: the file cannot be written.
    """
    if output is None:
        yield sys.stdout
        return
    if not append:
        text = io.StringIO()
        try:
            yield text
        finally:
            with _named_failure(output):
                if text.getvalue():
                    write_whole(output, text.getvalue())
        return
    with _named_failure(output):
        content = output.read_bytes() if output.is_file() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(output, whole)
        file = output.open("a", encoding="utf-8")
    with file:
        yield file


@contextmanager
def _named_failure(output: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror})") from error


def write_rows(rows: Iterable[dict[str, Any]], write: Writer, file: TextIO) -> None:
    """Write each row as it comes, so that a stopped run has lost nothing.

    Raises:
        MediaError: at the end, when videos failed.
    """
    failed: dict[str, None] = {}
    for number, row in enumerate(rows, start=1):
        text = write(row, number)
        try:
            file.write(text)
            file.flush()
        except OSError as error:
            if file is sys.stdout:
                raise
            # What waits to be written is given up: closing the file would fail once more.
            with suppress(OSError):
                file.close()
            raise UsageError(f"-o {file.name} cannot be written ({error.strerror})") from error
        if "error" in row:
            failed[row["video"]] = None
    if failed:
        raise MediaError(
            f"{count(len(failed), 'video')} failed, the first is {Path(next(iter(failed))).name}",
            next_step="with -o answers.jsonl, the same command again tries only these",
        )


def to_text(row: dict[str, Any], number: int) -> str:
    """The question and the answer, below the name of the video where there are many."""
    text = f"Q: {row['question']}\nA: {answer_text(row)}\n"
    return f"{row['video']}\n{text}\n" if "video" in row else text


def answer_text(row: dict[str, Any]) -> str:
    """An answer as people read it; where options were scored, with the shares of all."""
    shares = row.get("probabilities", {}).items()
    letter = f"{row['letter']} " if "letter" in row else ""
    lines = [f"{letter}{_answer_or_error(row)}"]
    return "\n".join(lines + [f"   {share:6.1%}  {option}" for option, share in shares])


def to_json(row: dict[str, Any], number: int) -> str:
    """One object on one line."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def to_csv(row: dict[str, Any], number: int) -> str:
    """Video, question and answer; the first row is preceded by the names of the columns."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if number == 1:
        table.writerow(["video", "question", "answer", "error", "notes"])
    videos = " ".join(video["path"] for video in row.get("videos", []))
    values = [
        row.get("video", videos),
        row["question"],
        row.get("answer", ""),
        row.get("error", ""),
        "; ".join(row.get("notes", ())),
    ]
    table.writerow(map(clean_cell, values))
    return text.getvalue()


def to_srt(row: dict[str, Any], number: int) -> str:
    """A subtitle over the first moment that the answer names, else over all that was looked at."""
    cited = row.get("cited") or []
    windows = [video["window_seconds"] for video in row.get("videos", [])]
    start, end = cited[0]["clip_seconds"] if cited else (windows[0] if windows else (0.0, 1.0))
    name = f"{row['video']}\n" if "video" in row else ""
    words = _one_block(f"{name}{row['question']}\n{_answer_or_error(row)}")
    return f"{number}\n{_stamp(start)} --> {_stamp(end)}\n{words}\n\n"


def to_markdown(row: dict[str, Any], number: int) -> str:
    """The question in bold, the answer, and what was looked at; a video of many is a heading."""
    name = f"## {clean_markdown_line(row['video'])}\n\n" if "video" in row else ""
    seen = ", ".join(video["coverage_text"] for video in row.get("videos", []))
    question, text = clean_markdown_line(row["question"]), clean_markdown(_answer_or_error(row))
    about = f"_{clean_markdown_line(seen)}_\n\n" if seen else ""
    return f"{name}**{question}**\n\n{text}\n\n{about}"


def _answer_or_error(row: dict[str, Any]) -> str:
    """The answer; where there is none, why, so that nobody takes it for one."""
    return row["answer"] if "answer" in row else f"error: {row['error']}"


def _one_block(text: str) -> str:
    """Text that a subtitle can hold: an empty line or an arrow would begin the next one.

    Players drop what looks like a tag, as ``<b>``; an invisible mark in it makes it text.
    """
    text = _SUBTITLE_TAG.sub("\\g<0>\u2060", text.replace("-->", "->"))
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(filter(None, lines))


def _stamp(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02},{rest % 1000:03}"


# One answered question, as ``Answer.to_dict`` gives it, and its number from 1; gives the text
# with the end of its line.
Writer = Callable[[dict[str, Any], int], str]
WRITERS: dict[str, Writer] = {
    "text": to_text,
    "jsonl": to_json,
    "csv": to_csv,
    "srt": to_srt,
    "md": to_markdown,
}
