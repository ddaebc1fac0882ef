"""The shape of a network, from its checkpoint or from the table of released ones; without torch.

What a config lacks is read off the tensor shapes where they can tell; what they cannot tell
(heads, clip length, order of the encoders) is asked for by name, never guessed. What a config
says of the same thing as the tensors must agree with them, and what would change the numbers and
is not built here is refused.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.model.config import (
    INTEGRATIONS,
    RESAMPLERS,
    ConnectorConfig,
    EncoderConfig,
    InternVideo2Config,
    NetworkConfig,
    common_grid,
)
from apollo_cli.model.prompt import TEMPLATES
from apollo_cli.values import Values, any_text, list_of, nothing_or, number, one_of, whole
from apollo_cli.video.transforms import PixelSpec
from apollo_cli.weights.checkpoint import CONNECTOR, TOWER, Checkpoint, TensorInfo
from apollo_cli.weights.encoders import (
    DEFAULT_FRAMES_PER_CLIP,
    HALF,
    IMAGENET_MEAN,
    IMAGENET_STD,
    EncoderReader,
    agree,
    count_layers,
    shape_of,
)
from apollo_cli.weights.language import read_context, read_ends, read_generation, read_llm
from apollo_cli.weights.registry import ModelEntry

DEFAULT_SELECT_LAYER = -2
LONGEST_CLIP_SECONDS = 3600
_TABLE = Path(__file__).parent / "shapes.toml"
_MOST_FRAMES = 256
_GRID = list_of(whole(1), count=3)

Tensors = dict[str, TensorInfo]


def build_network_config(checkpoint: Checkpoint) -> NetworkConfig:
    """Work out the network of a checkpoint.

    Raises:
        WeightsError: values are missing, wrong or unsupported; all of them are listed.
    """
    faults: list[str] = []
    config = _read(checkpoint, faults)
    if config is None or faults:
        raise WeightsError(
            f"checkpoint {checkpoint.root}: {'; '.join(faults)}",
            next_step="correct the named files, or fetch the checkpoint again",
        )
    return config


def _read(checkpoint: Checkpoint, faults: list[str]) -> NetworkConfig | None:
    notes = list(checkpoint.notes)
    root = Values(checkpoint.config, "config.json", faults)
    root.get("clip_duration", number(0, LONGEST_CLIP_SECONDS, above=True))
    # Anything else would keep the class token, or wrap the video in further tokens.
    root.get("mm_vision_select_feature", one_of("patch"), None)
    root.get("use_mm_start_end", nothing_or(one_of(False)), None)
    template = root.get("apollo_template", one_of(*TEMPLATES), "qwen_2")
    select = root.get("mm_vision_select_layer", whole(-1000, -1), DEFAULT_SELECT_LAYER)
    frames = root.get("frames_per_clip", whole(1, _MOST_FRAMES), _frames_of(checkpoint))
    reader = EncoderReader(checkpoint, select or -1, frames or 1, faults, notes)
    found = [reader.read(name) for name in checkpoint.encoder_names]
    encoders = [encoder for encoder in found if encoder is not None]
    connector = None
    if len(encoders) == len(found):
        tower = Values(checkpoint.tower_config, f"{TOWER}/config.json", faults)
        agree(tower, "num_vision_encoders", len(encoders))
        _note_grid(tower, "token_output_shape", common_grid(encoders), notes)
        connector = _ConnectorReader(checkpoint, encoders, faults, notes).read()
    llm = read_llm(checkpoint, faults)
    context = read_context(checkpoint, faults, notes)
    ends = read_ends(checkpoint, llm["vocab_size"] or 1, faults)
    generation = read_generation(checkpoint, faults)
    if faults or connector is None:
        return None
    if connector.text_width != llm["hidden_size"]:
        faults.append(
            f"{CONNECTOR} gives {connector.text_width} values a token, and the language model "
            f"takes {llm['hidden_size']}"
        )
    return NetworkConfig(
        # As it is written: an int is printed as an int in the prompt.
        clip_seconds=checkpoint.config["clip_duration"],
        frames_per_clip=frames,
        encoders=tuple(encoders),
        connector=connector,
        llm=llm,
        context=context,
        template=template,
        eos_ids=ends,
        generation=generation,
        notes=tuple(notes),
    )


def _frames_of(checkpoint: Checkpoint) -> int:
    """Frames of a clip, as the video encoder's config says; the encoder checks the value."""
    for name in checkpoint.encoder_names:
        value = checkpoint.encoder_configs[name].get("num_frames")
        if "internvideo" in name.lower() and type(value) is int and 0 < value <= _MOST_FRAMES:
            return value
    return DEFAULT_FRAMES_PER_CLIP


def _note_grid(config: Values, key: str, grid: tuple[int, int, int], notes: list[str]) -> None:
    """Say that a config tells another grid than the encoders give; nothing is computed from it."""
    told = config.get(key, nothing_or(_GRID), None)
    if told not in (None, grid):
        notes.append(
            f"{config.where}: {key} is {list(told)}; the encoders give {list(grid)}, which is used"
        )


class _ConnectorReader:
    """Reads the connector of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        encoders: list[EncoderConfig],
        faults: list[str],
        notes: list[str],
    ) -> None:
        self.tensors: Tensors = checkpoint.tensors[CONNECTOR]
        self.config = Values(checkpoint.connector_config, f"{CONNECTOR}/config.json", faults)
        self.encoders, self.faults, self.notes = encoders, faults, notes

    def read(self) -> ConnectorConfig | None:
        self._refuse_other_projectors()
        first = self._shape("proj.0.weight")
        if first is None:
            return None
        text_width, vision_width = first
        widths = sum(encoder.width for encoder in self.encoders)
        if widths != vision_width:
            self.faults.append(
                f"{CONNECTOR} takes {vision_width} channels, the encoders give {widths}"
            )
        grid = common_grid(self.encoders)
        agree(self.config, "vision_hidden_size", vision_width)
        agree(self.config, "text_hidden_size", text_width)
        self.config.get("hidden_act", one_of("silu"), None)
        integration = self.config.get("integration", one_of(*INTEGRATIONS), "timestamps")
        resampler = self._resampler()
        if resampler == "perciver":
            # It takes any number of tokens: the key tells only what the training had.
            _note_grid(self.config, "token_input_shape", grid, self.notes)
            shape = self._perceiver(text_width)
        else:
            agree(self.config, "token_input_shape", grid, _GRID)
            shape = {"tokens_per_clip": self.config.get("num_output_tokens", whole(1, prod(grid)))}
        projector = self._projector()
        if shape is None or self.faults:
            return None
        return ConnectorConfig(
            vision_width=vision_width,
            text_width=text_width,
            projector=projector,
            resampler=resampler,
            grid=grid,
            integration=integration,
            **shape,
        )

    def _shape(self, key: str) -> tuple[int, ...] | None:
        return shape_of(self.tensors, key, 2, CONNECTOR, self.faults)

    def _projector(self) -> str:
        keys = [key for key in self.tensors if re.fullmatch(r"proj\.\d+\.weight", key)]
        found = "linear" if len(keys) == 1 else f"mlp{len(keys)}x_gelu"
        told = self.config.get("projector_type", nothing_or(any_text), found)
        # The same layers under another name: one layer is "linear" for the original.
        if told is not None and told != found and (told, found) != ("mlp1x_gelu", "linear"):
            self.config.refuse("projector_type", f"is {told[:60]!r}, and the tensors say {found}")
        return found

    def _resampler(self) -> str:
        """The original takes any name that it does not know for the Perceiver."""
        told = self.config.get("resampler_type", nothing_or(any_text), None) or ""
        is_perceiver = "resampler.latents" in self.tensors
        if told in RESAMPLERS:
            return told
        if is_perceiver:
            said = f"is {told[:60]!r}" if told else "is missing"
            self.notes.append(
                f"{self.config.where}: resampler_type {said}; the tensors are the Perceiver's"
            )
        else:
            self.config.refuse(
                "resampler_type", f"is {told[:60]!r}; allowed are {', '.join(RESAMPLERS)}"
            )
        return "perciver"

    def _perceiver(self, width: int) -> dict[str, Any] | None:
        layer, config = "resampler.layers.0.", self.config
        queries = self._shape(f"{layer}self_attn.q_proj.weight")
        keys = self._shape(f"{layer}self_attn.k_proj.weight")
        gates = self._shape(f"{layer}mlp.gate_proj.weight")
        latents = self._shape("resampler.latents")
        heads = config.get("resampler_n_heads", whole(1, 65536))
        if not (queries and keys and gates and latents and heads):
            return None
        told = config.get("resampler_head_dim", nothing_or(whole(1, 65536)), None)
        head = told or queries[0] // heads or 1
        if head * heads != queries[0] or keys[0] % head or heads % max(1, keys[0] // head):
            config.refuse(
                "resampler_n_heads",
                f"is {heads}: with resampler_head_dim {head}, they do not fill the {queries[0]} "
                f"query rows and {keys[0]} key rows of the tensors",
            )
        if gates[0] % width:
            self.faults.append(f"{CONNECTOR}: {gates[0]} gate rows are no multiple of {width}")
        found = {
            "tokens_per_clip": latents[0],
            "depth": count_layers(self.tensors, "resampler.layers."),
            "heads": heads,
            "head_width": head,
            "key_heads": keys[0] // head,
            "ff_multi": gates[0] // width,
        }
        agree(config, "num_output_tokens", found["tokens_per_clip"])
        agree(config, "resampler_depth", found["depth"])
        agree(config, "num_key_value_heads", found["key_heads"])
        agree(config, "ff_multi", found["ff_multi"])
        return found

    def _refuse_other_projectors(self) -> None:
        for key, name in (
            ("proj.gate_proj.", "perceiver_mlp"),
            ("proj.layer1.", "conv2d"),
            ("proj.s1.", "stc"),
            ("proj.readout.", "stc"),
        ):
            if any(tensor.startswith(key) for tensor in self.tensors):
                self.faults.append(f"{CONNECTOR} has a {name} projector, which is not supported")
                return


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
