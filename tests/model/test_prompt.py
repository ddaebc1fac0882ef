"""The prompt has the original's ids, and turns stand where the templates put them."""

from __future__ import annotations

import re

import pytest

from apollo_cli.errors import UsageError
from apollo_cli.model.prompt import VISUAL_ID, PromptBuilder, Turn, VisualPart, number_words
from tests.model import golden

CASES = [case for case in golden.facts()["prompts"] if "listbug" not in case["key"]]


def builder(template: str = "qwen_2", **options: bool) -> PromptBuilder:
    return PromptBuilder(golden.tokenizer(), 2, 8, template, **options)


def golden_part(case: dict) -> VisualPart:
    text = case["prompt_with_V_for_8_video_tokens"]
    spans = re.findall(r"([\d.]+)-([\d.]+) seconds", text)
    duration = case["total_frames"] / case["fps"]
    return VisualPart(tuple((float(a), float(b)) for a, b in spans), duration)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["key"])
def test_ids_equal_the_original(case: dict):
    ids = builder(case["template"]).ids([golden_part(case)], case["question"])
    assert ids == golden.arrays("tubelet 1", "prompt_ids")[case["key"]].tolist()


# Where clips do not divide into frames, the original counts more clips than it labels.
LABELLED = [c for c in golden.facts()["sampler"] if "error" not in c and c["fps"] not in (0.3, 1.6)]


@pytest.mark.parametrize("case", LABELLED)
def test_header_and_labels_equal_the_original(case: dict):
    spans = tuple((a, b) for a, b in case["timestamps"])
    part = VisualPart(spans, case["total_frames"] / case["fps"])
    texts = PromptBuilder(golden.tokenizer(), case["clip_duration"], 8).visual_texts(part)
    header, _, first = texts[0].partition("\n")
    assert header == case["prompt_first_line"].rstrip("\n")
    ours = [first, *(text.removeprefix(",\n") for text in texts[1:])]
    theirs = [line.split("<V>")[0] for line in case["prompt_clip_lines"]]
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"),
        (21, "twenty-one"),
        (100, "one hundred"),
        (666, "six hundred and sixty-six"),
        (1000, "one thousand"),
        (1005, "one thousand and five"),
        (1332, "one thousand, three hundred and thirty-two"),
    ],
)
def test_numbers_are_spelt_as_the_original_spells_them(number: int, words: str):
    assert number_words(number) == words


def test_earlier_turns_stand_where_the_template_puts_them():
    history = [Turn("What is it?", "A cat.")]
    text = builder().suffix_text("Which colour?", history)
    assert text == ("\n\nWhat is it? ASSISTANT: A cat.<|endoftext|>USER: Which colour? ASSISTANT:")
    text = builder("qwen_1_5").suffix_text("Which colour?", history)
    assert text == (
        "\n\nWhat is it?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
        "<|im_start|>user\nWhich colour?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prefix_and_suffix_make_the_whole_prompt():
    part = VisualPart(((0.0, 1.5), (2.0, 3.5)), 4.0)
    prompts = builder()
    whole = prompts.ids([part], golden.QUESTION)
    assert whole == prompts.prefix_ids([part]) + prompts.suffix_ids(golden.QUESTION)
    assert whole.count(VISUAL_ID) == 16


def test_images_and_several_videos_get_their_own_places():
    video = VisualPart(((0.0, 1.5), (2.0, 3.5)), 4.0)
    image = VisualPart(((0.0, 0.0),), 0.0, is_image=True)
    ids = builder().ids([video, image, video], golden.QUESTION)
    assert ids.count(VISUAL_ID) == 8 * 5
    assert builder().visual_texts(image) == [""]


def test_without_labels_only_the_header_is_text():
    part = VisualPart(((0.0, 1.5), (2.0, 3.5)), 4.0)
    first, second = builder(labelled=False).visual_texts(part)
    assert first.endswith("video.\n")
    assert second == ""


def test_an_unknown_template_is_a_usage_error_that_lists_the_known():
    with pytest.raises(UsageError, match="qwen_2, qwen_1_5"):
        builder("llama")
