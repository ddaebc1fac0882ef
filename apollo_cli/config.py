"""Options, as frozen dataclasses: each field says by which flag it is set, its range and help."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from apollo_cli.errors import UsageError

# Where memory is enough: clips that are encoded and prompt tokens that are read at a time.
ENCODE_BATCH = {"cpu": 4, "mps": 8, "cuda": 16}
PREFILL_CHUNK, SMALLEST_CHUNK = 2048, 256

SamplingMode = Literal["fps", "uniform"]
Decoder = Literal["pyav", "decord"]
SubtitleStyle = Literal["listed", "interleaved"]
ShortPolicy = Literal["repeat", "stretch", "error"]

_MOMENT = "seconds (83.2), 12:30 or 1:02:03"


def parse_moment(text: str) -> float:
    """Seconds of a time as people write it: 83.2, 12:30 or 1:02:03.5.

    Raises:
        UsageError: it is none.
    """
    if not re.fullmatch(r"(\d+:){0,2}\d+(\.\d*)?", text, re.ASCII):
        raise UsageError(f"{text!r} is not a time", "write 83.2, 12:30 or 1:02:03")
    seconds = 0.0
    for part in text.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds


@dataclass(frozen=True)
class Flag:
    """How the command line sets one field of an options class.

    Attributes:
        name: such as ``--fps``. help: its line on the help page.
        kind: type of the value, a Literal of the allowed ones, or a function that parses text.
        low, high: smallest and largest allowed number. off: a number outside of them that is
            allowed as well, such as 0 for "not at all".
        unset: what happens without the flag, where the default itself does not say so.
        completes: what a shell completes: ``file``, ``model`` or nothing.
    """

    name: str
    help: str
    kind: Any = str
    low: float = -math.inf
    high: float = math.inf
    off: float | None = None
    unset: str | None = None
    completes: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values; empty allows all of its kind."""
        return get_args(self.kind)

    def check(self, value: Any) -> None:
        """Check a value of the field; None stands for a flag that is not set.

        Raises:
            UsageError: the value is none of the choices, or out of range; NaN always is.
        """
        if self.choices:
            if value not in (None, *self.choices):
                allowed = f"allowed are {' and '.join(self.choices)}"
                raise UsageError(f"{self.name} {value}", allowed)
        elif self.kind in (str, bool) or value in (None, self.off):
            return
        elif not self.low <= value <= self.high:
            off = "" if self.off is None else f"{self.off:g}, or "
            upper = " or more" if self.high == math.inf else f" to {self.high:,}"
            given = value if isinstance(value, int) else f"{value:g}"
            raise UsageError(f"{self.name} {given}", f"allowed is {off}{self.low:g}{upper}")


def flag(name: str, help: str, *, default: Any = None, **more: Any) -> Any:
    """A field of an options class that a flag sets; ``more`` are attributes of ``Flag``."""
    return field(default=default, metadata={"flag": Flag(name, help, **more)})


@dataclass(frozen=True)
class Options:
    """Base of the options classes: each field is checked against its flag."""

    def __post_init__(self) -> None:
        for own in fields(self):
            own.metadata["flag"].check(getattr(self, own.name))


@dataclass(frozen=True)
class ModelOptions(Options):
    """Which model answers, and how it is loaded; arguments of ``engine.load``."""

    model: str = flag(
        "--model",
        "Known name, folder, owner/repository[@rev], or auto: the best fetched one that fits.",
        default="auto",
        completes="model",
    )
    device: str | None = flag("--device", "cpu, cuda, cuda:1 or mps.", unset="the best there is")
    dtype: str | None = flag("--dtype", "bfloat16, float16 or float32.", unset="the device's best")
    quant: Literal["4bit", "8bit"] | None = flag(
        "--quant",
        "Fewer bits for the language model's weights.",
        kind=Literal["4bit", "8bit"],
        unset="as the model is stored",
    )
    template: str | None = flag("--template", "qwen_2 or qwen_1_5.", unset="the model's own")
    adapter: str | None = flag(
        "--adapter",
        "Result folder of apollo finetune run, put on its model.",
        unset="none",
        completes="file",
    )


@dataclass(frozen=True)
class SamplingOptions(Options):
    """Which moments of a video are seen.

    Attributes:
        mode: ``fps`` keeps a constant rate inside each clip and spaces the clips out past the
            budget (paper, section 3); ``uniform`` spreads a fixed number of frames evenly.
        short: what a video shorter than one clip does: ``repeat`` its last frame (as the
            original does), ``stretch`` the frames over what is there, or ``error``.
    """

    mode: SamplingMode = flag(
        "--sampling",
        "Constant rate in clips, or frames spread evenly.",
        default="fps",
        kind=SamplingMode,
    )
    # At a lower rate, a clip would be longer than any number of ours holds.
    fps: float | None = flag(
        "--fps",
        "Frames a second inside a clip.",
        kind=float,
        low=0.001,
        high=1000,
        unset="the model's own",
    )
    frames: int | None = flag(
        "--frames",
        "Number of frames for --sampling uniform.",
        kind=int,
        low=1,
        high=100_000,
        unset="as many as the model holds",
    )
    max_clips: int | None = flag(
        "--max-clips",
        "See no more clips than this.",
        kind=int,
        low=1,
        unset="as many as the model holds",
    )
    start_seconds: float = flag(
        "--from",
        f"Start of the part to see: {_MOMENT}.",
        kind=parse_moment,
        default=0.0,
        low=0,
        high=10**9,
        unset="the start",
    )
    end_seconds: float | None = flag(
        "--to", f"End of the part to see: {_MOMENT}.", kind=parse_moment, low=0, unset="the end"
    )
    short: ShortPolicy = flag(
        "--short",
        "What a video shorter than one clip does with its frames.",
        default="repeat",
        kind=ShortPolicy,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fps is not None and self.mode == "uniform":
            raise UsageError("--fps with --sampling uniform", next_step="use --frames instead")
        if self.frames is not None and self.mode == "fps":
            raise UsageError("--frames with --sampling fps", next_step="add --sampling uniform")
        if self.end_seconds is not None and self.end_seconds <= self.start_seconds:
            raise UsageError(
                f"--from {self.start_seconds:g} --to {self.end_seconds:g}",
                "--to must be later than --from",
            )


@dataclass(frozen=True)
class ReadingOptions(Options):
    """How files are read.

    Attributes:
        decoder: ``pyav`` is the reference; the others never judge count or time.
        fast: take the key picture nearest to each moment: about ten times cheaper, approximate.
        subtitles: ``none``, ``auto`` for a file beside the video or a track inside, or a file.
        subtitle_style: ``listed`` before the question, as the paper's evaluation does, or
            ``interleaved`` with the clips during which they are shown.
    """

    stream: int | None = flag(
        "--stream",
        "Number of the picture stream in the file.",
        kind=int,
        low=0,
        unset="the main one",
    )
    decoder: Decoder = flag("--decoder", "Who decodes the pictures.", default="pyav", kind=Decoder)
    fast: bool = flag(
        "--fast", "Key pictures only: cheap, and approximate.", kind=bool, default=False
    )
    strict: bool = flag(
        "--strict", "A damaged picture is an error, not a note.", kind=bool, default=False
    )
    image_fps: float | None = flag(
        "--image-fps",
        "A folder of images is a video at this rate.",
        kind=float,
        low=0.001,
        high=1000,
        unset="folders are refused",
    )
    subtitles: str = flag(
        "--subtitles",
        "none, auto (beside the video or inside of it), or a file (srt, vtt, ass).",
        default="none",
        completes="file",
    )
    subtitle_style: SubtitleStyle = flag(
        "--subtitle-style",
        "Before the question, or with the clips.",
        default="listed",
        kind=SubtitleStyle,
    )
    max_pixels: int = flag(
        "--max-pixels", "Largest picture to open.", kind=int, default=1 << 26, low=1
    )
    max_hours: float = flag(
        "--max-hours", "Longest video to open.", kind=float, default=24.0, low=1e-6
    )
    max_pictures: int = flag(
        "--max-pictures", "Most pictures of a video.", kind=int, default=6_000_000, low=1
    )


@dataclass(frozen=True)
class GenerationOptions(Options):
    """How the answer is written.

    Attributes:
        max_new_tokens: longest answer, in tokens; it is part of the token budget.
        temperature: 0 is greedy, the default: the same question gets the same answer. A positive
            one below 0.001 has no place among 32-bit probabilities.
        repetition_penalty: None takes the checkpoint's own value. It looks at the generated
            tokens only, as the original does when it is given embeddings.
    """

    max_new_tokens: int = flag(
        "--max-new-tokens", "Longest answer, in tokens.", kind=int, default=256, low=1
    )
    temperature: float = flag(
        "--temperature",
        "0 is greedy and repeatable.",
        kind=float,
        default=0.0,
        low=0.001,
        high=100,
        off=0,
    )
    top_p: float = flag(
        "--top-p", "Share of probability to draw from.", kind=float, default=1.0, low=0.0001, high=1
    )
    seed: int = flag("--seed", "Seed of the sampling.", kind=int, default=0, low=0, high=2**63 - 1)
    repetition_penalty: float | None = flag(
        "--repetition-penalty",
        "Above 1, words that were used already become less likely.",
        kind=float,
        low=0.001,
        high=10,
        unset="the model's own",
    )


def check_question(question: str) -> str:
    """A question without the space around it.

    Raises:
        UsageError: it is empty, or not valid UTF-8: a terminal hands such bytes on as surrogates.
    """
    if not question.strip():
        raise UsageError("the question is empty", next_step="ask something")
    if any("\ud800" <= character <= "\udfff" for character in question):
        raise UsageError("the question is not valid UTF-8", next_step="type it again")
    return question.strip()
