"""Many videos in one run: it goes on after a failure, and a later run skips what is done."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apollo_cli.commands.output import silent
from apollo_cli.commands.request import Remark, Request, answer_all, open_sources, watch
from apollo_cli.config import ModelOptions
from apollo_cli.errors import ApolloError, MediaError, UsageError
from apollo_cli.text import count
from apollo_cli.values import Values, any_text, parse_object, table

if TYPE_CHECKING:
    from apollo_cli.engine import Apollo

# What a row tells of the model that gave the answer, as ``Apollo.describe`` does.
_MODEL_FACTS = ("name", "revision", "adapter", "quant", "template")


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

    An answer counts when its model, the length of its answer and its choices are those of this
    run; others are counted aloud and asked for again.

    Args:
        model: what rows must tell of theirs.

    Raises:
        UsageError: the file holds something else than rows.
    """
    if not output.is_file():
        return set()
    content = output.read_bytes()
    if content.strip() and not content.startswith(b"{"):
        raise UsageError(f"-o {output} is there and holds no answers", next_step="choose another")
    wanted = json.loads(json.dumps({key: model[key] for key in _MODEL_FACTS if key in model}))
    limit, choices = request.options.max_new_tokens, set(request.choices)
    done, others = set[tuple[str, str]](), set[tuple[str, str]]()
    faults: list[str] = []
    # What stands behind the last line was being written when the run was stopped.
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        before = len(faults)
        try:
            row = Values(parse_object(line) if line.strip() else {}, f"line {number}", faults)
        except ValueError as error:
            faults.append(f"line {number} {error}")
            continue
        if "answer" not in row:
            continue
        video, question, _ = (row.get(key, any_text) for key in ("video", "question", "answer"))
        told, tokens, shares = (
            row.get(key, table, {}) for key in ("model", "tokens", "probabilities")
        )
        if len(faults) == before:
            is_same = (
                all(told.get(key) == value for key, value in wanted.items())
                and tokens.get("answer_limit", limit) == limit
                and set(shares) == choices
                and ("blind_check" in row or not request.blind)
            )
            (done if is_same else others).add((video, question))
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
            memories = watch(apollo, sources, rest, lambda stage, done, total: None)
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


class RayWorker:
    """One model in one process of a Ray cluster; answers the questions of one video at a time."""

    def __init__(self, model: ModelOptions, request: Request, use_cache: bool) -> None:
        from apollo_cli.engine import load

        self.apollo = load(**vars(model), use_cache=use_cache)
        self.request = request

    def __call__(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of one video; a failure is a row with ``error``."""
        done = {(row["video"], question) for question in row["done"]}
        found = run_batch(self.apollo, [row["video"]], self.request, done, silent)
        # As text: Ray would give all rows the same fields, and fill in what a row does not have.
        return [{"row": json.dumps(answered)} for answered in found]


def run_on_ray(
    videos: list[str],
    request: Request,
    done: set[tuple[str, str]],
    *,
    model: ModelOptions,
    use_cache: bool,
    workers: int,
) -> Iterator[dict[str, Any]]:
    """Answer each question about each video on the cluster that Ray finds, or on this machine.

    Args:
        done: pairs of video and question to leave out.
        model: each worker loads it. workers: models that run at the same time.

    Raises:
        UsageError: Ray is not installed.
    """
    # Nothing leaves the machine that the user did not ask for.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            "--ray: Ray is not installed", next_step="pip install 'apollo-video-cli[ray]'"
        ) from error
    import torch

    quiet = logging.ERROR
    ray.init(
        ignore_reinit_error=True, log_to_driver=False, include_dashboard=False, logging_level=quiet
    )
    logging.getLogger("ray.data").setLevel(quiet)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"video": v, "done": [q for name, q in done if name == v]} for v in videos]
    left = [row for row in rows if len(row["done"]) < len(request.questions)]
    if not left:
        return
    answers = ray.data.from_items(left, override_num_blocks=len(left)).flat_map(
        RayWorker,
        fn_constructor_args=(model, request, use_cache),
        concurrency=workers,
        num_gpus=1 if torch.cuda.is_available() else 0,
    )
    for row in answers.iter_rows():
        yield json.loads(row["row"])
