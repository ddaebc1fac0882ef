"""Subtitles in a prompt: listed before the question, or interleaved with the clips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions, SubtitleStyle
from apollo_cli.model.config import NetworkConfig
from apollo_cli.model.prompt import PromptBuilder, VisualPart
from apollo_cli.model.tokenizer import PieceCounter, load_tokenizer
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.sampler import (
    ClipPlan,
    count_wanted_clips,
    largest_fitting,
    plan_clips,
    resolve_window,
    share_clips,
)
from apollo_cli.video.subtitles import Subtitle, find_subtitles, subtitles_between
from apollo_cli.weights.checkpoint import Checkpoint
from apollo_cli.weights.network import build_network_config, released_network
from apollo_cli.weights.registry import ModelEntry


@dataclass(frozen=True)
class Spoken:
    """What is said in a video, and how it is told.

    Attributes:
        subtitles: in order of time. style: ``listed`` or ``interleaved``.
        notes: what a user should know about where they were read, a sentence each.
    """

    subtitles: tuple[Subtitle, ...] = ()
    style: SubtitleStyle = "listed"
    notes: tuple[str, ...] = ()

    def words(self, times: np.ndarray, clip_seconds: float) -> tuple[str, ...]:
        """What is on display during each clip of times (clips, frames); empty when listed."""
        if self.style == "listed" or not self.subtitles:
            return ()
        return tuple(
            " ".join(s.text for s in subtitles_between(self.subtitles, start, start + clip_seconds))
            for start in times[:, 0].tolist()
        )

    def listed(self, window: tuple[float, float]) -> str:
        """The lines of a window, as the paper's evaluation puts them; empty when interleaved."""
        if self.style == "interleaved":
            return ""
        found = subtitles_between(self.subtitles, *window)
        if not found:
            return ""
        lines = "\n".join(subtitle.text for subtitle in found)
        return f"This video's subtitles are listed below:\n{lines}\n"


def read_spoken(info: VideoInfo, reading: ReadingOptions) -> Spoken:
    """Read the subtitles of a video, where they were asked for."""
    notes: list[str] = []
    lines = find_subtitles(info, reading.subtitles, notes=notes)
    return Spoken(lines, reading.subtitle_style, tuple(notes))


@dataclass(frozen=True)
class Planned:
    """One video or image of a question, before it is watched.

    Attributes:
        info: what is known of the file. plan: which clips the model sees. spoken: what is said.
    """

    info: VideoInfo
    plan: ClipPlan
    spoken: Spoken = field(default_factory=Spoken)

    @property
    def listed(self) -> str:
        """The subtitles of its window, where they are listed before the question."""
        return self.spoken.listed((self.plan.start_seconds, self.plan.end_seconds))


# Room for a question grows in steps, so that the clips do not depend on its every word.
_QUESTION_STEP, _QUESTION_SHARE = 256, 16


def load_planner(
    checkpoint: Checkpoint, template: str | None = None, config: NetworkConfig | None = None
) -> Planner:
    """The planner of a checkpoint: its shape and its tokenizer, without its weights.

    Args:
        template: chat template; None takes the checkpoint's.
        config: of the checkpoint, where it is known already.

    Raises:
        WeightsError: configs or tokenizer files are missing or damaged.
        UsageError: the template is unknown.
    """
    config = config or build_network_config(checkpoint)
    prompts = PromptBuilder(
        load_tokenizer(checkpoint.tokenizer),
        config.clip_seconds,
        config.visual_tokens_per_clip,
        template or config.template,
        labelled=config.connector.integration in ("timestamps", "both"),
    )
    return Planner(config, prompts)


def assumed_planner(entry: ModelEntry, template: str | None = None) -> AssumedPlanner:
    """The planner of a known model that is not on this machine; its numbers of tokens are close.

    Raises:
        WeightsError: the shape of the model is not known.
    """
    network = released_network(entry)
    config = network.config
    prompts = PromptBuilder(
        PieceCounter(),
        config.clip_seconds,
        config.visual_tokens_per_clip,
        template or config.template,
    )
    assumed = (*network.assumed, "a label of a clip taken as the pieces of its text")
    return AssumedPlanner(Planner(config, prompts), assumed)


@dataclass(frozen=True)
class AssumedPlanner:
    """A planner, and what is not known of its model, in words."""

    planner: Planner
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class Planner:
    """Plans for one checkpoint.

    Attributes:
        config: shape of the network. prompts: counts the tokens of its prompts exactly.
        most_clips: more are never planned, whatever the context holds.
    """

    config: NetworkConfig
    prompts: PromptBuilder
    most_clips: int | None = None

    def plan(
        self,
        infos: Sequence[VideoInfo],
        sampling: SamplingOptions | Sequence[SamplingOptions],
        reserve_tokens: int | None = None,
        spoken: Sequence[Spoken] | None = None,
        *,
        budget: int | None = None,
        spare_tokens: int | None = None,
    ) -> list[Planned]:
        """Decide which clips of each file the model sees.

        Args:
            infos: the videos and images of one question; they share the budget.
            sampling: what the user asked for; of all, or of each.
            reserve_tokens: tokens of the longest question and its answer; None knows of neither.
            spoken: what is said in each; it takes its share of the budget.
            budget: tokens in all; None is the context.
            spare_tokens: left free as well where possible, see ``spare_for``; None is what an
                unknown question takes where ``reserve_tokens`` is None, else 0.

        Raises:
            FitError: not even one clip of each fits.
            UsageError: the window lies outside a video.
        """
        reserve_tokens, spare_tokens = self.reserve(reserve_tokens, spare_tokens)
        one = isinstance(sampling, SamplingOptions)
        samplings = [sampling] * len(infos) if one else sampling
        files = list(zip(infos, samplings, spoken or [Spoken()] * len(infos), strict=True))
        wanted = [self._wanted_clips(info, sampling) for info, sampling, _ in files]
        listed = "".join(
            said.listed(self._window(info, sampling)) for info, sampling, said in files
        )
        reserve_tokens += len(self.prompts.tokenizer.encode(listed))

        def planned(total: int) -> list[Planned]:
            shares = share_clips(wanted, total)
            return [
                Planned(info, self._plan_one(info, sampling, clips), said)
                for (info, sampling, said), clips in zip(files, shares, strict=True)
            ]

        def tokens_of(total: int) -> int:
            parts = [self.part(file) for file in planned(total)]
            return len(self.prompts.prefix_ids(parts)) + reserve_tokens

        fewest = len(infos)
        most = max(fewest, min(sum(wanted), self.most_clips or sum(wanted)))
        fitting = largest_fitting(
            most, tokens_of, budget or self.config.context, fewest, spare_tokens
        )
        return planned(fitting)

    @property
    def question_tokens(self) -> int:
        """Tokens that are kept free for a question: a longer one gets a multiple of them."""
        return min(_QUESTION_STEP, self.config.context // _QUESTION_SHARE)

    def spare_for(self, question_tokens: int) -> int:
        """Tokens kept free beside a question, so that one of other words sees the same clips."""
        step = self.question_tokens
        return max(step, -(-question_tokens // step) * step) - question_tokens

    def reserve(self, reserve_tokens: int | None, spare_tokens: int | None) -> tuple[int, int]:
        """What is kept free for question and answer, and beside them, where None is unknown."""
        if reserve_tokens is None:
            unknown = self.question_tokens if spare_tokens is None else spare_tokens
            return GenerationOptions().max_new_tokens, unknown
        return reserve_tokens, spare_tokens or 0

    def plan_everything(
        self, info: VideoInfo, sampling: SamplingOptions, spoken: Spoken | None = None
    ) -> Planned:
        """All clips of one video, however many a context holds."""
        plan = self._plan_one(info, sampling, self._wanted_clips(info, sampling))
        return Planned(info, plan, spoken or Spoken())

    def part(self, planned: Planned, times: np.ndarray | None = None) -> VisualPart:
        """A planned video as the prompt will tell it, with the times of its real pictures.

        Args:
            times: (clips, frames) of the pictures that were read; None foretells them.
        """
        info, plan = planned.info, planned.plan
        if times is None:
            times = plan.times
            if info.kind == "video":
                times = info.times[info.frames_at(times[:, [0, -1]])]
        spans = tuple((float(clip[0]), float(clip[-1])) for clip in times)
        return VisualPart(
            spans,
            info.duration_seconds,
            info.kind == "image",
            self.clip_seconds(plan),
            planned.spoken.words(times, plan.clip_seconds),
        )

    def clip_seconds(self, plan: ClipPlan) -> float:
        """The length of a clip as the prompt tells it: as the config has it, "2" or "2.0"."""
        usual = self.config.clip_seconds
        return usual if plan.clip_seconds == usual else round(plan.clip_seconds, 1)

    def _window(self, info: VideoInfo, sampling: SamplingOptions) -> tuple[float, float]:
        if info.kind == "image":
            return 0.0, 0.0
        return resolve_window(info.duration_seconds, sampling)

    def _wanted_clips(self, info: VideoInfo, sampling: SamplingOptions) -> int:
        if info.kind == "image":
            return 1
        wanted = count_wanted_clips(
            self._window(info, sampling),
            clip_seconds=self.config.clip_seconds,
            frames_per_clip=self.config.frames_per_clip,
            options=sampling,
            grid=info.grid,
        )
        return min(wanted, sampling.max_clips or wanted)

    def _plan_one(self, info: VideoInfo, sampling: SamplingOptions, limit: int) -> ClipPlan:
        if info.kind == "image":
            still = np.zeros((1, self.config.frames_per_clip))
            return ClipPlan(still, self.config.clip_seconds, 0.0, 0.0, wanted_clips=1)
        return plan_clips(
            info.duration_seconds,
            clip_seconds=self.config.clip_seconds,
            frames_per_clip=self.config.frames_per_clip,
            limit=limit,
            options=sampling,
            grid=info.grid,
        )
