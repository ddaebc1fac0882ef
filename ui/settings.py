"""What a visitor typed into the fields, as options; the same checks as for flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from apollo_cli.citations import clock
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions, parse_moment
from apollo_cli.errors import UsageError

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Settings:
    """What the visitor may set, as typed."""

    start: str
    end: str
    mode: str
    rate: str
    clips: str
    subtitles: bool
    answer_tokens: str
    temperature: str


def settings_of(
    sampling: SamplingOptions, reading: ReadingOptions, generation: GenerationOptions
) -> Settings:
    """The options as a visitor would have typed them."""
    end, rate = sampling.end_seconds, sampling.fps or sampling.frames
    return Settings(
        start=_moment(sampling.start_seconds),
        end="" if end is None else _moment(end),
        mode=sampling.mode,
        rate="" if rate is None else f"{rate:g}",
        clips="" if sampling.max_clips is None else str(sampling.max_clips),
        subtitles=reading.subtitles != "none",
        answer_tokens=str(generation.max_new_tokens),
        temperature=f"{generation.temperature:g}",
    )


def _moment(seconds: float) -> str:
    return clock(seconds) if seconds == int(seconds) else f"{seconds:g}"


def read_sampling(before: SamplingOptions, settings: Settings) -> SamplingOptions:
    """What is to be looked at.

    Raises:
        UsageError: a value is out of its range.
    """
    uniform, rate = settings.mode == "uniform", settings.rate
    return replace(
        before,
        mode="uniform" if uniform else "fps",
        fps=None if uniform else _number(rate, float),
        frames=_number(rate, int) if uniform else None,
        max_clips=_number(settings.clips, int),
        start_seconds=parse_moment(settings.start.strip() or "0"),
        end_seconds=parse_moment(settings.end.strip()) if settings.end.strip() else None,
    )


def read_generation(before: GenerationOptions, settings: Settings) -> GenerationOptions:
    """How answers are written.

    Raises:
        UsageError: a value is out of its range.
    """
    tokens = _number(settings.answer_tokens, int)
    temperature = _number(settings.temperature, float)
    return replace(
        before,
        max_new_tokens=before.max_new_tokens if tokens is None else tokens,
        temperature=before.temperature if temperature is None else temperature,
    )


def _number(text: str, kind: type[Number]) -> Number | None:
    """A number as typed; None where nothing is."""
    try:
        return kind(text) if text.strip() else None
    except ValueError:
        allowed = "allowed is a whole number" if kind is int else "allowed is a number"
        raise UsageError(f"{text!r}", allowed, "correct it, or leave it empty") from None


def read_subtitles(before: ReadingOptions, settings: Settings) -> ReadingOptions:
    """How files are read: with subtitles or without."""
    if not settings.subtitles:
        return replace(before, subtitles="none")
    return before if before.subtitles != "none" else replace(before, subtitles="auto")
