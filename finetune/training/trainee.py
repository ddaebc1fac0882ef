"""The optimiser and its schedule: built from a recipe, and saved as plain tensors and numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from apollo_cli.config import ENCODE_BATCH
from apollo_cli.errors import DataError
from apollo_cli.finetune.estimate import CONNECTOR_CLIPS, ENCODER_CLIPS, LOGIT_ROWS
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.training.examples import IGNORED, Example, join_clips
from apollo_cli.hardware import import_fault
from apollo_cli.model.apollo import ApolloModel


class Trainable(Protocol):
    """What an optimiser needs of a prepared network: ``adapters.Trained``."""

    parameters: dict[str, nn.Parameter]

    def groups(self) -> list[dict[str, Any]]:
        """Groups of parameters with their learning rates."""
        ...


class Optimiser:
    """AdamW with warm-up and a cosine down to nothing.

    Args:
        trained: the parameters and their groups.
        recipe: kind of optimiser and length of the warm-up. steps: of the whole run.

    Raises:
        DataError: 8-bit states were asked for, and bitsandbytes is not there.
    """

    def __init__(self, trained: Trainable, recipe: Recipe, steps: int) -> None:
        self.parameters = trained.parameters
        # It imports half of the library, so that it waits until the library was told to be quiet.
        from transformers import get_cosine_schedule_with_warmup

        self._inner = _adamw(recipe.optimizer)(trained.groups())
        warmup = round(recipe.warmup_share * steps)
        self._schedule: LambdaLR = get_cosine_schedule_with_warmup(self._inner, warmup, steps)
        self.warmup_steps = warmup

    @property
    def rates(self) -> dict[str, float]:
        """Learning rate of each group in the next step."""
        return {group["name"]: group["lr"] for group in self._inner.param_groups}

    def step(self, learned: bool = True) -> None:
        """Take a step along the gradients, and move on in the schedule.

        Args:
            learned: whether there are gradients; without any, not even momentum moves a weight.
        """
        if learned:
            self._inner.step()
        with warnings.catch_warnings():
            # It takes the first steps that move nothing for a mistake.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self._schedule.step()

    def clear(self) -> None:
        """Set all gradients to zero; all are there, also of parts that a batch does not reach.

        So a step is the same whichever process had samples for a part.
        """
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything to go on from: tensors by name, and plain data."""
        tensors, numbers = {}, {}
        for name, parameter in self.parameters.items():
            for key, value in self._inner.state[parameter].items():
                place = tensors if isinstance(value, torch.Tensor) else numbers
                place[f"{name}/{key}"] = value
        schedule = {
            key: value
            for key, value in self._schedule.state_dict().items()
            if isinstance(value, int | float | list) and key != "lr_lambdas"
        }
        return tensors, {"numbers": numbers, "schedule": schedule}

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        for key, value in (*tensors.items(), *facts["numbers"].items()):
            name, _, entry = key.rpartition("/")
            parameter = self.parameters[name]
            # The count of steps stays on the CPU, where the optimiser keeps it.
            moves = isinstance(value, torch.Tensor) and entry != "step"
            placed = value.to(parameter.device) if moves else value
            self._inner.state[parameter][entry] = placed
        functions = {"lr_lambdas": [None] * len(self._inner.param_groups)}
        self._schedule.load_state_dict(facts["schedule"] | functions)
        for group, rate in zip(self._inner.param_groups, self._schedule.get_last_lr(), strict=True):
            group["lr"] = rate


def _adamw(kind: str) -> Any:
    if kind == "adamw":
        return torch.optim.AdamW
    fault = import_fault("bitsandbytes", "bitsandbytes")
    if fault is not None:
        raise DataError(
            f'optimizer = "{kind}": {fault}',
            'allowed without it is "adamw"',
            "pip install 'apollo-video-cli[quant]'",
        )
    from bitsandbytes.optim.adamw import AdamW8bit

    return AdamW8bit


class Trainee(nn.Module):
    """Computes the training loss of a network.

    Which parts are trained is read from ``requires_grad`` of their parameters at each step;
    nothing is kept for a backward pass through parts that no trained one stands before.

    Args:
        network: the model. gradient_checkpointing: compute activations a second time in the
            backward pass instead of keeping them.
    """

    def __init__(self, network: ApolloModel, gradient_checkpointing: bool = True) -> None:
        super().__init__()
        self.network = network
        self.gradient_checkpointing = gradient_checkpointing
        self.encode_batch = ENCODE_BATCH.get(network.device.type, ENCODE_BATCH["cpu"])
        self._aside: tuple[nn.Module, ...] = ()
        if gradient_checkpointing:
            network.llm.activation_checkpointing_enable({"use_reentrant": False})
            # A layer drops its activations only in training mode, and a frozen language model is
            # in evaluation mode; this flag alone changes nothing else, its children keep theirs.
            for layer in network.llm.model.layers:
                layer.training = True

    def set_aside(self) -> None:
        """Keep the frozen encoders and connector in main memory, all that they say being known.

        One video whose tokens are lost after all is still watched: they come back for it.
        """
        self._aside = (self.network.encoders, self.network.connector)
        for part in self._aside:
            part.to("cpu")
        torch.cuda.empty_cache()

    def forward(self, examples: Sequence[Example]) -> tuple[torch.Tensor, int]:
        """The loss of a micro batch.

        Returns:
            The sum of the losses of all trained tokens, a float32 scalar, and their number.
        """
        hidden = self._read(examples)
        rows, targets = [], []
        for number, example in enumerate(examples):
            # A token is foretold one position before its own; nothing stands before the first.
            places = [i for i, label in enumerate(example.labels) if label != IGNORED and i > 0]
            rows.append(hidden[number, torch.tensor(places, device=hidden.device) - 1])
            targets += [example.labels[place] for place in places]
        wanted = torch.tensor(targets, device=hidden.device)
        pieces = zip(torch.cat(rows).split(LOGIT_ROWS), wanted.split(LOGIT_ROWS), strict=True)
        losses = [self._again(self._loss, *piece) for piece in pieces]
        return torch.stack(losses).sum(), len(targets)

    def _read(self, examples: Sequence[Example]) -> torch.Tensor:
        """Last hidden states (B, L, H) of examples, padded on the right."""
        visual = self.visual_tokens(examples)
        embedded = [
            self.network.embed(example.ids, tokens)[0]
            for example, tokens in zip(examples, visual, strict=True)
        ]
        lengths = torch.tensor([len(row) for row in embedded], device=self.network.device)
        padded = nn.utils.rnn.pad_sequence(embedded, batch_first=True)
        positions = torch.arange(padded.shape[1], device=lengths.device)
        # Without padding the causal mask is enough, and its kernel is faster.
        even = len(set(lengths.tolist())) == 1
        mask = None if even else (positions < lengths[:, None]).long()
        outcome = self.network.llm.model(
            inputs_embeds=padded,
            attention_mask=mask,
            position_ids=positions.expand(len(examples), -1),
            use_cache=False,
        )
        return outcome.last_hidden_state

    def visual_tokens(self, examples: Sequence[Example]) -> list[torch.Tensor | None]:
        """Visual tokens (C x R, H) of each example; the clips of all go through together."""
        shown = [example.pixels for example in examples if example.pixels is not None]
        clips = [len(next(iter(pixels.values()))) for pixels in shown]
        encoded: Iterator[torch.Tensor] = iter(())
        if shown:
            with self._at_hand():
                encoded = iter(self._encode(join_clips(shown)).split(clips))
        return [
            example.tokens if example.pixels is None else next(encoded).flatten(0, 1)
            for example in examples
        ]

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """What was set aside, back on the device for a while."""
        for part in self._aside:
            part.to(self.network.device)
        try:
            yield
        finally:
            for part in self._aside:
                part.to("cpu")

    def _encode(self, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Visual tokens (C, R, H) of clips, a few clips at a time."""
        network, tokens, batch = self.network, [], self.encode_batch
        # All activations of a batch are there at once while it is learned from.
        if torch.is_grad_enabled() and _learns(network.encoders):
            batch = ENCODER_CLIPS
        elif torch.is_grad_enabled() and _learns(network.connector):
            batch = CONNECTOR_CLIPS
        for start in range(0, len(next(iter(pixels.values()))), batch):
            piece = {name: p[start : start + batch] for name, p in pixels.items()}
            features = self._through(network.encoders, network.encode_features, piece)
            tokens.append(self._through(network.connector, network.connect, features))
        return torch.cat(tokens)

    def _through(
        self, part: nn.Module, compute: Callable[..., torch.Tensor], given: object
    ) -> torch.Tensor:
        """Compute with a part; for a backward pass only where that part or one before learns."""
        needed = _learns(part) or (isinstance(given, torch.Tensor) and given.requires_grad)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
            return self._again(compute, given)

    def _loss(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = self.network.llm.lm_head(hidden).float()
        return F.cross_entropy(logits, wanted, reduction="sum")

    def _again(self, compute: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
        """Compute something whose activations are dropped and computed again, if asked to."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(compute, *args, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return compute(*args)


def _learns(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())
