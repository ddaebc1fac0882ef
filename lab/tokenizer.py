"""The nano's tokenizer: byte pairs of its own small world, any other text as bytes.

Whole numbers up to 99 are one token wherever they stand, so that the second in a question is the
same token as in a clip's label. Words are lower-cased, so capitals in a question change nothing.
"""

from __future__ import annotations

import re

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from apollo_cli.model.prompt import TEMPLATES, number_words
from lab.questions import EXTRA_KINDS, KINDS, Question, ask
from lab.toybox import sample_world

END_TOKEN = "<|endoftext|>"
SPECIAL_TOKENS = (END_TOKEN, "<|im_start|>", "<|im_end|>")
_SPLIT = r" ?\p{L}+|\.\p{N}|\p{N}{1,2}| ?[^\s\p{L}\p{N}]|\s"
_LEARNED_TOKENS = 640
_CORPUS_WORLDS = 1500


def fixed_texts() -> tuple[str, ...]:
    """Texts of the prompt that never change, each kept as one token."""
    template = TEMPLATES["qwen_2"]
    options = [form.format(a) for a in "ABCD" for form in ("({})", "{})", "{}.")]
    return (
        template.opening,
        template.question_end,
        "You are provided the following series of ",
        ", 2 second clips from a ",
        " [H:MM:SS] video.\n",
        " seconds: ",
        ",\n",
        "\n\n",
        *options,
    )


def build_tokenizer() -> Tokenizer:
    """Learn the tokenizer from generated questions; the same one every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=_LEARNED_TOKENS, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in fixed_texts()])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL_TOKENS])
    return tokenizer


def end_token_id(tokenizer: Tokenizer) -> int:
    """The id that ends an answer."""
    index = tokenizer.token_to_id(END_TOKEN)
    assert index is not None
    return index


def _letter_of(question: Question) -> str:
    """The letter of the right option, so that the tokenizer meets letters behind words too."""
    found = re.search(rf"([A-D])[).] {re.escape(question.answer)}(?=\s|$)", question.text)
    return f" ({found[1]})" if question.kind == "choice" and found else ""


def _corpus() -> list[str]:
    texts = [str(number) for number in range(100) for _ in range(200)]
    texts += [f" {number_words(number)}" for number in range(1, 61) for _ in range(50)]
    texts += [f".{number}" for number in range(10) for _ in range(200)]
    for seed in range(_CORPUS_WORLDS):
        world, rng = sample_world(seed), np.random.default_rng(seed)
        for kind in (*KINDS, *EXTRA_KINDS):
            question = ask(world, kind, rng)
            if question is not None:
                texts += [question.text, f" {question.answer}{_letter_of(question)}"]
    return texts
