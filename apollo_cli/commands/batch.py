"""Many videos in one run: it goes on after a failure, and a later run skips what is done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from apollo_cli.commands.asking import Remark, Request, answer_all, open_sources, watch
from apollo_cli.errors import ApolloError, MediaError, UsageError

if TYPE_CHECKING:
    from apollo_cli.engine import Apollo


def list_videos(source: str) -> list[str]:
    """The videos of a folder, by name, or of a text file with one path a line.

    Paths in a text file are relative to it; empty lines and lines after ``#`` are left out.

    Raises:
        UsageError: there is no such folder or file, or it names no video.
    """
    place = Path(source).expanduser()
    try:
        if place.is_dir():
            files = sorted(p for p in place.iterdir() if p.is_file() and p.name[0] != ".")
            found = [str(path) for path in files]
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


def answered(output: Path) -> set[tuple[str, str]]:
    """Pairs of video and question that an earlier run has answered; its errors are tried again."""
    if not output.is_file():
        return set()
    done = set()
    for line in output.read_text("utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # The line that was being written when the run was stopped.
            continue
        if isinstance(row, dict) and "error" not in row:
            done.add((row.get("video"), row.get("question")))
    return done


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
            for row in answer_all(apollo, memories, rest, remark, stream_text=False):
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
        file.write(write(row, number))
        file.flush()
        if "error" in row and row["video"] not in failed:
            failed.append(row["video"])
    if failed:
        raise MediaError(
            f"{len(failed)} videos failed, the first is {Path(failed[0]).name}",
            next_step="run the same command again to try them again",
        )


def no_report(stage: str, done: int, total: int) -> None:
    """Say nothing: a batch tells the number of the video instead."""
