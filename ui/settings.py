"""What a visitor typed into the fields, as options; the same checks as for flags."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from apollo_cli.answer import clock
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions, parse_moment
from apollo_cli.errors import UsageError

Number = TypeVar("Number", int, float)
Options = TypeVar("Options", SamplingOptions, GenerationOptions)

# The fields as the page names them.
LABELS = {
    "start": "From",
    "end": "To",
    "clips": "Most clips",
    "mode": "Sampling",
    "rate": "Frames a second, or in all",
    "subtitles": "Read subtitles",
    "answer_tokens": "Longest answer, in tokens",
    "temperature": "Temperature",
}


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
        end="" if end is None or end == math.inf else _moment(end),
        mode=sampling.mode,
        rate="" if rate is None else f"{rate:g}",
        clips="" if sampling.max_clips is None else str(sampling.max_clips),
        subtitles=reading.subtitles != "none",
        answer_tokens=str(generation.max_new_tokens),
        temperature=f"{generation.temperature:g}",
    )


def _moment(seconds: float) -> str:
    return clock(seconds) if seconds == int(seconds) else f"{seconds:g}"


def read_settings(
    sampling: SamplingOptions,
    reading: ReadingOptions,
    generation: GenerationOptions,
    settings: Settings,
    *,
    subtitles: str = "auto",
) -> tuple[SamplingOptions, ReadingOptions, GenerationOptions, list[str]]:
    """The options with all that was typed and can be used.

    Args:
        subtitles: those that are read once the box is ticked.

    Returns:
        The options, and for each field that keeps its value a sentence that names it.
    """
    faults: list[str] = []

    def attempt(options: Options, label: str, changes: Callable[[], dict[str, Any]]) -> Options:
        try:
            return replace(options, **changes())
        except UsageError as error:
            faults.append(f"{label}: {error.message}")
            return options

    uniform = settings.mode == "uniform"
    sampling = attempt(
        sampling,
        LABELS["rate"],
        lambda: {
            "mode": "uniform" if uniform else "fps",
            "fps": None if uniform else _number(settings.rate, float),
            "frames": _number(settings.rate, int) if uniform else None,
        },
    )
    sampling = attempt(
        sampling, LABELS["clips"], lambda: {"max_clips": _number(settings.clips, int)}
    )
    sampling = attempt(
        sampling,
        f"{LABELS['start']}, {LABELS['end']}",
        lambda: {
            "start_seconds": parse_moment(settings.start.strip() or "0"),
            "end_seconds": parse_moment(settings.end.strip()) if settings.end.strip() else None,
        },
    )
    tokens, heat = "max_new_tokens", "temperature"
    generation = attempt(
        generation,
        LABELS["answer_tokens"],
        lambda: _given(tokens, _number(settings.answer_tokens, int)),
    )
    generation = attempt(
        generation, LABELS[heat], lambda: _given(heat, _number(settings.temperature, float))
    )
    if not settings.subtitles:
        reading = replace(reading, subtitles="none")
    elif reading.subtitles == "none":
        reading = replace(reading, subtitles=subtitles)
    return sampling, reading, generation, faults


def _given(name: str, value: float | None) -> dict[str, Any]:
    """A change; none where the field was left empty."""
    return {} if value is None else {name: value}


def _number(text: str, kind: type[Number]) -> Number | None:
    """A number as typed; None where nothing is."""
    try:
        return kind(text) if text.strip() else None
    except ValueError:
        allowed = "allowed is a whole number" if kind is int else "allowed is a number"
        raise UsageError(f"{text!r}", allowed, "correct it, or leave it empty") from None
