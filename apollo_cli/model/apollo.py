"""The network: vision encoders, one grid, connector, language model.

Letters: B clips, T frames a clip, S image side, R tokens a clip, V encoder widths, L sequence,
H language model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from apollo_cli.errors import ApolloError, DeviceError, FitError, WeightsError
from apollo_cli.model.config import NetworkConfig
from apollo_cli.model.connector import Connector
from apollo_cli.model.encoders import (
    encode_grid,
    normalise,
)
from apollo_cli.model.prompt import VISUAL_ID


class ApolloModel(nn.Module):
    """The assembled network. ``weights.load.load_model`` fills it from a checkpoint."""

    def __init__(self, config: NetworkConfig, kernel: str = "sdpa") -> None:
        super().__init__()
        self.config = config
        self.grid = config.connector.grid
        self.encoders = nn.ModuleList(encoder.shape.build(kernel) for encoder in config.encoders)
        self.connector = Connector(config.connector)
        self.connector.set_kernel(kernel)
        llm_config = Qwen2Config(**config.llm)
        llm_config._attn_implementation = kernel
        self.llm = Qwen2ForCausalLM(llm_config)

    @property
    def device(self) -> torch.device:
        """Where the language model lives."""
        return self.llm.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the connector, and so of the visual tokens."""
        return next(self.connector.parameters()).dtype

    def part(self, name: str) -> nn.Module:
        """The module that a checkpoint's part (``llm``, ``vision_tower/<name>`` ...) fills."""
        if name == "llm":
            return self.llm
        if name == "mm_connector":
            return self.connector
        names = [f"vision_tower/{encoder.name}" for encoder in self.config.encoders]
        return self.encoders[names.index(name)]

    def encode_features(self, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the encoders on whole clips.

        Args:
            pixels: for each encoder name, uint8 (B, T, 3, S, S).

        Returns:
            (B, t x rows x columns, V), ordered by time, row, column.
        """
        fused = []
        for encoder, config in zip(self.encoders, self.config.encoders, strict=True):
            weight = next(encoder.parameters())
            ready = normalise(pixels[config.name].to(weight.device), config.pixels, weight.dtype)
            fused.append(encode_grid(encoder, ready, self.grid))  # pyright: ignore[reportArgumentType]
        return torch.cat(fused, dim=-1).flatten(1, 3)

    def encode_clips(self, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Turn the pixels of clips into visual tokens (B, R, H); raises as ``connect`` does."""
        return self.connect(self.encode_features(pixels))

    def connect(self, features: torch.Tensor) -> torch.Tensor:
        """Turn what the encoders gave, (B, t x rows x columns, V), into visual tokens (B, R, H).

        Raises:
            DeviceError: in float16, the tokens are not finite. WeightsError: in another dtype.
                Not while gradients are recorded: training looks at its loss.
        """
        tokens = self.connector(features.to(self.dtype))
        if not torch.is_grad_enabled() and not torch.isfinite(tokens).all():
            parts = features.split([encoder.width for encoder in self.config.encoders], dim=-1)
            named = zip(self.config.encoders, parts, strict=True)
            broken = (e.name for e, part in named if not torch.isfinite(part.to(self.dtype)).all())
            first = next(broken, None)
            raise not_finite(f"encoder {first}" if first else "connector", self.dtype)
        return tokens

    def embed(self, ids: Sequence[int], visual: torch.Tensor | None) -> torch.Tensor:
        """Embed a prompt, visual tokens in place of their placeholders, in order.

        Args:
            ids: L token ids, ``VISUAL_ID`` at visual tokens.
            visual: (number of placeholders, H), or None for text alone.

        Returns:
            (1, L, H).

        Raises:
            FitError: the number of visual tokens differs from the number of placeholders.
        """
        index = torch.tensor(ids, device=self.device)
        places = index == VISUAL_ID
        expected, given = int(places.sum()), 0 if visual is None else len(visual)
        if expected != given:
            raise FitError(
                f"{given} visual tokens for {expected} places in the prompt",
                next_step="this is a fault of apollo: please report it",
            )
        embeddings = self.llm.get_input_embeddings()(index.masked_fill(places, 0))
        if visual is not None:
            embeddings = embeddings.clone()
            embeddings[places] = visual.to(embeddings)
        return embeddings.unsqueeze(0)


def not_finite(stage: str, dtype: torch.dtype) -> ApolloError:
    """The error of a stage that gave NaN or infinity, with what helps in its dtype."""
    name = str(dtype).removeprefix("torch.")
    received = f"the {stage} gave NaN or infinite values in {name}"
    if dtype == torch.float16:
        allowed = "numbers above 65504 overflow in float16"
        return DeviceError(received, allowed, "use --dtype bfloat16 or --dtype float32")
    finer = "leave out --quant" if dtype == torch.float32 else "use --dtype float32 without --quant"
    return WeightsError(
        received,
        "the weights are damaged, or numbers overflow",
        f"check them with apollo models verify, or {finer}",
    )
