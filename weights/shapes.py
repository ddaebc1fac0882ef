"""The network of a model that is not on this machine, from the table of released shapes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.model.config import (
    ConnectorConfig,
    EncoderConfig,
    InternVideo2Config,
    NetworkConfig,
    common_grid,
)
from apollo_cli.video.transforms import PixelSpec
from apollo_cli.weights.encoders import HALF, IMAGENET_MEAN, IMAGENET_STD
from apollo_cli.weights.registry import ModelEntry

_TABLE = Path(__file__).parent / "shapes.toml"


@dataclass(frozen=True)
class AssumedNetwork:
    """A network as far as it is public.

    Attributes:
        config: its shape. assumed: what no public document tells, in words.
    """

    config: NetworkConfig
    assumed: tuple[str, ...]


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text("utf-8"))


def released_network(entry: ModelEntry) -> AssumedNetwork:
    """The network of a known model that has not been downloaded.

    Raises:
        WeightsError: nothing is known of its shape.
    """
    shape = entry.llm_shape
    if shape is None:
        raise WeightsError(
            f"the shape of {entry.name} is not known",
            next_step=f"fetch it first: apollo models pull {entry.name}",
        )
    table = _table()
    encoders = (_internvideo2(table), _siglip(table))
    connector = ConnectorConfig(
        vision_width=sum(encoder.width for encoder in encoders),
        text_width=shape.hidden_size,
        tokens_per_clip=table["tokens_per_clip"],
        grid=common_grid(encoders),
        **table["connector"],
    )
    llm = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
    }
    config = NetworkConfig(
        clip_seconds=table["clip_seconds"],
        frames_per_clip=table["frames_per_clip"],
        encoders=encoders,
        connector=connector,
        llm=llm,
        context=table["context"],
        template=table["template"],
        eos_ids=(),
        generation={},
    )
    return AssumedNetwork(config, tuple(table["assumed"]))


def _internvideo2(table: dict[str, Any]) -> EncoderConfig:
    row = dict(table["internvideo2"])
    depth = row.pop("layers") + 1 + table["select_layer"]
    shape = InternVideo2Config(depth=depth, frames=table["frames_per_clip"], **row)
    pixels = PixelSpec(
        "internvideo2", shape.image_size, "bilinear", (123, 116, 103), IMAGENET_MEAN, IMAGENET_STD
    )
    return EncoderConfig(
        "internvideo2", "internvideo2", shape.width, shape.grid, pixels, internvideo2=shape
    )


def _siglip(table: dict[str, Any]) -> EncoderConfig:
    row = table["siglip"]
    depth = row["num_hidden_layers"] + 1 + table["select_layer"]
    size, name = row["image_size"], "siglip-so400m-patch14-384"
    side = size // row["patch_size"]
    pixels = PixelSpec(name, size, "bicubic", (127, 127, 127), HALF, HALF)
    return EncoderConfig(
        name, "siglip", row["hidden_size"], (1, side, side), pixels, siglip=(dict(row), depth)
    )
