"""Weights are finite numbers: NaN or infinity in one tensor makes nonsense of every answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from apollo_cli.errors import WeightsError


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; looked at in place, without a copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:
        # The 8-bit types have no comparison of their own.
        tensor = tensor.float()
    return all(bool(edge.isfinite()) for edge in torch.aminmax(tensor))


def check_finite(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Refuse tensors that were read from a file and hold NaN or infinity.

    Raises:
        WeightsError: names the file and the first such tensor.
    """
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise WeightsError(
                f"{file}: tensor {name} holds NaN or infinite values",
                "weights are finite numbers",
                "run apollo models verify and fetch it again, or train with a lower learning_rate",
            )
