"""Counting tokens of a prompt whose tokenizer is not at hand."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, pre_tokenizers

from apollo_cli.model.tokenizer import QWEN2_SPLIT, TextTokenizer


class PieceCounter(TextTokenizer):
    """Stands in for a Qwen2 tokenizer where only numbers of tokens matter.

    Each piece of Qwen2's rule for cutting text counts as one token: exact for digits and marks,
    which are most of the time labels, and for common words; rare words take more. A label of a
    clip comes to 13 to 17 tokens.
    """

    def __init__(self) -> None:
        self._split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")

    def __len__(self) -> int:
        return 0

    def encode(self, text: str) -> list[int]:
        """As many ids as there are pieces; their values mean nothing."""
        return [0] * len(self._split.pre_tokenize_str(text))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode pieces of text, each on its own."""
        return [self.encode(text) for text in texts]
