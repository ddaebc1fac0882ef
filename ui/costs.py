"""What a question will cost: clips, tokens, memory and seconds, before it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apollo_cli.answer import Answer
from apollo_cli.config import ReadingOptions
from apollo_cli.hardware import FLASH, free_bytes
from apollo_cli.memory_cache import find_memory, identify
from apollo_cli.memory_plan import Run, estimate_memory, measure_demand
from apollo_cli.planner import Planned, read_spoken
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.sampler import ClipPlan
from apollo_cli.video.subtitles import subtitles_between
from apollo_cli.video_memory import VideoMemory

if TYPE_CHECKING:
    from apollo_cli.conversation import Conversation
    from apollo_cli.engine import Apollo

_SOON_SECONDS = 0.95


@dataclass(frozen=True, eq=False)
class Cost:
    """What is planned for the files in view, and what it takes.

    Attributes:
        plans: one for each file. tokens, context: of the prompt, and what the model holds.
        peak_bytes: most memory that is taken. is_tight: it is more than is free now.
        is_remembered: nothing has to be watched. subtitles: lines that are told; None: not asked.
        watch_seconds, read_seconds: expected; None before this machine has shown its pace.
    """

    plans: tuple[ClipPlan, ...]
    tokens: int
    context: int
    peak_bytes: int
    is_tight: bool
    is_remembered: bool
    watch_seconds: float | None
    read_seconds: float | None
    subtitles: int | None = None

    def describe(self) -> list[str]:
        """Short phrases: what is seen, tokens, memory, time."""
        clips = sum(map(len, self.plans))
        seen = self.plans[0].describe() if len(self.plans) == 1 else f"{clips} clips in all"
        phrases = [
            seen,
            f"{self.tokens:,} of {self.context:,} tokens",
            f"{self.peak_bytes / 1e9:.1f} GB of memory at most"
            + (", more than is free" if self.is_tight else ""),
        ]
        if self.subtitles is not None:
            lines = f"{self.subtitles:,} line{'s' if self.subtitles != 1 else ''} of subtitles"
            phrases.append(lines if self.subtitles else "no subtitles found")
        if self.is_remembered:
            phrases.append("already watched")
        elif self.watch_seconds is not None:
            total = self.watch_seconds + (self.read_seconds or 0.0)
            phrases.append(f"{duration(total)} to the first word")
        else:
            phrases.append("time known after the first answer")
        return phrases


class Pace:
    """How fast this machine was, in seconds for each clip watched and each token read."""

    def __init__(self) -> None:
        self.clip_seconds: float | None = None
        self.token_seconds: float | None = None

    def learn(self, answer: Answer, memories: Sequence[VideoMemory], read_tokens: int) -> None:
        """Take the figures of an answer.

        Args:
            memories: what was watched for it; those that were remembered say nothing.
            read_tokens: prompt tokens that were read, without those read for an earlier question.
        """
        fresh = [memory for memory in memories if memory.encode_seconds > 0]
        if fresh:
            spent = sum(memory.decode_seconds + memory.encode_seconds for memory in fresh)
            self.clip_seconds = spent / sum(map(len, fresh))
        if read_tokens > 0:
            self.token_seconds = answer.seconds["prefill"] / read_tokens


def duration(seconds: float) -> str:
    """A span of time as people say it."""
    if seconds < _SOON_SECONDS:
        return "less than 1 s"
    if seconds < 59.5:
        return f"about {seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 60 else f"about {minutes // 60} h {minutes % 60} min"


def estimate_cost(
    apollo: Apollo,
    talk: Conversation,
    infos: Sequence[VideoInfo],
    pace: Pace,
    *,
    is_watched: bool,
) -> Cost:
    """Plan a question about files, and add up what it takes. Nothing is decoded.

    Args:
        talk: its settings count. is_watched: what is planned lies in memory already.

    Raises:
        UsageError: the window lies outside a video.
        FitError: not even one clip of each fits.
    """
    planner, hardware = apollo.planner, apollo.hardware
    spoken = [read_spoken(info, talk.reading) for info in infos]
    planned = planner.plan(infos, talk.sampling, talk.reserve_tokens, spoken)
    answer = talk.options.max_new_tokens
    demand = measure_demand(
        planner,
        planned,
        question_tokens=planner.question_tokens,
        answer_tokens=answer,
    )
    config = planner.config
    run = Run(config, hardware.device.split(":")[0], hardware.dtype, hardware.attention == FLASH)
    settings = run.settings(demand.clips, apollo.quant)
    tokens = demand.tokens_of(demand.clips)
    remembered = is_watched or all(
        _is_remembered(apollo, file.info, file.plan, talk.reading) for file in planned
    )
    watch = 0.0 if remembered else _times(pace.clip_seconds, demand.clips)
    memory = estimate_memory(run, settings, tokens)
    # The weights are loaded by now.
    missing = memory.peak - memory.weights - memory.runtime
    free = free_bytes(hardware.device)
    return Cost(
        plans=tuple(file.plan for file in planned),
        tokens=demand.visual + demand.text,
        context=config.context,
        peak_bytes=memory.peak,
        is_tight=free is not None and missing > free,
        is_remembered=remembered,
        watch_seconds=watch,
        read_seconds=_times(pace.token_seconds, demand.visual + demand.text),
        subtitles=None if talk.reading.subtitles == "none" else _count_lines(planned),
    )


def _times(each: float | None, count: int) -> float | None:
    return None if each is None else each * count


def _count_lines(planned: Sequence[Planned]) -> int:
    return sum(
        len(
            subtitles_between(file.spoken.subtitles, file.plan.start_seconds, file.plan.end_seconds)
        )
        for file in planned
    )


def _is_remembered(
    apollo: Apollo, info: VideoInfo, plan: ClipPlan, reading: ReadingOptions
) -> bool:
    if not apollo.watcher.keeps(info, reading):
        return False
    source = identify(info.path, info.stream_index)
    return find_memory(source, apollo.watcher.fingerprint, plan, reading) is not None
