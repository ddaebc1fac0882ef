"""The prompt: templates, time labels, and the exact token ids around the visual tokens.

Source: the templates that were published with the released checkpoints. Free of torch, so that
a plan can count tokens without loading a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from apollo_cli.errors import UsageError
from apollo_cli.model.tokenizer import TextTokenizer

# Id of a visual token in a prompt; never in a vocabulary.
VISUAL_ID = -200


@dataclass(frozen=True)
class ChatTemplate:
    """The words around messages.

    Attributes:
        opening: before the first message. question_end: between message and answer.
        answer_lead: what stands before an answer of an earlier turn.
        turn_end: after an answer, up to the next message. end_token: ends an answer.
    """

    opening: str
    question_end: str
    answer_lead: str
    turn_end: str
    end_token: str


TEMPLATES = {
    "qwen_2": ChatTemplate(
        opening=(
            "A chat between a curious user and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the user's questions. "
            "USER: "
        ),
        question_end=" ASSISTANT:",
        answer_lead=" ",
        turn_end="<|endoftext|>USER: ",
        end_token="<|endoftext|>",
    ),
    "qwen_1_5": ChatTemplate(
        # The stray quote and the two spaces are in the published demos, so the models saw them.
        opening=(
            "<|im_start|>system\n\nYou are a helpful vision-language assistant.\n\n"
            '"You are able to understand the visual content that the user provides. '
            "You are to respond to the user's question while being nice, detailed, and  "
            "informative.<|im_end|>\n<|im_start|>user\n"
        ),
        question_end="<|im_end|>\n<|im_start|>assistant\n",
        answer_lead="",
        turn_end="<|im_end|>\n<|im_start|>user\n",
        end_token="<|im_end|>",
    ),
}


@dataclass(frozen=True)
class VisualPart:
    """One video or image, as the prompt tells it.

    Attributes:
        spans: for each clip, the times of its first and last frame in seconds.
        duration_seconds: length of the whole video, also when only a window was looked at.
        is_image: an image is one clip without words.
        clip_seconds: length of a clip where it differs from the checkpoint's.
        words: what is said during each clip, where subtitles are interleaved; else empty.
    """

    spans: tuple[tuple[float, float], ...]
    duration_seconds: float
    is_image: bool = False
    clip_seconds: float | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """A question that was asked and its answer."""

    question: str
    answer: str


# fmt: off
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on


def number_words(number: int) -> str:
    """Spell a number below a million as the original prompts do: hyphens, "and", a comma."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {number_words(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    joint = " and " if rest < 100 else ", "
    return f"{number_words(thousands)} thousand" + (f"{joint}{number_words(rest)}" if rest else "")


class PromptBuilder:
    """Builds prompts for one checkpoint.

    Args:
        tokenizer: of the checkpoint.
        clip_seconds: printed as it is: an int as "2", a float as "2.0".
        tokens_per_clip: placeholders for each clip, learned ends included.
        template: a name in ``TEMPLATES``.
        labelled: whether each clip gets its times in words.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        clip_seconds: float,
        tokens_per_clip: int,
        template: str = "qwen_2",
        labelled: bool = True,
    ) -> None:
        if template not in TEMPLATES:
            raise UsageError(f"--template {template}", f"allowed are {', '.join(TEMPLATES)}")
        self.tokenizer = tokenizer
        self.clip_seconds = clip_seconds
        self.tokens_per_clip = tokens_per_clip
        self.template_name = template
        self.template = TEMPLATES[template]
        self.labelled = labelled

    def visual_texts(self, part: VisualPart) -> list[str]:
        """The text in front of each clip of one video or image."""
        if part.is_image:
            return [""] * len(part.spans)
        count = number_words(len(part.spans))
        seconds = self.clip_seconds if part.clip_seconds is None else part.clip_seconds
        header = (
            f"You are provided the following series of {count}, {seconds} second clips "
            f"from a {timedelta(seconds=part.duration_seconds)} [H:MM:SS] video.\n"
        )
        words = part.words or ("",) * len(part.spans)
        labels = [
            self._label(start, end, said)
            for (start, end), said in zip(part.spans, words, strict=True)
        ]
        between = ",\n" if self.labelled else ""
        return [header + labels[0]] + [between + label for label in labels[1:]]

    def _label(self, start: float, end: float, said: str) -> str:
        quoted = f'"{said}" ' if said else ""
        return f"{round(start, 1)}-{round(end, 1)} seconds: {quoted}" if self.labelled else quoted

    def prefix_ids(self, parts: Sequence[VisualPart]) -> list[int]:
        """Ids from the start to the last visual token: what all questions of a video share.

        Every text piece between visual tokens is tokenised on its own, as in training.
        """
        texts: list[str] = []
        for number, part in enumerate(parts):
            first, *rest = self.visual_texts(part)
            lead = self.template.opening if number == 0 else "\n\n"
            texts += [lead + first, *rest]
        visual = [VISUAL_ID] * self.tokens_per_clip
        return [i for ids in self.tokenizer.encode_many(texts) for i in (*ids, *visual)]

    def suffix_text(
        self,
        question: str,
        history: Sequence[Turn] = (),
        visual: bool = True,
        preamble: str = "",
    ) -> str:
        """Text behind the last visual token (or the whole prompt, without ``visual``).

        Args:
            preamble: stands before the first question, such as listed subtitles.
        """
        words = self.template
        past = "".join(
            turn.question + words.question_end + words.answer_lead + turn.answer + words.turn_end
            for turn in history
        )
        lead = "\n\n" if visual else words.opening
        return lead + preamble + past + question + words.question_end

    def suffix_ids(
        self,
        question: str,
        history: Sequence[Turn] = (),
        visual: bool = True,
        preamble: str = "",
    ) -> list[int]:
        """Ids behind the last visual token, up to where the answer starts."""
        return self.tokenizer.encode(self.suffix_text(question, history, visual, preamble))

    def answer_ids(self, answer: str) -> list[int]:
        """Ids that a model should write for an answer, its end token last (for training)."""
        return self.tokenizer.encode(self.template.answer_lead + answer + self.template.end_token)

    def turn_ids(
        self, turns: Sequence[Turn], visual: bool = True
    ) -> list[tuple[list[int], list[int]]]:
        """Ids behind the last visual token of a talk that is over (for training).

        The end token of an answer is one token wherever it stands, so these are, joined, what
        ``suffix_ids`` with a history and ``answer_ids`` give.

        Returns:
            For each turn the ids up to its answer, and those of the answer, its end token last.
        """
        words = self.template
        leads = ["\n\n" if visual else words.opening]
        leads += [words.turn_end.removeprefix(words.end_token)] * (len(turns) - 1)
        texts = [
            lead + turn.question + words.question_end
            for lead, turn in zip(leads, turns, strict=True)
        ]
        asked = self.tokenizer.encode_many(texts)
        return [(ids, self.answer_ids(t.answer)) for ids, t in zip(asked, turns, strict=True)]

    def ids(
        self, parts: Sequence[VisualPart], question: str, history: Sequence[Turn] = ()
    ) -> list[int]:
        """The whole prompt."""
        return self.prefix_ids(parts) + self.suffix_ids(question, history, visual=bool(parts))
