"""The one attention call of our own modules: FlashAttention-2 where chosen, else torch's SDPA."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def scaled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: str = "sdpa"
) -> torch.Tensor:
    """Attend without a mask, with scale 1/sqrt(head width).

    Args:
        query: (B, heads, N, head width).
        key: (B, key heads, M, head width); key heads divide heads (grouped queries).
        value: as ``key``.
        kernel: ``flash_attention_2`` or ``sdpa``, as ``hardware.choose_device`` decided.

    Returns:
        (B, heads, N, head width).
    """
    if kernel == "flash_attention_2" and query.dtype in (torch.float16, torch.bfloat16):
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

        swapped = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return flash_attn_func(*swapped).transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)
