"""The tokenizer of a checkpoint, from its own files, without torch and transformers.

Released checkpoints carry the slow Qwen2 files (vocab.json, merges.txt) and sometimes
tokenizer.json. Both forms give the same ids as the original's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from apollo_cli.errors import WeightsError
from apollo_cli.values import Check, any_text, parse_object, table, table_of, whole

# Qwen2's rule for cutting text before byte-pair merging: digits one by one.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TOKEN_ID = whole(0, 2**32 - 1)


class TextTokenizer:
    """Text to ids and back; special tokens such as ``<|im_end|>`` are recognised in text."""

    def __init__(self, backend: Tokenizer) -> None:
        # A file may hold these; they would cut, lengthen or change prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None
        self.backend = backend

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Encode one piece of text; nothing is added before or after."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode pieces of text, each on its own."""
        batch = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; special tokens are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of one token, or None."""
        return self.backend.token_to_id(token)


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Load the tokenizer of ``llm/`` from tokenizer.json, else from the slow Qwen2 files.

    Raises:
        WeightsError: files are missing, damaged, or number their special tokens otherwise.
    """
    fast = folder / "tokenizer.json"
    try:
        if fast.is_file():
            return TextTokenizer(Tokenizer.from_str(fast.read_text("utf-8")))
        return TextTokenizer(_load_slow(folder))
    except FileNotFoundError as error:
        raise WeightsError(
            f"{folder}: no tokenizer ({Path(error.filename).name} is missing)",
            "needed are tokenizer.json, or vocab.json and merges.txt",
            "fetch the checkpoint again",
        ) from error
    # The tokenizers library raises bare Exception for files it cannot parse.
    except (ValueError, KeyError, TypeError, Exception) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(
            f"{fast if fast.is_file() else folder}: the tokenizer cannot be read ({error})",
            next_step="fetch the checkpoint again",
        ) from error


def _load_slow(folder: Path) -> Tokenizer:
    vocab = _table(folder / "vocab.json", _TOKEN_ID)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(folder / "merges.txt")))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = _added_tokens(folder)
    for token, wanted in sorted(added.items(), key=lambda item: item[1]):
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        if tokenizer.token_to_id(token) != wanted:
            raise WeightsError(
                f"{folder}: special token {token} should have id {wanted}",
                f"the vocabulary gives it {tokenizer.token_to_id(token)}",
            )
    return tokenizer


def _merges(path: Path) -> list[tuple[str, str]]:
    """The pairs of a file of merges; without them all text would be cut otherwise."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise WeightsError(f"{path} is no text ({error})") from None
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        pair = line.split()
        if len(pair) == 2 and not line.startswith("#version"):
            merges.append((pair[0], pair[1]))
        elif pair and not line.startswith("#version"):
            raise WeightsError(f"{path}: line {number} is no pair of tokens")
    if not merges:
        raise WeightsError(f"{path} holds no pair of tokens", "", "fetch the checkpoint again")
    return merges


def _added_tokens(folder: Path) -> dict[str, int]:
    """Special tokens and their ids, from whichever file has them."""
    listed = folder / "added_tokens.json"
    if listed.is_file():
        return _table(listed, _TOKEN_ID)
    path = folder / "tokenizer_config.json"
    entries = _table(path, lambda value: value).get("added_tokens_decoder") or {}
    try:
        return {any_text(table(e).get("content")): int(n) for n, e in table(entries).items()}
    except ValueError as error:
        raise WeightsError(f"{path}: added_tokens_decoder: {error}") from None


def _table(path: Path, check: Check) -> dict[str, Any]:
    """A JSON object with checked values."""
    try:
        return table_of(check)(parse_object(path.read_bytes()))
    except ValueError as error:
        raise WeightsError(f"{path} {error}", "", "fetch the checkpoint again") from None


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
