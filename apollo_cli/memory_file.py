"""Video memory on disk: a safetensors file that is written as it is computed.

The header says everything about how the tokens were made, as JSON. Its size and the places of
all clips are known before the first clip is encoded, so clips are written in place, one batch
after the other; a small file beside it counts those that are safely there, and says which pictures
of them were damaged. After a kill, the next run goes on behind them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open

from apollo_cli.atomic import write_whole
from apollo_cli.errors import MediaError, WeightsError
from apollo_cli.memory_record import MOST_SECONDS, RECORD_KEY, MemoryRecord, read_record
from apollo_cli.model.config import NetworkConfig
from apollo_cli.planner import Spoken
from apollo_cli.values import list_of, number, row_of, whole
from apollo_cli.video.sampler import ClipPlan
from apollo_cli.video.subtitles import Subtitle
from apollo_cli.video_memory import VideoMemory

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Clips that are written, and the times of their damaged pictures.
_COUNTER = row_of(whole(0), list_of(number(-MOST_SECONDS, MOST_SECONDS)))
# Room for what is only known at the end, such as damaged pictures.
_SPARE_BYTES = 4096


class MemoryWriter:
    """Writes one memory, batch by batch; what an earlier, stopped run wrote is kept.

    The file is this writer's alone until ``release``.

    Args:
        target: the finished file; until then its name ends in ``.part``.
        record: how the memory is made.
        tokens_shape: (clips, R, H). frames: frames a clip. dtype: of the tokens.

    Attributes:
        done: clips that are safely on disk.
        damaged_seconds: times of their damaged pictures; whoever adds clips keeps it.

    Raises:
        Timeout: another run is writing the same file.
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        target: Path,
        record: MemoryRecord,
        tokens_shape: tuple[int, int, int],
        frames: int,
        dtype: torch.dtype,
    ) -> None:
        self.target, self.record = target, record
        self.part = target.with_name(target.name + ".part")
        self.counter = target.with_name(target.name + ".count")
        self.clips, self.frames = tokens_shape[0], frames
        self.clip_bytes = tokens_shape[1] * tokens_shape[2] * dtype.itemsize
        times_bytes = self.clips * frames * 8
        entries = {
            "times": _entry("F64", (self.clips, frames), 0, times_bytes),
            "tokens": _entry(
                DTYPES[dtype], tokens_shape, times_bytes, self.clips * self.clip_bytes
            ),
        }
        self._entries = entries
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(target.name + ".lock")
        for place in (self.part, self.counter, lock):
            _clear_way(place)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        self._lock = FileLock(lock)
        self._lock.acquire(blocking=False)
        self._header = self._render(record, None)
        self._times_at = len(self._header)
        self._tokens_at = self._times_at + times_bytes
        self.done, self.damaged_seconds = self._resume()

    def _render(self, record: MemoryRecord, length: int | None) -> bytes:
        header = {"__metadata__": {RECORD_KEY: record.to_json()}, **self._entries}
        text = json.dumps(header).encode()
        if length is None:
            length = -(-(len(text) + _SPARE_BYTES) // 8) * 8
        if len(text) > length:
            return self._header
        return length.to_bytes(8, "little") + text.ljust(length)

    def _resume(self) -> tuple[int, list[float]]:
        try:
            with self.part.open("rb") as file:
                same = file.read(len(self._header)) == self._header
            count, damaged = _COUNTER(json.loads(self.counter.read_text())) if same else (0, ())
        except (OSError, ValueError, RecursionError):
            same, count, damaged = False, 0, ()
        if not same:
            self.start_over()
        return min(count, self.clips), list(damaged)

    def start_over(self) -> None:
        """Forget what an earlier run wrote."""
        self.done, self.damaged_seconds = 0, list[float]()
        self.counter.unlink(missing_ok=True)
        with self.part.open("wb") as file:
            file.write(self._header)
            file.truncate(self._tokens_at + self.clips * self.clip_bytes)

    def add(self, tokens: torch.Tensor, times: np.ndarray) -> None:
        """Write the next clips: tokens (B, R, H) and times (B, frames)."""
        raw = tokens.detach().cpu().contiguous().view(torch.uint8).numpy()
        with self.part.open("r+b") as file:
            file.seek(self._times_at + self.done * self.frames * 8)
            file.write(np.ascontiguousarray(times, dtype="<f8").tobytes())
            file.seek(self._tokens_at + self.done * self.clip_bytes)
            file.write(raw.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.done += len(times)
        write_whole(self.counter, json.dumps([self.done, self.damaged_seconds]))

    def finish(self, notes: tuple[str, ...]) -> Path:
        """Complete the record and give the file its name."""
        record = replace(
            self.record,
            notes=notes,
            damaged=len(self.damaged_seconds),
            digest=_digest(self.part, self._times_at),
        )
        with self.part.open("r+b") as file:
            file.write(self._render(record, self._times_at - 8))
            file.flush()
            os.fsync(file.fileno())
        self.part.replace(self.target)
        self.counter.unlink(missing_ok=True)
        return self.target

    def release(self) -> None:
        """Let another run write the file; what was written stays, to be gone on with."""
        # The name first: once the lock is free, it may be another run's.
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def discard(self) -> None:
        """Delete what was written: an unfinished memory that nobody asked for by name."""
        self.part.unlink(missing_ok=True)
        self.counter.unlink(missing_ok=True)

    def written(self) -> tuple[torch.Tensor, np.ndarray]:
        """Tokens and times of the clips that are there."""
        tokens, times = _read_tensors(self.part)
        return tokens[: self.done], times[: self.done]


def _clear_way(place: Path) -> None:
    """Delete a link or pipe that stands where a file is to be written: never write through it."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(place.lstat().st_mode):
            place.unlink()


def _digest(path: Path, start: int) -> str:
    """SHA-256 of a file from an offset on."""
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(dtype: str, shape: tuple[int, ...], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}


def _read_tensors(path: Path) -> tuple[torch.Tensor, np.ndarray]:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("tokens"), file.get_tensor("times").numpy()


def load_memory(path: Path, fingerprint: str, model: str, config: NetworkConfig) -> VideoMemory:
    """Load a memory for a model.

    Args:
        path: a file that ``MemoryWriter`` finished.
        fingerprint: of the model that will be asked. model: its name, for the error.
        config: its shape.

    Raises:
        MediaError: the file is missing, damaged, or not a video memory.
        WeightsError: it was made by another model.
    """
    record = read_record(path)
    if record.fingerprint != fingerprint:
        raise WeightsError(
            f"{path.name} was made by {record.model}, and {model} is loaded",
            "visual tokens are understood only by the model that made them",
            f"use --model {record.model}, or the video itself",
        )
    try:
        tokens, times = _read_tensors(path)
        with path.open("rb") as file:
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
        sound = _digest(path, header_bytes) == record.digest
    except (SafetensorError, OSError) as error:
        raise MediaError(f"{path.name}: damaged ({error})") from error
    token = (config.visual_tokens_per_clip, config.connector.text_width)
    # What is forged has the right digest too.
    sound = (
        sound
        and tokens.shape == (record.clips, *token)
        and tokens.dtype in DTYPES
        and bool(tokens.isfinite().all())
        and times.shape == (record.clips, config.frames_per_clip)
        and times.dtype == np.float64
        and bool((np.abs(times) <= MOST_SECONDS).all())
    )
    if not sound:
        raise MediaError(f"{path.name}: damaged", next_step="remember the video again")
    plan = ClipPlan(
        times, record.span_seconds, *record.window, record.wanted_clips, record.is_uniform
    )
    return VideoMemory(
        path=Path(record.path),
        kind=record.kind,
        duration_seconds=record.duration_seconds,
        plan=plan,
        tokens=tokens,
        times=times,
        clip_seconds=record.clip_seconds,
        notes=record.notes,
        remembered=path,
        spoken=Spoken(tuple(Subtitle(*row) for row in record.subtitles), record.subtitle_style),
    )
