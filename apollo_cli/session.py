"""A language model that has read a video: later questions pay for their own tokens only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache

from apollo_cli.config import PREFILL_CHUNK, SMALLEST_CHUNK, GenerationOptions
from apollo_cli.errors import FitError
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.generate import generate, prefill, rewind
from apollo_cli.model.prompt import PromptBuilder
from apollo_cli.video_memory import VideoMemory
from apollo_cli.watcher import Progress, no_progress

# Longest phrase that is recognised when it repeats, in tokens, and how often it must repeat.
_LONGEST_LOOP, _LOOP_COPIES, _LOOP_TOKENS = 64, 4, 24


class Session:
    """Keys and values of the videos read last; all questions about them share these.

    Args:
        network: the model. prompts: builds its prompts.

    Attributes:
        prefix_length: tokens up to the last visual token of the videos read last.
        chunk_tokens: prompt tokens read at a time; gets smaller when memory runs out.
        on_progress: called with ``read`` or ``write``, tokens done, and tokens at most. It may
            raise to stop; what was read by then is not taken for read.
    """

    def __init__(self, network: ApolloModel, prompts: PromptBuilder) -> None:
        self.network = network
        self.prompts = prompts
        self.prefix_length = 0
        self.chunk_tokens = PREFILL_CHUNK
        self.on_progress: Progress = no_progress
        self._cache = DynamicCache(config=network.llm.config)
        self._memories: list[VideoMemory] = []

    def read(self, memories: list[VideoMemory], suffix: Sequence[int]) -> torch.Tensor:
        """Read a whole prompt; what the last one had in common with it is not read again.

        Args:
            memories: videos in front; empty for text alone.
            suffix: ids behind the last visual token.

        Returns:
            Logits behind the prompt, (vocabulary,), float32.

        Raises:
            FitError: the memory of the device does not hold the prompt, in small steps neither.
        """
        try:
            return self._read(memories, suffix)
        except torch.OutOfMemoryError:
            # Once more from the start, in smaller steps: what was read half is of no use.
            self.chunk_tokens = SMALLEST_CHUNK
            self._forget()
        try:
            return self._read(memories, suffix)
        except torch.OutOfMemoryError:
            self._forget()
            raise FitError(
                "the prompt does not fit the memory of the device",
                next_step="use --fit auto, --quant 4bit or fewer clips (--max-clips)",
            ) from None

    def _read(self, memories: list[VideoMemory], suffix: Sequence[int]) -> torch.Tensor:
        self._read_prefix(memories, len(suffix))
        embeddings = self.network.embed(suffix, None)
        return self._prefill(embeddings, self.prefix_length + len(suffix))

    def _prefill(self, embeddings: torch.Tensor, total: int) -> torch.Tensor:
        """Read on; ``total`` is the length of the whole prompt."""
        self.on_progress("read", self._cache.get_seq_length(), total)
        logits = None
        for chunk in embeddings.split(self.chunk_tokens, dim=1):
            logits = prefill(self.network, chunk, self._cache, self.chunk_tokens)
            self.on_progress("read", self._cache.get_seq_length(), total)
        assert logits is not None
        return logits

    def _forget(self) -> None:
        self._cache = DynamicCache(config=self.network.llm.config)
        self._memories, self.prefix_length = [], 0
        torch.cuda.empty_cache()

    def score(
        self, memories: list[VideoMemory], suffix: Sequence[int], answer: Sequence[int]
    ) -> float:
        """Mean log-probability of an answer's tokens behind a prompt."""
        logits = self.read(memories, suffix)
        total = 0.0
        for number, token in enumerate(answer):
            total += float(logits.log_softmax(-1)[token])
            if number + 1 < len(answer):
                logits = prefill(self.network, self.network.embed([token], None), self._cache)
        return total / len(answer)

    def write(self, logits: torch.Tensor, options: GenerationOptions) -> Iterator[int]:
        """Write an answer behind what was read; yields token ids."""
        return generate(self.network, logits, self._cache, options, self.eos_ids)

    def spell(
        self, logits: torch.Tensor, options: GenerationOptions, ids: list[int]
    ) -> Iterator[str]:
        """Write an answer and yield its text as it comes; it ends where it turns in a loop.

        Args:
            ids: gets the token ids.
        """
        shown = text = ""
        for token in self.write(logits, options):
            ids.append(token)
            self.on_progress("write", len(ids), options.max_new_tokens)
            text = self.prompts.tokenizer.decode(ids).lstrip()
            # A character may be spread over tokens; it is shown when it is whole.
            if not text.endswith("\ufffd") and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
            if is_looping(ids):
                break
        if len(text) > len(shown):
            yield text[len(shown) :]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the checkpoint's own, and the template's end token."""
        end = self.prompts.tokenizer.token_id(self.prompts.template.end_token)
        return tuple({*self.network.config.eos_ids, *(() if end is None else (end,))})

    def _read_prefix(self, memories: list[VideoMemory], suffix_tokens: int) -> None:
        same = len(memories) == len(self._memories) and all(
            new is old for new, old in zip(memories, self._memories, strict=True)
        )
        if not (same and memories):
            self._forget()
            if memories:
                ids = self.prompts.prefix_ids([memory.part for memory in memories])
                visual = torch.cat([memory.tokens.flatten(0, 1) for memory in memories])
                embeddings = self.network.embed(ids, visual)
                self._prefill(embeddings, len(ids) + suffix_tokens)
                self._memories, self.prefix_length = memories, len(ids)
        rewind(self._cache, self.prefix_length)


def is_looping(ids: Sequence[int]) -> bool:
    """Whether an answer has begun to repeat one phrase and nothing else."""
    for length in range(1, min(_LONGEST_LOOP, len(ids) // _LOOP_COPIES) + 1):
        copies = max(_LOOP_COPIES, -(-_LOOP_TOKENS // length))
        tail = ids[-length * copies :]
        if len(tail) == length * copies and list(tail) == list(ids[-length:]) * copies:
            return True
    return False
