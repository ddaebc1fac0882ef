"""A count that rises while files are read, so that a hang can be told from slow work."""

from __future__ import annotations

_steps = 0


def advance() -> None:
    """Note that a packet or picture has been dealt with."""
    global _steps  # noqa: PLW0603 - one count for the whole process is the point
    _steps += 1


def steps() -> int:
    """How often ``advance`` was called."""
    return _steps
