"""Many videos in one run: it goes on after a failure, and a later run skips what is done."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from apollo_cli.commands.asking import Remark, Request, answer_all, open_sources, watch
from apollo_cli.config import SamplingOptions
from apollo_cli.errors import ApolloError, MediaError, UsageError
from apollo_cli.values import Check, Values, any_text, list_of, parse_object, table
from apollo_cli.values import number as number_in
from apollo_cli.words import count

if TYPE_CHECKING:
    from apollo_cli.engine import Apollo


# What a row tells of the model that gave the answer, as ``Apollo.describe`` does.
_MODEL_FACTS = ("name", "revision", "adapter", "quant", "template")
# Rows round times to milliseconds.
_CLOSE_SECONDS = 0.01
# What a row tells of each video that it is about.
_SEEN: dict[str, Check] = {
    "kind": any_text,
    "duration_seconds": number_in(0, 1e9),
    "window_seconds": list_of(number_in(-1e9, 1e9), count=2),
}


def list_videos(source: str, output: Path | None, remark: Remark) -> list[str]:
    """The videos of a folder, by name, or of a text file with one path a line.

    Of a folder, what is no video or image is left out, as ``apollo check`` does, which is said;
    so are the memory of a video that lies there too and the output itself. Paths in a text file
    are relative to it; empty lines and lines after ``#`` are left out.

    Raises:
        UsageError: there is no such folder or file, or it names no video.
    """
    from apollo_cli.memory_record import SUFFIX

    place = Path(source).expanduser()
    written = output and output.absolute()
    try:
        if place.is_dir():
            files = sorted(p for p in place.iterdir() if p.is_file() and p.name[0] != ".")
            videos = _leave_out([p for p in files if p.absolute() != written], remark)
            stems = {path.stem for path in videos if path.suffix != SUFFIX}
            found = [str(p) for p in videos if p.suffix != SUFFIX or p.stem not in stems]
        else:
            lines = [line.strip() for line in place.read_text("utf-8-sig").splitlines()]
            rows = [line for line in lines if line and not line.startswith("#")]
            # A web address stays as it is: it is refused by its name, not as a path of this folder.
            found = [
                row if "://" in row else str(place.parent / Path(row).expanduser()) for row in rows
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--videos {source}", "a folder or a text file with one path a line is needed"
        ) from error
    if not found:
        raise UsageError(f"--videos {source} names no video")
    return found


def _leave_out(files: list[Path], remark: Remark) -> list[Path]:
    """The files without those that are neither called like a video or image nor are one."""
    from apollo_cli.commands.check import describe_left_out
    from apollo_cli.memory_record import SUFFIX
    from apollo_cli.video.container import MEDIA_SUFFIXES
    from apollo_cli.video.guard import GuardedReader

    others: list[Path] = []
    with GuardedReader() as reader:
        for path in files:
            if path.suffix.lower() not in MEDIA_SUFFIXES | {SUFFIX}:
                try:
                    reader.probe(path)
                except MediaError:
                    others.append(path)
    if others:
        remark(describe_left_out([str(path) for path in others]))
    return [path for path in files if path not in others]


def answered(
    output: Path, request: Request, model: dict[str, Any], remark: Remark
) -> set[tuple[str, str]]:
    """Pairs of video and question that an earlier run has answered; its errors are tried again.

    Args:
        model: what rows must tell of theirs; those made otherwise are said and made again.

    Raises:
        UsageError: the file holds something else than rows.
    """
    if not output.is_file():
        return set()
    wanted = json.loads(json.dumps({key: model[key] for key in _MODEL_FACTS if key in model}))
    done, others = set[tuple[str, str]](), set[tuple[str, str]]()
    faults: list[str] = []
    content = output.read_bytes()
    if content.strip() and not content.startswith(b"{"):
        raise UsageError(f"-o {output} is there and holds no answers", next_step="choose another")
    # What stands behind the last line was being written when the run was stopped.
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        before = len(faults)
        row = _checked_row(line, f"line {number}", faults)
        if row and len(faults) == before:
            is_same = _is_of(row, request, wanted)
            (done if is_same else others).add((row["video"], row["question"]))
    if faults:
        more = f" and {len(faults) - 3} more faults" if len(faults) > 3 else ""
        remark(f"{output}: {'; '.join(faults[:3])}{more}; such rows are not counted")
    if done:
        remark(f"{output}: {count(len(done), 'answer')} from before, which are not asked for again")
    if others - done:
        remark(
            f"{output}: {count(len(others - done), 'answer')} of another model or with other "
            "settings, which are asked for again"
        )
    return done


def _checked_row(line: bytes, where: str, faults: list[str]) -> dict[str, Any] | None:
    """What decides whether a row is an answer to keep; None where it tells of an error."""
    try:
        found = parse_object(line) if line.strip() else {}
    except ValueError as error:
        faults.append(f"{where} {error}")
        return None
    if "answer" not in found:
        return None
    row = Values(found, where, faults)
    checked = {key: row.get(key, any_text) for key in ("video", "question", "answer")}
    checked |= {key: row.get(key, table, {}) for key in ("model", "tokens", "probabilities")}
    videos = row.get("videos", list_of(table), ()) or ()
    inside = [Values(video, f"{where}: videos", faults) for video in videos]
    checked["videos"] = [{key: v.get(key, check) for key, check in _SEEN.items()} for v in inside]
    return checked | {"blind_check": "blind_check" in found}


def _is_of(row: dict[str, Any], request: Request, model: dict[str, Any]) -> bool:
    """Whether a row is what this run would write, as far as it tells."""
    from apollo_cli.memory_record import SUFFIX

    longest = request.options.max_new_tokens
    is_memory = Path(row["video"]).suffix == SUFFIX
    return (
        all(row["model"].get(key) == value for key, value in model.items())
        and row["tokens"].get("answer_limit", longest) == longest
        and set(row["probabilities"]) == set(request.choices)
        and (row["blind_check"] or not request.blind)
        and (is_memory or all(_is_seen(v, request.sampling) for v in row["videos"]))
    )


def _is_seen(video: dict[str, Any], sampling: SamplingOptions) -> bool:
    """Whether the window of a row is the one that is wanted now; an image has none."""
    length = video["duration_seconds"]
    end = length if sampling.end_seconds is None else min(sampling.end_seconds, length)
    found = zip(video["window_seconds"], (sampling.start_seconds, end), strict=True)
    return video["kind"] != "video" or all(abs(a - b) < _CLOSE_SECONDS for a, b in found)


def open_rows(output: Path) -> TextIO:
    """Open a file of rows to go on with; a last line that was stopped half-way is cut off.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        content = output.read_bytes() if output.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(output, len(whole))
        return output.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror})") from error


def run_batch(
    apollo: Apollo,
    videos: list[str],
    request: Request,
    done: set[tuple[str, str]],
    remark: Remark,
) -> Iterator[dict[str, Any]]:
    """Answer each question about each video; a failure is a record with ``error``."""
    for number, video in enumerate(videos, start=1):
        left = [q for q in request.questions if (video, q) not in done]
        if not left:
            continue
        remark(f"{number} of {len(videos)}: {Path(video).name}")
        rest = replace(request, questions=tuple(left))
        try:
            sources = open_sources([video], rest.reading, apollo.watcher.reader)
            memories = watch(apollo, sources, rest, no_report)
            for note in memories[0].warnings:
                remark(f"{Path(video).name}: {note}")
            for row in answer_all(apollo, memories, rest, remark, stream_text=False):
                left.remove(row["question"])
                yield {"video": video, **row}
        except ApolloError as error:
            remark(f"error: {error.message}")
            for question in left:
                failed = {"error": error.message, "exit_code": error.exit_code}
                yield {"video": video, "question": question, **failed}


def write_rows(
    rows: Iterator[dict[str, Any]], write: Callable[[dict[str, Any], int], str], file: TextIO
) -> None:
    """Write each row as it comes, so that a stopped run has lost nothing.

    Raises:
        MediaError: at the end, when videos failed.
    """
    failed: list[str] = []
    for number, row in enumerate(rows, start=1):
        try:
            file.write(write(row, number))
            file.flush()
        except OSError as error:
            if file is sys.stdout:
                raise
            # What waits to be written is given up: whoever closes the file would fail once more.
            with suppress(OSError):
                file.close()
            raise UsageError(f"-o {file.name} cannot be written ({error.strerror})") from error
        if "error" in row and row["video"] not in failed:
            failed.append(row["video"])
    if failed:
        raise MediaError(
            f"{count(len(failed), 'video')} failed, the first is {Path(failed[0]).name}",
            next_step="with -o answers.jsonl, the same command again tries only these",
        )


def no_report(stage: str, done: int, total: int) -> None:
    """Say nothing: a batch tells the number of the video instead."""
