"""How counts, sizes and shares stand in a sentence."""

from __future__ import annotations

_MOST_DIGITS = 6


def count(number: int, one: str, many: str = "") -> str:
    """Such as ``1 sample`` and ``2 samples``.

    Args:
        one: what there is one of. many: the same for several; empty is ``one`` with an s.
    """
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


def apart(*values: float, digits: int = 1) -> tuple[str, ...]:
    """Numbers as text, with as many digits as it takes for different ones to look different.

    Args:
        digits: fewest behind the point; six are the most.
    """
    different = len({round(value, _MOST_DIGITS) for value in values})
    while True:
        texts = tuple(f"{value:.{digits}f}" for value in values)
        if digits >= _MOST_DIGITS or len(set(texts)) == different:
            return texts
        digits += 1


def percent(share: float, digits: int = 0) -> str:
    """A share from 0 to 1: ``under 1%`` and ``over 99%`` where rounding would say none or all."""
    step = 10.0 ** -(digits + 2)
    if 1e-9 < share < step:
        return f"under {step:.{digits}%}"
    if 1 - step / 2 <= share < 1 - 1e-9:
        return f"over {1 - step:.{digits}%}"
    return f"{share:.{digits}%}"
