"""``--fit auto``: what of a request fits the free memory, decided before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apollo_cli.config import SamplingOptions
from apollo_cli.errors import DeviceError
from apollo_cli.fit import Fitted, Run, TokenDemand, ladder, room_for
from apollo_cli.hardware import FLASH, choose_device, free_bytes
from apollo_cli.planning import Planner, load_planner
from apollo_cli.spoken import Spoken, preamble
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.sampler import ClipPlan
from apollo_cli.weights.bits import QuantKind, allowed_kinds, stored_kind
from apollo_cli.weights.checkpoint import read_checkpoint
from apollo_cli.weights.locate import locate_model


@dataclass(frozen=True)
class Wish:
    """What was asked for.

    Attributes:
        model, device, dtype, quant, adapter: as the flags say; None chooses.
        sampling: what is to be looked at.
        question_bytes: length of the longest question. answer_tokens: of the longest answer.
    """

    model: str
    device: str | None
    dtype: str | None
    quant: QuantKind | None
    sampling: SamplingOptions
    question_bytes: int
    answer_tokens: int
    adapter: str | None = None


@dataclass(frozen=True)
class Demand:
    """What videos ask of one model.

    Attributes:
        clips: that its context holds. fewest: one for each video.
        visual, text: tokens of these clips, and of what stands between them.
        tokens_of: tokens of any number of clips, question and answer included.
    """

    clips: int
    fewest: int
    visual: int
    text: int
    tokens_of: Callable[[int], TokenDemand]


def measure_demand(
    planner: Planner,
    infos: Sequence[VideoInfo],
    plans: Sequence[ClipPlan],
    *,
    spoken: Sequence[Spoken] | None = None,
    question_tokens: int,
    answer_tokens: int,
) -> Demand:
    """Count the tokens of planned videos, and of fewer of their clips.

    Args:
        spoken: what is said in each; None is nothing.
    """
    spoken = spoken or [Spoken()] * len(infos)
    parts = [planner.part(*told) for told in zip(infos, plans, spoken, strict=True)]
    windows = [(plan.start_seconds, plan.end_seconds) for plan in plans]
    listed = preamble(list(zip(spoken, windows, strict=True)))
    said = len(planner.prompts.tokenizer.encode(listed))
    clips, each = sum(map(len, plans)), planner.config.visual_tokens_per_clip
    text = len(planner.prompts.prefix_ids(parts)) - clips * each

    def tokens_of(count: int) -> TokenDemand:
        labels = -(-text * count // clips)
        return TokenDemand(count * each, labels + said + question_tokens, answer_tokens)

    return Demand(clips, len(infos), clips * each, text + said, tokens_of)


def fit_wish(
    wish: Wish, infos: Sequence[VideoInfo], spoken: Sequence[Spoken] | None = None
) -> Fitted:
    """Go down the ladder until the wish fits the free memory of its device.

    Args:
        spoken: what is said in each video; None is nothing.

    Raises:
        FitError: not even the last rung fits.
        DeviceError: the device does not say how much memory is free.
    """
    hardware = choose_device(wish.device, wish.dtype)
    free = free_bytes(hardware.device)
    if free is None:
        raise DeviceError(
            f"--fit auto: {hardware.device} does not say how much memory is free",
            next_step="leave it out, and lower --max-clips by hand",
        )
    room = room_for(hardware, wish.quant, free)
    checkpoint = read_checkpoint(locate_model(wish.model, room, wish.adapter).folder)
    planner = load_planner(checkpoint)
    # No token stands for less than a byte, so this is never too little.
    reserve = wish.question_bytes + wish.answer_tokens
    spare = planner.spare_for(wish.question_bytes)
    plans = planner.plan(infos, wish.sampling, reserve, spoken, spare_tokens=spare)
    demand = measure_demand(
        planner,
        infos,
        plans,
        spoken=spoken,
        question_tokens=wish.question_bytes,
        answer_tokens=wish.answer_tokens,
    )
    kind = hardware.device.split(":")[0]
    run = Run(planner.config, kind, hardware.dtype, fused=hardware.attention == FLASH)
    wanted = run.settings(demand.clips, wish.quant)
    kinds = allowed_kinds(wish.quant, hardware.device, stored_kind(checkpoint))
    return ladder(run, wanted, free, demand.tokens_of, kinds=kinds, fewest_clips=demand.fewest)
