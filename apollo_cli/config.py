"""Options, as frozen dataclasses. Each command-line flag maps onto one field."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from apollo_cli.errors import UsageError

# Where memory is enough: clips that are encoded and prompt tokens that are read at a time.
ENCODE_BATCH = {"cpu": 4, "mps": 8, "cuda": 16}
PREFILL_CHUNK, SMALLEST_CHUNK = 2048, 256

SamplingMode = Literal["fps", "uniform"]
Decoder = Literal["pyav", "decord"]
SubtitleStyle = Literal["listed", "interleaved"]
ShortPolicy = Literal["repeat", "stretch", "error"]


@dataclass(frozen=True)
class SamplingOptions:
    """Which moments of a video are looked at.

    Attributes:
        mode: ``fps`` keeps a constant rate inside each clip and spaces the clips out past the
            budget (paper, section 3); ``uniform`` spreads a fixed number of frames evenly.
        fps: frames a second inside a clip; None takes the rate the checkpoint was trained with.
        frames: number of frames for ``uniform``; None takes as many as the budget holds.
        max_clips: upper bound on the number of clips; None leaves it to the token budget.
        start_seconds: start of the window to look at.
        end_seconds: end of the window; None is the end of the video.
        short: what a video shorter than one clip does: ``repeat`` its last frame (as the
            original does), ``stretch`` the frames over what is there, or ``error``.
    """

    mode: SamplingMode = "fps"
    fps: float | None = None
    frames: int | None = None
    max_clips: int | None = None
    start_seconds: float = 0.0
    end_seconds: float | None = None
    short: ShortPolicy = "repeat"

    def __post_init__(self) -> None:
        if self.mode not in ("fps", "uniform"):
            raise UsageError(f"--sampling {self.mode}", "allowed are fps and uniform")
        if self.short not in ("repeat", "stretch", "error"):
            raise UsageError(f"--short {self.short}", "allowed are repeat, stretch and error")
        # Below, a clip would be longer than any number of ours holds.
        if self.fps is not None and not 0.001 <= self.fps <= 1000:
            raise UsageError(f"--fps {self.fps:g}", "allowed is a rate of 0.001 to 1000")
        if self.fps is not None and self.mode == "uniform":
            raise UsageError("--fps with --sampling uniform", next_step="use --frames instead")
        if self.frames is not None and self.mode == "fps":
            raise UsageError("--frames with --sampling fps", next_step="add --sampling uniform")
        if self.frames is not None and not 1 <= self.frames <= 100_000:
            raise UsageError(f"--frames {self.frames}", "allowed is 1 to 100,000")
        if self.max_clips is not None and self.max_clips < 1:
            raise UsageError(f"--max-clips {self.max_clips}", "allowed is 1 or more")
        if not 0 <= self.start_seconds < float("inf"):
            raise UsageError(f"--from {self.start_seconds:g}", "allowed is 0 or later")
        if self.end_seconds is not None and not self.end_seconds > self.start_seconds:
            raise UsageError(
                f"--from {self.start_seconds:g} --to {self.end_seconds:g}",
                "--to must be later than --from",
            )


@dataclass(frozen=True)
class ReadingOptions:
    """How files are read.

    Attributes:
        stream: number of the picture stream among all streams; None takes the main one.
        decoder: ``pyav`` is the reference; the others never judge count or time.
        fast: take the key picture nearest to each moment: about ten times cheaper, approximate.
        strict: a damaged picture is an error instead of a note.
        image_fps: how many images of a folder make a second.
        subtitles: ``none``, ``auto`` for a file beside the video or a track inside, or a file.
        subtitle_style: ``listed`` before the question, as the paper's evaluation does, or
            ``interleaved`` with the clips during which they are shown.
        max_pixels: largest picture that is opened. max_hours: longest video that is opened.
        max_pictures: most pictures of a video that is opened.
    """

    stream: int | None = None
    decoder: Decoder = "pyav"
    fast: bool = False
    strict: bool = False
    image_fps: float | None = None
    subtitles: str = "none"
    subtitle_style: SubtitleStyle = "listed"
    max_pixels: int = 1 << 26
    max_hours: float = 24.0
    max_pictures: int = 6_000_000

    def __post_init__(self) -> None:
        if self.image_fps is not None and not 0 < self.image_fps <= 1000:
            raise UsageError(f"--image-fps {self.image_fps:g}", "allowed is above 0, up to 1000")
        if self.stream is not None and self.stream < 0:
            raise UsageError(f"--stream {self.stream}", "allowed is 0 or more")
        if self.max_pixels < 1:
            raise UsageError(f"--max-pixels {self.max_pixels}", "allowed is 1 or more")
        if self.max_pictures < 1:
            raise UsageError(f"--max-pictures {self.max_pictures}", "allowed is 1 or more")
        if not self.max_hours > 0:
            raise UsageError(f"--max-hours {self.max_hours:g}", "allowed is above 0")


@dataclass(frozen=True)
class GenerationOptions:
    """How the answer is written.

    Attributes:
        max_new_tokens: longest answer, in tokens; it is part of the token budget.
        temperature: 0 is greedy, the default: the same question gets the same answer.
        top_p: share of probability mass that sampling draws from.
        seed: seed of the sampling; unused when greedy.
        repetition_penalty: None takes the checkpoint's own value. It looks at the generated
            tokens only, as the original does when it is given embeddings.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens}", "allowed is 1 or more")
        # What is smaller has no place among 32-bit probabilities.
        if self.temperature != 0 and not 0.001 <= self.temperature <= 100:
            raise UsageError(f"--temperature {self.temperature:g}", "allowed is 0, or 0.001 to 100")
        if not 0.0001 <= self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p:g}", "allowed is 0.0001 to 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}", "allowed is 0 up to 2**63 - 1")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty <= 10:
            raise UsageError(
                f"--repetition-penalty {self.repetition_penalty:g}",
                "allowed is above 0 and up to 10",
            )


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
