"""One family of errors that a user can meet, each with the exit code of its kind.

Every message answers three questions in order: what was received, what is allowed,
and what to do next. ``apollo_cli.cli`` is the one place that turns them into exit codes.
"""

from __future__ import annotations

from collections.abc import Iterable

from apollo_cli.text import hide_secrets


class ApolloError(Exception):
    """An error with a remedy.

    Args:
        received: what happened, naming the file, flag or value.
        allowed: what would have been accepted; may be empty.
        next_step: what the user can do now; may be empty.
    """

    exit_code = 1

    def __init__(self, received: str, allowed: str = "", next_step: str = "") -> None:
        self.received = received
        self.allowed = allowed
        self.next_step = next_step
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The three parts on one line, whatever line breaks a file name brought along.

        Tokens and passwords in it are blanked.
        """
        parts = (part.strip() for part in (self.received, self.allowed, self.next_step))
        return hide_secrets("; ".join(" ".join(part.split()) for part in parts if part))

    def __str__(self) -> str:
        return self.message


class UsageError(ApolloError):
    """A flag, question or option that cannot be used as given."""

    exit_code = 2


class MediaError(ApolloError):
    """A video or image that cannot be opened or read as asked."""

    exit_code = 3


class FitError(ApolloError):
    """Something that does not fit: into the context of the model, or into memory."""

    exit_code = 4


class WeightsError(ApolloError):
    """A checkpoint that is unknown, incomplete, damaged or not allowed."""

    exit_code = 5


class DeviceError(ApolloError):
    """A device, dtype or kernel that was asked for and is not there."""

    exit_code = 6


class DataError(ApolloError):
    """Training data or a recipe with faults.

    Args:
        faults: each is shown on a line of its own.
    """

    exit_code = 7

    def __init__(
        self,
        received: str,
        allowed: str = "",
        next_step: str = "",
        *,
        faults: Iterable[str] = (),
    ) -> None:
        self.faults = tuple(" ".join(fault.split()) for fault in faults)
        super().__init__(received, allowed, next_step)

    @property
    def message(self) -> str:
        """The three parts on one line, then the faults."""
        return "\n".join([super().message, *(f"  - {fault}" for fault in self.faults)])
