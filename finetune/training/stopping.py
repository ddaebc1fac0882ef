"""The processes of one run: where one of them fails, all of them end, with its message."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch

from apollo_cli.errors import ApolloError, FitError
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.training.examples import Example

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


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A launcher passes on to its processes what a terminal has already sent to all of them.
_ECHO_SECONDS = 5.0
# A loss explodes at so many times the median of the last ones, so many steps in a row.
_FACTOR, _WINDOW, _PATIENCE = 5.0, 100, 5


class Interrupts:
    """Takes the first Ctrl-C or SIGTERM as a wish to stop after the step, in a ``with``.

    A second one raises ``KeyboardInterrupt``. Outside the main thread nothing is changed.

    Args:
        say: tells the user. has_launcher: whether a launcher may repeat the signal.
    """

    def __init__(self, say: Callable[[str], None], *, has_launcher: bool = False) -> None:
        self.asked = False
        self._say = say
        self._echo_seconds = _ECHO_SECONDS if has_launcher else 0.0
        self._first = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._take) for s in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._first = True, now
            self._say("stopping after this step; once more ends at once, without saving")
        elif now - self._first >= self._echo_seconds:
            raise KeyboardInterrupt


class LossWatch:
    """Tells a loss that explodes: far above its running median and all it has been, steps in a row.

    Batches of hard samples among easy ones are no explosion: such losses have been seen before.

    Args:
        start: step from which on it looks; the warm-up lies before.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._high = 0

    def replay(self, losses: Iterable[tuple[int, float]]) -> None:
        """Take in the steps of an earlier run that is gone on with."""
        for step, loss in losses:
            self.explodes(step, loss)

    def explodes(self, step: int, loss: float) -> bool:
        """Whether the loss of this step is one too many.

        A small loss may jump to many times itself: one more than the median is always allowed.
        """
        is_high = step > self._start and bool(self._losses) and loss > self._bound()
        self._high = self._high + 1 if is_high else 0
        if not is_high:
            self._losses.append(loss)
        return self._high >= _PATIENCE

    def _bound(self) -> float:
        median = statistics.median(self._losses)
        return max(_FACTOR * median, median + 1, 1.5 * max(self._losses))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a computation failed for want of memory; a CPU has no error of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def too_large(
    what: str, device: torch.device, examples: Sequence[Example] = (), relief: str = ""
) -> FitError:
    """The error of a computation that memory does not hold.

    Args:
        what: such as ``step 3``. examples: that were computed with.
        relief: what may be changed without a new start.
    """
    named = ", ".join(f"{example.name} ({len(example.ids)} tokens)" for example in examples)
    below = f" below {max(len(example.ids) for example in examples)}" if examples else ""
    return FitError(
        f"{what} does not fit the memory of {device}"
        + (f"; its samples are {named}" if named else ""),
        next_step=f"{relief}lower max_tokens{below} or max_clips and start anew with --fresh",
    )


def list_relief(recipe: Recipe) -> str:
    """What takes less memory and changes nothing that is learned, so that a run can go on."""
    # What is dropped for a sample depends on those beside it.
    fewer = recipe.micro_batch_size > 1 and not recipe.lora_dropout
    ways = ["lower micro_batch_size"] * fewer
    ways += ["set gradient_checkpointing = true"] * (not recipe.gradient_checkpointing)
    return f"{' or '.join(ways)} and run the same command again, or " if ways else ""
