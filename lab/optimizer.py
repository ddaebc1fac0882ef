"""The optimizer of every stage: Muon for hidden matrices, AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

WARM_UP_STEPS, LAST_SHARE, CLIP_NORM, WEIGHT_DECAY = 30, 0.03, 1.0, 0.02


class Optimizer:
    """Warm-up, then a cosine down to a small rest, over a known number of steps.

    Args:
        modules: what is trained, each with its share of the learning rates; parameters that need
            no gradient are left alone.
        steps: length of the stage.
        muon_lr, adam_lr: peaks of the learning rates.
    """

    def __init__(
        self, modules: Mapping[nn.Module, float], steps: int, muon_lr: float, adam_lr: float
    ) -> None:
        hidden, others = [], []
        for module, share in modules.items():
            named = [(k, p) for k, p in module.named_parameters() if p.requires_grad]
            hidden.append({"params": [p for k, p in named if _is_hidden(k, p)], "share": share})
            others.append({"params": [p for k, p in named if not _is_hidden(k, p)], "share": share})
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
            torch.optim.Muon(hidden, lr=muon_lr, weight_decay=WEIGHT_DECAY, momentum=0.95),
        ]
        self.parameters = [p for group in hidden + others for p in group["params"]]
        self.peaks = [adam_lr, muon_lr]
        self.steps, self.done = steps, 0

    def step(self, loss: torch.Tensor) -> None:
        """Back-propagate one loss and move the parameters."""
        along = rate_share(self.done, self.steps)
        for part, peak in zip(self.parts, self.peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * along * group["share"]
            part.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        for part in self.parts:
            part.step()
        self.done += 1

    def state(self) -> dict[str, torch.Tensor]:
        """All that is needed to go on after a stop, as plain tensors."""
        state = {"done": torch.tensor(self.done)}
        for number, parameter, kept in self._kept():
            for name, value in kept[parameter].items():
                state[f"{number}.{name}"] = torch.as_tensor(value)
        return state

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a state."""
        self.done = int(state["done"])
        for number, parameter, kept in self._kept():
            start = f"{number}."
            kept[parameter] = {
                name.removeprefix(start): value.clone()
                for name, value in state.items()
                if name.startswith(start)
            }

    def _kept(self) -> Iterator[tuple[int, torch.Tensor, dict]]:
        owners = [
            (parameter, part.state)
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        ]
        for number, (parameter, kept) in enumerate(owners):
            yield number, parameter, kept


def rate_share(step: int, steps: int) -> float:
    """Share of the peak learning rate at a step."""
    warm = min(WARM_UP_STEPS, max(1, steps // 4))
    if step < warm:
        return (step + 1) / warm
    along = (step - warm) / max(1, steps - warm)
    return LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))


def _is_hidden(name: str, parameter: nn.Parameter) -> bool:
    outer = ("embed", "lm_head", "heads.", "latents", "position", "query")
    return parameter.ndim == 2 and not any(word in name for word in outer)
