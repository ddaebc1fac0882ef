"""The steps of training: any number of processes, micro batch or stop gives the same result.

The loss of a step is the sum over the trained tokens of its global batch, divided by their number;
gradients are summed over processes. Random numbers, which only dropout takes, are seeded for each
micro batch by its first slot, so that no state of a generator has to be kept, and a sample that is
alone in its micro batch loses the same inputs in any process.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from apollo_cli.errors import ApolloError, DataError
from apollo_cli.finetune.training.checkpoints import save_checkpoint
from apollo_cli.finetune.training.examples import Example
from apollo_cli.finetune.training.feed import Feed, SlotOrder
from apollo_cli.finetune.training.preparing import Prepared
from apollo_cli.finetune.training.records import Progress, RunLog, StepRecord
from apollo_cli.finetune.training.stopping import (
    Interrupts,
    LossWatch,
    is_out_of_memory,
    list_relief,
    together,
    too_large,
)
from apollo_cli.finetune.training.trainee import Optimiser
from apollo_cli.weights.load import is_finite

if TYPE_CHECKING:
    from accelerate import Accelerator

SAVE_SECONDS = 60.0
# Largest share of the time that goes into writing such checkpoints.
_MOST_SAVING = 0.1


@dataclass(frozen=True)
class _Seen:
    """A micro batch that went through: names of its samples, loss sum, and tokens.

    teaches: whether it reached anything that is trained; text alone reaches no connector.
    """

    names: list[str]
    loss: torch.Tensor
    trained_tokens: int
    tokens: int
    teaches: bool


class Loop:
    """Takes the steps of a run.

    Args:
        prepared: the run. team: its processes. feed: the samples of this one, in order.
        order: tells how many of them a step takes. optimiser: of the trained parameters.
        log: of the run, None in all processes but the first.
        interrupts: whether the user wants to stop.
        known_by: facts that are kept in its checkpoints.
        last: step of the checkpoint that is gone on from; 0 without one.
        past: rows of the log up to it.
        save_seconds: a checkpoint is due when the last one is older, besides every save_every
            steps; more where writing one takes over a tenth of that.
    """

    def __init__(
        self,
        prepared: Prepared,
        team: Accelerator,
        feed: Feed,
        order: SlotOrder,
        optimiser: Optimiser,
        *,
        log: RunLog | None,
        interrupts: Interrupts,
        known_by: dict[str, Any],
        say: Callable[[str], None],
        last: int = 0,
        past: Sequence[dict[str, Any]] = (),
        save_seconds: float = SAVE_SECONDS,
    ) -> None:
        self._prepared = prepared
        self._recipe = prepared.recipe
        self._team = team
        self._feed = feed
        self._order = order
        self._optimiser = optimiser
        self._log = log
        self._interrupts = interrupts
        self._known_by = known_by
        self._say = say
        self._saved = last
        self._pause = self._save_seconds = save_seconds
        self._saved_at = time.monotonic()
        self._is_due = False
        self._progress = Progress(prepared.steps)
        self._watch = LossWatch(optimiser.warmup_steps)
        self._watch.replay((row["step"], row["loss"]) for row in past if "loss" in row)
        self._measured = max((row["step"] for row in past if "validation" in row), default=0)
        self._stopping = False
        hardware = prepared.base.hardware
        self._device = torch.device(hardware.device)
        self._dtype = getattr(torch, hardware.dtype)

    def run(self, validate: Callable[[int], None]) -> None:
        """Take all steps that are left.

        Args:
            validate: called with the steps done, when the recipe wants it and at the end.

        Raises:
            KeyboardInterrupt: the user stopped it; a checkpoint was saved.
            DataError: the loss left all bounds, the data is mostly broken, or the disk is full.
            FitError: a step does not fit the memory of the device.
        """
        steps, recipe = self._prepared.steps, self._recipe
        if self._measured < self._saved < steps and self._saved % recipe.validate_every == 0:
            # It was stopped between the checkpoint and the measurement.
            self._validate(self._saved, validate)
        for step in range(self._saved, steps):
            try:
                record = self._step(step)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise too_large(f"the update of step {step + 1}", self._device) from None
            if self._log is not None:
                self._log.add(record)
                self._say(self._progress.line(record))
            done = step + 1
            if self._stopping and done < steps:
                self._save(done)
                self._say(f"saved at step {done}; run the same command again to go on from there")
                raise KeyboardInterrupt
            # Before the measurement, which may take long, or more memory than there is.
            if done == steps or done % recipe.save_every == 0 or self._is_due:
                self._save(done)
            if done < steps and done % recipe.validate_every == 0:
                self._validate(done, validate)
        self._validate(steps, validate)

    def _validate(self, done: int, validate: Callable[[int], None]) -> None:
        try:
            with self._autocast():
                validate(done)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise too_large(f"the measurement behind step {done}", self._device) from None

    def _step(self, step: int) -> StepRecord:
        started = time.perf_counter()
        self._optimiser.clear()
        rates = self._optimiser.rates
        seen, failure = self._accumulate(step)
        totals = self._add_up(seen, failure)
        loss, tokens, trained_tokens = totals[0] / totals[2], int(totals[1]), int(totals[2])
        norm = self._gradient_norm(trained_tokens)
        self._check_finite(step, seen, loss, norm)
        if self._watch.explodes(step + 1, loss):
            raise self._lost(step, f"the loss has exploded to {loss:.3g}", self._names(seen))
        self._optimiser.step(learned=totals[-1] > 0)
        return StepRecord(
            step=step + 1,
            loss=loss,
            rates=rates,
            gradient_norm=norm,
            tokens=tokens,
            trained_tokens=trained_tokens,
            seconds=time.perf_counter() - started,
            memory_bytes=_peak_bytes(self._device),
            samples=[name for piece in seen for name in piece.names],
        )

    def _accumulate(self, step: int) -> tuple[list[_Seen], ApolloError | None]:
        """Gradients of this process's samples, summed; and why it could not go on, if so."""
        team = self._team
        slots = self._order.slots(step, team.process_index, team.num_processes)
        size = self._recipe.micro_batch_size
        seen: list[_Seen] = []
        examples: list[Example] = []
        try:
            for start in range(0, len(slots), size):
                examples = [self._feed.take() for _ in slots[start : start + size]]
                torch.manual_seed(_seed(self._recipe.seed, slots[start]))
                with self._autocast():
                    loss, tokens = self._prepared.trainee(examples)
                if loss.requires_grad:
                    loss.backward()
                names = [example.name for example in examples]
                length = sum(len(example.ids) for example in examples)
                seen.append(_Seen(names, loss.detach(), tokens, length, loss.requires_grad))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return seen, too_large(
                f"step {step + 1}", self._device, examples, list_relief(self._recipe)
            )
        except ApolloError as error:
            # The other processes wait for this one: they are told before it ends.
            return seen, error
        return seen, None

    def _add_up(self, seen: list[_Seen], failure: ApolloError | None) -> list[float]:
        """Loss sum, tokens and trained tokens of all processes; last, how many of these learned."""
        loss = sum((piece.loss for piece in seen), torch.zeros((), device=self._device))
        counts = [
            sum(piece.tokens for piece in seen),
            sum(piece.trained_tokens for piece in seen),
            failure is not None,
            self._interrupts.asked,
            # The first process writes, so that its clock decides for all.
            self._team.is_main_process and time.monotonic() - self._saved_at >= self._pause,
            any(piece.teaches for piece in seen),
        ]
        told = torch.tensor(counts, dtype=torch.float32, device=self._device)
        totals = self._sum(torch.cat([loss.reshape(1), told])).tolist()
        if totals[3]:
            with together(self._team):
                if failure is not None:
                    raise failure
        self._stopping, self._is_due = totals[4] > 0, totals[5] > 0
        return totals

    def _gradient_norm(self, trained_tokens: int) -> float:
        """Sum gradients over processes, divide by the tokens, and clip; their norm before that."""
        parameters = list(self._optimiser.parameters.values())
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad = self._sum(parameter.grad).div_(trained_tokens)
        return float(torch.nn.utils.clip_grad_norm_(parameters, self._recipe.clip_norm))

    def _autocast(self) -> torch.autocast:
        """The arithmetic of the run: 16 bits where the base model is in them."""
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32)

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._team.num_processes == 1:
            return tensor
        return self._team.reduce(tensor, "sum")  # pyright: ignore[reportReturnType]

    def _check_finite(self, step: int, seen: list[_Seen], loss: float, norm: float) -> None:
        """Refuse a step with a loss or gradient that is no number, and name whose it is."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        guilty = [piece for piece in seen if not piece.loss.isfinite()]
        what = (
            f"the loss is {loss}"
            if guilty or not math.isfinite(loss)
            else f"the gradient is {norm}"
        )
        raise self._lost(step, what, self._names(guilty) or self._names(seen))

    def _names(self, seen: list[_Seen]) -> list[str]:
        """Names of samples in all processes."""
        names = [name for piece in seen for name in piece.names]
        if self._team.num_processes == 1:
            return names
        from accelerate.utils import gather_object

        return gather_object(names)

    def _lost(self, step: int, what: str, names: list[str]) -> DataError:
        last = f"the last checkpoint is of step {self._saved}" if self._saved else "nothing saved"
        anew = "start again with --fresh and a lower learning_rate"
        if not names:
            return DataError(f"step {step + 1}: {what}", last, anew)
        told = f"step {step + 1}: {what}; its samples are {', '.join(names)}"
        return DataError(told, last, f"look at these samples, or {anew}")

    def _save(self, done: int) -> None:
        """Write a checkpoint, from the first process.

        Raises:
            DataError: something that is trained is NaN or infinite, or it cannot be written.
        """
        for name, parameter in self._optimiser.parameters.items():
            if not is_finite(parameter):
                raise self._lost(done - 1, f"tensor {name} has become NaN or infinite", [])
        started = time.monotonic()
        with together(self._team):
            if self._team.is_main_process and done != self._saved:
                tensors, facts = self._optimiser.state()
                save_checkpoint(
                    self._recipe.output / "checkpoints",
                    done,
                    {"trained": self._optimiser.parameters, "optimizer": tensors},
                    {**self._known_by, **facts},
                    self._recipe.keep_checkpoints,
                )
        self._saved, self._saved_at = done, time.monotonic()
        # A checkpoint that takes long to write is written less often.
        share = (self._saved_at - started) / (_MOST_SAVING * SAVE_SECONDS)
        self._pause = self._save_seconds * max(1.0, share)


def _seed(seed: int, slot: int) -> int:
    digest = hashlib.sha256(f"{seed}/{slot}".encode()).digest()
    return int.from_bytes(digest[:7])


def _peak_bytes(device: torch.device) -> int | None:
    """Most memory that was taken so far: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        import resource
    except ImportError:
        return None
    # Kilobytes on Linux, bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
