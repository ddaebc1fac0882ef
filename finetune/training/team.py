"""The processes of one run: where one of them fails, all of them end, with its message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from apollo_cli.errors import ApolloError

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextmanager
def together(team: Accelerator) -> Iterator[None]:
    """Let every process of a run fail where one of them does, instead of waiting for it.

    All of them must come here, and talk to each other nowhere inside; they leave together.

    Raises:
        ApolloError, OSError, RuntimeError: what was raised in this process; else what was raised
            in the first of the others, as an ApolloError.
    """
    failure: Exception | None = None
    try:
        yield
    except (ApolloError, OSError, RuntimeError) as error:
        failure = error
    if team.num_processes > 1:
        from accelerate.utils import gather_object

        told = failure
        if failure is not None and not isinstance(failure, ApolloError):
            told = ApolloError(f"unexpected {type(failure).__name__}: {failure}")
        met = gather_object([told])
        failure = failure or next(filter(None, met), None)
    if failure is not None:
        raise failure
