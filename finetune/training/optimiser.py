"""The optimiser and its schedule: built from a recipe, and saved as plain tensors and numbers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from apollo_cli.errors import DataError
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.hardware import import_fault


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
