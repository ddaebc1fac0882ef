"""Values of files that come from elsewhere: parsed within limits, and each one checked.

A check takes a value and gives it back, or raises ValueError with what is allowed. Configs of
checkpoints, manifests, video memories and recipes are all read through these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

# Turns a value of a file into one to use, or raises ValueError with what is allowed.
Check = Callable[[Any], Any]

# Stands for "no default": the file has to tell.
NEEDED: Any = object()
MOST = 2**63 - 1
_SHOWN_CHARACTERS = 60


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """The JSON object in UTF-8 text, with or without a byte order mark.

    Raises:
        ValueError: it is something else, holds NaN or Infinity, or names a key twice.
    """
    try:
        text = raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}; a JSON object is needed")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {show(double)} is there twice")
    return found


def show(value: Any) -> str:
    """A value for a message: on one line, and cut where it is long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def text(value: Any) -> str:
    """A text that is not empty, without the blanks around it."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError("allowed is a text that is not empty")
    return value.strip()


def any_text(value: Any) -> str:
    """A text, empty or not, as it is."""
    if not isinstance(value, str):
        raise ValueError("allowed is a text")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("allowed are true and false")
    return value


def one_of(*allowed: Any) -> Check:
    """One of a few values, of the same type."""

    def check(value: Any) -> Any:
        # True equals 1 and 1.0 equals 1 in Python.
        if not any(value == item and type(value) is type(item) for item in allowed):
            spelled = ", ".join(json.dumps(item) for item in allowed)
            raise ValueError(f"allowed {'is' if len(allowed) == 1 else 'are'} {spelled}")
        return value

    return check


def whole(low: int, high: int = MOST) -> Check:
    """A whole number in a range, both ends allowed."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            # The largest number that fits is told only to who is beyond it.
            is_beyond = isinstance(value, int) and value > high
            upper = f" to {high:,}" if is_beyond or high < MOST else ""
            raise ValueError(f"allowed is a whole number from {low}{upper}")
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A number in a range; with ``above``, the low end itself is not allowed."""

    def check(value: Any) -> float:
        fits = not isinstance(value, bool) and isinstance(value, int | float)
        if not fits or not low <= value <= high or (above and value == low):
            edge = f"above {low:g}, up to" if above else f"{low:g} to"
            raise ValueError(f"allowed is a number {edge} {high:g}")
        return float(value)

    return check


def list_of(check: Check, *, count: int | None = None, once: bool = False) -> Check:
    """A list of such values: of one length, or with each value once, where that is asked for."""

    def check_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or count not in (None, len(value)):
            size = f" of {count}" if count is not None else ', such as ["a", "b"]'
            raise ValueError(f"allowed is a list{size}")
        checked = tuple(check(item) for item in value)
        if once and len(set(checked)) < len(checked):
            raise ValueError("each may be named once")
        return checked

    return check_all


def row_of(*checks: Check) -> Check:
    """A list with one value for each check."""

    def check_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(checks):
            raise ValueError(f"allowed is a list of {len(checks)}")
        return tuple(check(item) for check, item in zip(checks, value, strict=True))

    return check_all


def table(value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError("allowed is an object with keys")
    return value


def table_of(check: Check) -> Check:
    """A JSON object whose values are all such values."""

    def check_all(value: Any) -> dict[str, Any]:
        return {key: check(item) for key, item in table(value).items()}

    return check_all


def nothing_or(check: Check) -> Check:
    """Null, or such a value."""
    return lambda value: None if value is None else check(value)


class Values:
    """One object of a file; what is wrong with its values is collected, all of it.

    Args:
        values: the object. where: the file, as a message names it.
        faults: one phrase for each value that is missing or wrong is added here.
    """

    def __init__(self, values: Mapping[str, Any], where: str, faults: list[str]) -> None:
        self.values, self.where, self.faults = values, where, faults

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, check: Check, default: Any = NEEDED) -> Any:
        """The checked value of a key, or the default where the key is absent.

        A value that is missing or wrong is a fault, and None.
        """
        if key not in self.values and default is not NEEDED:
            return default
        try:
            return check(self.values.get(key))
        except ValueError as error:
            told = f"is {show(self.values[key])}" if key in self.values else "is missing"
            self.refuse(key, f"{told}; {error}")
            return None

    def read(self, checks: Mapping[str, Check]) -> dict[str, Any]:
        """The checked values of keys that may be absent; None for those that are."""
        return {key: self.get(key, check, None) for key, check in checks.items()}

    def refuse(self, key: str, told: str) -> None:
        """Add a fault of a key."""
        self.faults.append(f"{self.where}: {key} {told}")

    def inside(self, key: str) -> Values:
        """The object below a key; empty where the key is absent."""
        return Values(self.get(key, table, {}) or {}, f"{self.where}: {key}", self.faults)
