"""How a count stands in a sentence."""

from __future__ import annotations


def count(number: int, what: str) -> str:
    """Such as ``1 sample`` and ``2 samples``.

    Args:
        what: one of them, as a word or words that take an s.
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
