"""Watching: from a plan to video memory, decoded, encoded, and kept on disk as it goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from filelock import Timeout

from apollo_cli.config import ENCODE_BATCH, ReadingOptions
from apollo_cli.errors import ApolloError, FitError, UsageError
from apollo_cli.memory_cache import adopt_old, find_memory, identify, limit_bytes, place_for, prune
from apollo_cli.memory_file import MemoryWriter, load_memory
from apollo_cli.memory_record import MemoryRecord
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.config import NetworkConfig
from apollo_cli.planner import Planned, Planner
from apollo_cli.text import count
from apollo_cli.video.container import is_from_stdin
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.reader import Frames, describe_damage
from apollo_cli.video.sampler import ClipPlan
from apollo_cli.video_memory import VideoMemory

_NOT_KEPT = "what was seen could not be kept for later"

Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Say nothing."""


def read_planned(
    reader: GuardedReader,
    config: NetworkConfig,
    info: VideoInfo,
    times: np.ndarray,
    reading: ReadingOptions,
    *,
    batch_clips: int,
) -> Iterator[Frames]:
    """Read planned clips as the encoders of a model take them, ``batch_clips`` at a time.

    Args:
        times: (clips, frames), of the plan.

    Raises:
        MediaError: the file cannot be read.
    """
    return reader.read_clips(
        info,
        times,
        [encoder.pixels for encoder in config.encoders],
        reading,
        batch_clips=batch_clips,
    )


@dataclass
class Keeper:
    """Keeps what is seen, as it is seen; a cache that fails is given up, and the watching goes on.

    Attributes:
        writer: of the memory; None when nothing is kept.
        is_asked_for: whether the user named the file, so that a failure is an error.
        notes: what is said of this run only, and not kept.
    """

    writer: MemoryWriter | None
    is_asked_for: bool
    notes: tuple[str, ...] = ()

    def add(self, tokens: torch.Tensor, times: np.ndarray, damaged_seconds: list[float]) -> None:
        """Write the next clips.

        Args:
            damaged_seconds: times of all damaged pictures so far.

        Raises:
            UsageError: the file that the user named cannot be written.
        """
        if self.writer is not None:
            self.writer.damaged_seconds = damaged_seconds
            self._attempt(partial(self.writer.add, tokens, times))

    def finish(self, memory: VideoMemory) -> VideoMemory:
        """Complete the file; the memory says what came of it.

        Raises:
            UsageError: the file that the user named cannot be written.
        """
        if self.writer is not None:
            self._attempt(partial(self.writer.finish, memory.notes))
        if self.writer is not None and not self.is_asked_for:
            # What cannot be deleted now is tried again after the next video.
            with suppress(OSError):
                prune(limit_bytes())
        return replace(memory, notes=(*memory.notes, *self.notes))

    def release(self) -> None:
        """Let another run write the file."""
        if self.writer is not None:
            self.writer.release()

    def _attempt(self, write: Callable[[], object]) -> None:
        assert self.writer is not None
        try:
            write()
        except OSError as error:
            if self.is_asked_for:
                raise _cannot_write(self.writer.target, error) from error
            self.notes += (f"{_NOT_KEPT} ({error.strerror})",)
            self.writer.discard()
            self.release()
            self.writer = None


@dataclass
class Watcher:
    """Watches videos for one model.

    Attributes:
        network, planner: of the model. model_name, fingerprint: its identity.
        use_cache: whether memories are found again and kept.
        encode_batch: clips that are encoded at once; halves itself when memory runs out.
        reader: decodes in a child process.
    """

    network: ApolloModel
    planner: Planner
    model_name: str
    fingerprint: str
    use_cache: bool = True
    encode_batch: int = 0
    reader: GuardedReader = field(default_factory=GuardedReader)

    def __post_init__(self) -> None:
        kind = self.network.device.type
        self.encode_batch = self.encode_batch or ENCODE_BATCH.get(kind, ENCODE_BATCH["cpu"])
        moved = adopt_old() if self.use_cache else None
        self._news = [moved] if moved else []
        self._told_of_cache = False

    def watch(
        self,
        planned: Planned,
        reading: ReadingOptions,
        *,
        target: Path | None = None,
        on_progress: Progress = no_progress,
    ) -> VideoMemory:
        """Decode and encode the planned clips, or find them in the cache.

        Args:
            reading: how the file is read.
            target: where to keep the memory; None keeps it in the cache, if that is used.
            on_progress: called with ``decode`` or ``encode``, clips done, and clips in all.
        """
        info, plan, spoken = planned.info, planned.plan, planned.spoken
        keeper = Keeper(None, is_asked_for=target is not None)
        if target is not None or self.keeps(info, reading):
            source = identify(info.path, info.stream_index)
            if target is None:
                # A wrong limit is told before the watching, not after it.
                limit_bytes()
                remembered = self._remember(source, info, plan, reading)
                if remembered is not None:
                    return replace(remembered, spoken=spoken)
            place = target or place_for(source, self.fingerprint, plan)
            keeper = self._keeper(
                place, self._record(source, planned, reading), is_asked_for=bool(target)
            )
        try:
            memory = self._look(info, plan, keeper, reading, on_progress)
            memory = keeper.finish(memory)
        finally:
            keeper.release()
        return replace(memory, spoken=spoken)

    def keeps(self, info: VideoInfo, reading: ReadingOptions) -> bool:
        """Whether what is seen of a file so read is kept in the cache, and found there again."""
        # A folder has no content to sample, and approximate pictures are not worth keeping.
        is_film = info.kind == "video" and not info.files
        # The copy of a video from stdin is another file each time: nobody would find it again.
        return self.use_cache and is_film and not reading.fast and not is_from_stdin(info.path)

    def _remember(
        self, source: str, info: VideoInfo, plan: ClipPlan, reading: ReadingOptions
    ) -> VideoMemory | None:
        """What the cache holds of a plan; a file of it that cannot be read is deleted."""
        found = find_memory(source, self.fingerprint, plan, reading)
        if found is None:
            return None
        try:
            os.utime(found)
            config = self.network.config
            memory = load_memory(found, self.fingerprint, self.model_name, config)
        except (ApolloError, OSError):
            with suppress(OSError):
                found.unlink()
            return None
        tokens = memory.tokens.to(self.network.device)
        # Its clips are those of the plan, and the window may be told otherwise.
        return replace(memory, path=info.path, plan=plan, tokens=tokens)

    def _record(self, source: str, planned: Planned, reading: ReadingOptions) -> MemoryRecord:
        info, plan, spoken = planned.info, planned.plan, planned.spoken
        return MemoryRecord(
            model=self.model_name,
            fingerprint=self.fingerprint,
            source=source,
            path=str(info.path),
            kind=info.kind,
            duration_seconds=info.duration_seconds,
            clip_seconds=self.planner.clip_seconds(plan),
            window=(plan.start_seconds, plan.end_seconds),
            span_seconds=plan.clip_seconds,
            clips=len(plan),
            wanted_clips=plan.wanted_clips,
            subtitles=tuple((s.start_seconds, s.end_seconds, s.text) for s in spoken.subtitles),
            subtitle_style=spoken.style,
            is_uniform=plan.is_uniform,
            decoder=reading.decoder,
        )

    def _keeper(self, target: Path, record: MemoryRecord, *, is_asked_for: bool) -> Keeper:
        """Start to write a memory; nothing is kept where the cache is out of order or in use."""
        config = self.network.config
        shape = (record.clips, config.visual_tokens_per_clip, config.connector.text_width)
        writer = None
        try:
            writer = MemoryWriter(target, record, shape, config.frames_per_clip, self.network.dtype)
        except Timeout as error:
            if is_asked_for:
                raise UsageError(
                    f"{target} is being written by another run", next_step="wait for it"
                ) from error
        except OSError as error:
            if is_asked_for:
                raise _cannot_write(target, error) from error
            if not self._told_of_cache:
                self._news.append(f"{_NOT_KEPT} ({target.parent}: {error.strerror})")
                self._told_of_cache = True
        notes, self._news = tuple(self._news), []
        return Keeper(writer, is_asked_for, notes)

    def _look(
        self,
        info: VideoInfo,
        plan: ClipPlan,
        keeper: Keeper,
        reading: ReadingOptions,
        on_progress: Progress,
    ) -> VideoMemory:
        tokens, times, notes = [], [], list[str]()
        skipped, damaged = 0, list[float]()
        if keeper.writer and reading.strict and keeper.writer.damaged_seconds:
            keeper.writer.start_over()
        if keeper.writer and keeper.writer.done:
            skipped, damaged = keeper.writer.done, keeper.writer.damaged_seconds
            kept = keeper.writer.written()
            tokens.append(kept[0].to(self.network.device))
            times.append(kept[1])
            earlier = "of an earlier, stopped run"
            keeper.notes += (
                count(skipped, f"clip {earlier} was kept", f"clips {earlier} were kept"),
            )
        fast = ["--fast: the nearest key pictures were taken"] if reading.fast else []
        decode_seconds = encode_seconds = 0.0
        mark = time.perf_counter()
        batches = read_planned(
            self.reader,
            self.network.config,
            info,
            plan.times[skipped:],
            reading,
            batch_clips=self.encode_batch,
        )
        for batch in batches if skipped < len(plan) else ():
            done = skipped + batch.position + len(batch.seconds)
            decoded = time.perf_counter()
            on_progress("decode", done, len(plan))
            encoded = self._encode(batch.pixels, notes)
            damaged = [*damaged, *batch.damaged]
            keeper.add(encoded, batch.seconds, damaged)
            tokens.append(encoded)
            times.append(batch.seconds)
            decode_seconds += decoded - mark
            mark = time.perf_counter()
            encode_seconds += mark - decoded
            on_progress("encode", done, len(plan))
        told = describe_damage(info, damaged, plan.times, reading)
        return VideoMemory(
            path=info.path,
            kind=info.kind,
            duration_seconds=info.duration_seconds,
            plan=plan,
            tokens=torch.cat(tokens),
            times=np.concatenate(times),
            clip_seconds=self.planner.clip_seconds(plan),
            notes=(*info.warnings, *notes, *filter(None, [told]), *fast),
            decode_seconds=decode_seconds,
            encode_seconds=encode_seconds,
        )

    @torch.inference_mode()
    def _encode(self, pixels: dict[str, np.ndarray], notes: list[str]) -> torch.Tensor:
        """Encode a batch of clips; a batch too large for the memory halves itself and says so."""
        clips = len(next(iter(pixels.values())))
        tokens: list[torch.Tensor] = []
        while len(tokens) < clips:
            size = min(self.encode_batch, clips - len(tokens))
            piece = {
                name: torch.from_numpy(array[len(tokens) : len(tokens) + size])
                for name, array in pixels.items()
            }
            try:
                tokens.extend(self.network.encode_clips(piece))
            except torch.OutOfMemoryError as error:
                if size == 1:
                    raise FitError(
                        "one clip does not fit the memory of the device",
                        next_step="use --device cpu or a smaller model",
                    ) from error
                self.encode_batch = size // 2
                torch.cuda.empty_cache()
                notes.append(f"out of memory: clips are now encoded {size // 2} at a time")
        return torch.stack(tokens)


def _cannot_write(target: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{target} cannot be written ({error.strerror})",
        next_step="choose another place with -o; what was seen so far is gone on with",
    )
