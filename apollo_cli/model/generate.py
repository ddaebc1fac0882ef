"""Prefill in chunks, then one token at a time; a cache that returns to the video's prefix.

Letters: L sequence, H language model width, K vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache

from apollo_cli.config import PREFILL_CHUNK, GenerationOptions
from apollo_cli.model.apollo import ApolloModel, not_finite


@torch.inference_mode()
def prefill(
    model: ApolloModel,
    embeddings: torch.Tensor,
    cache: DynamicCache,
    chunk_tokens: int = PREFILL_CHUNK,
) -> torch.Tensor:
    """Run a prompt through the language model, a chunk at a time.

    In chunks, the peak of the activations does not grow with the length of the prompt.

    Args:
        embeddings: (1, L, H), L at least 1.
        cache: grows by L.
        chunk_tokens: most that are read at a time.

    Returns:
        Logits of the last position, (K,), float32.

    Raises:
        DeviceError: in float16, they are not finite. WeightsError: in another dtype.
    """
    hidden = None
    for chunk in embeddings.split(chunk_tokens, dim=1):
        hidden = model.llm.model(inputs_embeds=chunk, cache=cache).last_hidden_state
    assert hidden is not None
    logits = model.llm.lm_head(hidden[:, -1])[0].float()
    # NaN and infinity both come out as the maximum: one number is enough to look at.
    if not torch.isfinite(logits.max()):
        sound = torch.isfinite(embeddings).all()
        stage = "language model" if sound else "visual tokens or embeddings of the prompt"
        raise not_finite(stage, embeddings.dtype)
    return logits


def generate(
    model: ApolloModel,
    logits: torch.Tensor,
    cache: DynamicCache,
    options: GenerationOptions,
    eos_ids: Sequence[int],
) -> Iterator[int]:
    """Write an answer behind a prefilled prompt.

    Args:
        logits: of the prompt's last position, (K,).
        cache: of the prompt; grows by one for each token but the last.
        options: length, temperature and the rest.
        eos_ids: ids that end the answer; they are not yielded.

    Yields:
        Token ids.
    """
    generator = torch.Generator(device=logits.device).manual_seed(options.seed)
    own = model.config.generation
    penalty = options.repetition_penalty or own.get("repetition_penalty", 1.0)
    top_k = own.get("top_k", 0)
    written: list[int] = []
    for number in range(options.max_new_tokens):
        token = _choose(_penalise(logits, written, penalty), options, top_k, generator)
        if token in eos_ids:
            return
        written.append(token)
        yield token
        if number + 1 < options.max_new_tokens:
            logits = prefill(model, model.embed([token], None), cache)


def _penalise(logits: torch.Tensor, written: list[int], penalty: float) -> torch.Tensor:
    """Make the tokens written so far less likely; the prompt does not count."""
    if penalty == 1.0 or not written:
        return logits
    seen = torch.tensor(sorted(set(written)), device=logits.device)
    scores = logits[seen]
    lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
    return logits.index_copy(0, seen, lowered)


def _choose(
    logits: torch.Tensor, options: GenerationOptions, top_k: int, generator: torch.Generator
) -> int:
    if options.temperature == 0:
        return int(logits.argmax())
    logits = logits / options.temperature
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    ranked, order = logits.softmax(-1).sort(descending=True)
    # The token that crosses the border is kept, so that at least one always is.
    ranked = ranked.masked_fill(ranked.cumsum(-1) - ranked >= options.top_p, 0)
    return int(order[torch.multinomial(ranked, 1, generator=generator)])


def rewind(cache: DynamicCache, length: int) -> None:
    """Cut a cache back to its first ``length`` positions, without copying."""
    extra = cache.get_seq_length() - length
    if extra > 0:
        cache.crop(-extra)
