"""The engine: one loaded model, many videos, many questions."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apollo_cli.answer import Answer, AnswerStream, TokenCount, cited_times
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions, check_question
from apollo_cli.errors import UsageError
from apollo_cli.loaded_model import FoundModel, LoadedModel, find_model, load_weights
from apollo_cli.memory_file import load_memory
from apollo_cli.memory_plan import Settings
from apollo_cli.memory_record import SUFFIX
from apollo_cli.model.prompt import Turn
from apollo_cli.planner import Spoken, read_spoken
from apollo_cli.session import Session, is_looping
from apollo_cli.text import count
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.subtitles import read_subtitles
from apollo_cli.video_memory import VideoMemory, fit_memories
from apollo_cli.watcher import Progress, Watcher, no_progress
from apollo_cli.weights.checkpoint import QuantKind
from apollo_cli.weights.registry import read_card, toy_remarks
from apollo_cli.weights.store import AUTO


def load(
    model: str | Path = AUTO,
    *,
    device: str | None = None,
    dtype: str | None = None,
    template: str | None = None,
    quant: QuantKind | None = None,
    adapter: str | Path | None = None,
    settings: Settings | None = None,
    use_cache: bool = True,
    reader: GuardedReader | None = None,
    on_progress: Progress = no_progress,
) -> Apollo:
    """Find a model and load it: ``find_model`` has its arguments, ``load_found`` the others."""
    found = find_model(
        model, device=device, dtype=dtype, template=template, quant=quant, adapter=adapter
    )
    return load_found(
        found,
        settings=settings,
        use_cache=use_cache,
        reader=reader,
        on_progress=on_progress,
    )


def load_found(
    found: FoundModel,
    *,
    settings: Settings | None = None,
    use_cache: bool = True,
    reader: GuardedReader | None = None,
    on_progress: Progress = no_progress,
) -> Apollo:
    """Load a model that was found.

    Args:
        found: from ``find_model``.
        settings: from ``memory_plan.fit_videos``; their precision wins.
        use_cache: whether video memories are kept on disk and found again.
        reader: a reader that runs already; None starts one when it is needed.
        on_progress: called with stage, amount done, and amount in all.

    Raises:
        WeightsError: model or adapter is damaged, or they do not fit.
        DeviceError: bitsandbytes is needed and missing, or cannot run on the device.
    """
    started = time.perf_counter()
    if settings is not None:
        planner = replace(found.planner, most_clips=settings.most_clips)
        found = replace(found, planner=planner, quant=settings.quant)
    loaded = load_weights(found, lambda done, total: on_progress("load", done, total))
    watcher = Watcher(
        loaded.network,
        loaded.planner,
        loaded.located.name,
        loaded.fingerprint,
        use_cache,
        settings.encode_batch if settings else 0,
        reader or GuardedReader(),
    )
    apollo = Apollo(loaded, watcher, time.perf_counter() - started)
    if settings is not None:
        apollo.session.chunk_tokens = settings.prefill_chunk
    return apollo


class Apollo:
    """A loaded model. Not safe for several threads at once; ask one question after the other."""

    def __init__(self, loaded: LoadedModel, watcher: Watcher, load_seconds: float) -> None:
        self.loaded = loaded
        self.watcher = watcher
        self.network = loaded.network
        self.planner = loaded.planner
        self.prompts = loaded.planner.prompts
        self.hardware = loaded.hardware
        self.located = loaded.located
        self.quant = loaded.quant
        self.load_seconds = load_seconds
        self._card = read_card(self.located.folder) if self.located.is_toy else {}
        self.session = Session(self.network, self.prompts)

    def watch(
        self, path: str | Path | VideoInfo, sampling: SamplingOptions | None = None, **options: Any
    ) -> VideoMemory:
        """Watch one video or image; see ``watch_all`` for the options."""
        return self.watch_all([path], sampling, **options)[0]

    def watch_all(
        self,
        paths: Sequence[str | Path | VideoInfo],
        sampling: SamplingOptions | None = None,
        *,
        reserve_tokens: int | None = None,
        spare_tokens: int | None = None,
        reading: ReadingOptions | None = None,
        spoken: Sequence[Spoken] | None = None,
        on_progress: Progress = no_progress,
    ) -> list[VideoMemory]:
        """Watch videos and images that belong to one question and share its token budget.

        Args:
            paths: videos and images, or what ``probe`` said of them; or files of ``remember``.
            sampling: which moments to look at.
            reserve_tokens, spare_tokens: tokens kept for question and answer, as in
                ``Planner.plan``.
            reading: how files are read; limits and stream do not matter for probed ones.
            spoken: subtitles of each file but those of ``remember``; None reads them.
            on_progress: called with ``decode`` or ``encode``, clips done, and clips in all.

        Raises:
            MediaError: a file cannot be read.
            FitError: not even one clip of each fits.
        """
        sampling = sampling or SamplingOptions()
        reading = reading or ReadingOptions()
        found = [self._open(path, sampling, reading) for path in paths]
        infos = [item for item in found if isinstance(item, VideoInfo)]
        spoken = spoken or [read_spoken(info, reading) for info in infos]
        reserve = self.planner.reserve(reserve_tokens, spare_tokens)
        planned = iter(
            self.planner.plan(infos, sampling, reserve[0], spoken, spare_tokens=reserve[1])
            if infos
            else ()
        )
        memories = [
            item.within(sampling.start_seconds, sampling.end_seconds).thinned(
                sampling.max_clips or len(item)
            )
            if isinstance(item, VideoMemory)
            else self.watcher.watch(next(planned), reading, on_progress=on_progress)
            for item in found
        ]
        if not memories:
            return []
        # A file of `remember` may hold more than the context: what is left is what is told.
        context = self.network.config.context
        fitted = fit_memories(memories, self.prompts, context, reserve[0], [], spare=reserve[1])
        return [_told(memory, item) for memory, item in zip(fitted, found, strict=True)]

    def remember(
        self,
        path: str | Path | VideoInfo,
        target: Path,
        sampling: SamplingOptions | None = None,
        *,
        reading: ReadingOptions | None = None,
        on_progress: Progress = no_progress,
    ) -> VideoMemory:
        """Watch all of a video, whatever a context holds, and keep it in a file of its own.

        Later questions take from it what fits them. A stopped run is gone on with.

        Args:
            target: the file to write; ``watch`` reads it again.
        """
        sampling, reading = sampling or SamplingOptions(), reading or ReadingOptions()
        info = self._open(path, sampling, reading)
        if isinstance(info, VideoMemory) or info.kind == "image" or info.files:
            raise UsageError(f"{path} is not a video file", "only video files are remembered")
        planned = self.planner.plan_everything(info, sampling, read_spoken(info, reading))
        return self.watcher.watch(planned, reading, target=target, on_progress=on_progress)

    def ask(
        self,
        video: VideoMemory | Sequence[VideoMemory] | None,
        question: str,
        options: GenerationOptions | None = None,
        history: Sequence[Turn] = (),
    ) -> Answer:
        """Answer a question about watched videos, or about text alone with None.

        Raises:
            UsageError: the question is empty.
            FitError: the question does not fit the context.
        """
        return self.stream(video, question, options, history).finish()

    def stream(
        self,
        video: VideoMemory | Sequence[VideoMemory] | None,
        question: str,
        options: GenerationOptions | None = None,
        history: Sequence[Turn] = (),
    ) -> AnswerStream:
        """As ``ask``, with the text as it is written."""
        question = check_question(question)
        memories = [video] if isinstance(video, VideoMemory) else list(video or [])
        stream, options = AnswerStream(iter(())), options or GenerationOptions()
        stream.pieces = self._write(stream, memories, question, options, history)
        return stream

    def _open(
        self, path: str | Path | VideoInfo, sampling: SamplingOptions, reading: ReadingOptions
    ) -> VideoInfo | VideoMemory:
        if isinstance(path, VideoInfo):
            return path
        if Path(path).suffix != SUFFIX:
            return self.watcher.reader.probe(path, reading)
        if sampling.mode != "fps" or sampling.fps is not None or reading.fast:
            raise UsageError(
                f"{path} is a memory: its pictures were chosen when it was made",
                "allowed are --from, --to and --max-clips",
                "ask the video itself for another sampling",
            )
        own = self.watcher.fingerprint, self.located.name, self.network.config
        memory = load_memory(Path(path), *own)
        memory = replace(memory, tokens=memory.tokens.to(self.network.device))
        if reading.subtitles not in ("none", "auto"):
            notes: list[str] = []
            lines = read_subtitles(reading.subtitles, notes=notes)
            spoken = Spoken(lines, reading.subtitle_style, tuple(notes))
            memory = replace(memory, spoken=spoken)
        return memory

    def suffix_ids(
        self, memories: Sequence[VideoMemory], question: str, history: Sequence[Turn] = ()
    ) -> list[int]:
        """Ids of a prompt behind its visual tokens: listed subtitles, turns and question."""
        listed = "".join(memory.listed for memory in memories)
        return self.prompts.suffix_ids(question, history, bool(memories), listed)

    def remarks(self, question: str) -> list[str]:
        """What a user should know about any answer of this model to a question."""
        return toy_remarks(self._card, question) if self.located.is_toy else []

    def describe(self) -> dict[str, Any]:
        """Which model this is and where it runs."""
        return {
            "name": self.located.name,
            "revision": self.located.revision,
            "adapter": self.located.adapter,
            "device": self.hardware.device,
            "dtype": self.hardware.dtype,
            "quant": self.quant,
            "attention": self.hardware.attention,
            "reasons": list(self.hardware.reasons),
            "template": self.prompts.template_name,
        }

    def _fitting_turns(
        self,
        memories: list[VideoMemory],
        question: str,
        options: GenerationOptions,
        history: Sequence[Turn],
    ) -> list[Turn]:
        """Leave out whole turns, the oldest first, until the prompt fits beside the videos."""
        if not history:
            return []
        prefix = len(self.prompts.prefix_ids([memory.part for memory in memories]))
        free = self.network.config.context - options.max_new_tokens - prefix

        def fits(first: int) -> bool:
            return len(self.suffix_ids(memories, question, history[first:])) <= free

        # Spelling a long talk takes a while, so it is not spelled once for each turn.
        first = 0 if fits(0) else 1 + bisect_left(range(1, len(history)), True, key=fits)
        return list(history[first:])

    def _write(
        self,
        stream: AnswerStream,
        memories: list[VideoMemory],
        question: str,
        options: GenerationOptions,
        history: Sequence[Turn],
    ) -> Iterator[str]:
        notes: list[str] = []
        turns = self._fitting_turns(memories, question, options, history)
        if len(turns) < len(history):
            out = len(history) - len(turns)
            notes.append(f"the oldest {out} turn{'s' * (out > 1)} did not fit any more")
        suffix = self.suffix_ids(memories, question, turns)
        needed = len(suffix) + options.max_new_tokens
        context = self.network.config.context
        memories = fit_memories(memories, self.prompts, context, needed, notes)
        started = time.perf_counter()
        logits = self.session.read(memories, suffix)
        prefix_length = self.session.prefix_length
        prefilled = time.perf_counter()
        ids: list[int] = []
        yield from self.session.spell(logits, options, ids)
        stop = self._why_stopped(ids, options, notes)
        text = self.prompts.tokenizer.decode(ids).strip()
        visual = sum(memory.tokens.shape[0] * memory.tokens.shape[1] for memory in memories)
        text_tokens = prefix_length - visual + len(suffix)
        stream.answer = Answer(
            text=text,
            question=question,
            stop=stop,
            generated=len(ids),
            tokens=TokenCount(visual, text_tokens, options.max_new_tokens, context),
            seconds={
                "load": self.load_seconds,
                "decode": sum(memory.decode_seconds for memory in memories),
                "encode": sum(memory.encode_seconds for memory in memories),
                "prefill": prefilled - started,
                "generate": time.perf_counter() - prefilled,
            },
            videos=tuple(memory.describe() for memory in memories),
            model=self.describe(),
            notes=tuple(notes),
            citations=tuple(cited_times(text, memories[0])) if len(memories) == 1 else (),
        )

    def _why_stopped(self, ids: list[int], options: GenerationOptions, notes: list[str]) -> str:
        if is_looping(ids):
            notes.append("the answer began to repeat itself and was stopped")
            return "repetition"
        if len(ids) >= options.max_new_tokens:
            notes.append(f"the answer was cut at {count(options.max_new_tokens, 'token')}")
            return "length"
        return "end"


def _told(memory: VideoMemory, source: VideoInfo | VideoMemory) -> VideoMemory:
    """Say in the notes how much of a file of ``remember`` is used, where that is not all."""
    if isinstance(source, VideoInfo) or len(memory) == len(source):
        return memory
    note = f"{len(memory)} of the {len(source)} clips of this file are used"
    return replace(memory, notes=(*memory.notes, note))
