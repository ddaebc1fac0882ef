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
from math import prod
from pathlib import Path
from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.model.config import (
    INTEGRATIONS,
    RESAMPLERS,
    ConnectorConfig,
    EncoderConfig,
    InternVideo2Shape,
    NetworkConfig,
    SiglipShape,
    common_grid,
)
from apollo_cli.model.prompt import TEMPLATES
from apollo_cli.values import Values, any_text, list_of, nothing_or, number, one_of, whole
from apollo_cli.weights.checkpoint import CONNECTOR, TOWER, Checkpoint, TensorInfo
from apollo_cli.weights.encoders import (
    DEFAULT_FRAMES_PER_CLIP,
    EncoderReader,
    agree,
    count_layers,
    internvideo2_encoder,
    shapes_of,
    siglip_encoder,
)
from apollo_cli.weights.language import read_context, read_ends, read_generation, read_llm
from apollo_cli.weights.registry import ModelEntry

DEFAULT_SELECT_LAYER = -2
LONGEST_CLIP_SECONDS = 3600
_TABLE = Path(__file__).parent / "shapes.toml"
_MOST_FRAMES = 256
_GRID = list_of(whole(1), count=3)

# The tensors that tell the shape of the Perceiver, and how many dimensions each has.
_PERCEIVER = {
    "resampler.layers.0.self_attn.q_proj.weight": 2,
    "resampler.layers.0.self_attn.k_proj.weight": 2,
    "resampler.layers.0.mlp.gate_proj.weight": 2,
    "resampler.latents": 2,
}
# Projectors of the original code that are not built here, by how their tensors begin.
_OTHER_PROJECTORS = {
    "proj.gate_proj.": "perceiver_mlp",
    "proj.layer1.": "conv2d",
    "proj.s1.": "stc",
    "proj.readout.": "stc",
}

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
        connector = _read_connector(checkpoint, encoders, faults, notes)
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


def _read_connector(
    checkpoint: Checkpoint, encoders: list[EncoderConfig], faults: list[str], notes: list[str]
) -> ConnectorConfig | None:
    tensors, before = checkpoint.tensors[CONNECTOR], len(faults)
    config = Values(checkpoint.connector_config, f"{CONNECTOR}/config.json", faults)
    for begin, name in _OTHER_PROJECTORS.items():
        if any(key.startswith(begin) for key in tensors):
            faults.append(f"{CONNECTOR} has a {name} projector, which is not supported")
            break
    first = shapes_of(tensors, {"proj.0.weight": 2}, CONNECTOR, faults)
    if first is None:
        return None
    text_width, vision_width = first[0]
    widths = sum(encoder.width for encoder in encoders)
    if widths != vision_width:
        faults.append(f"{CONNECTOR} takes {vision_width} channels, the encoders give {widths}")
    grid = common_grid(encoders)
    agree(config, "vision_hidden_size", vision_width)
    agree(config, "text_hidden_size", text_width)
    config.get("hidden_act", one_of("silu"), None)
    integration = config.get("integration", one_of(*INTEGRATIONS), "timestamps")
    resampler = _read_resampler(config, tensors, notes)
    if resampler == "perciver":
        # It takes any number of tokens: the key tells only what the training had.
        _note_grid(config, "token_input_shape", grid, notes)
        shape = _read_perceiver(config, tensors, text_width)
    else:
        agree(config, "token_input_shape", grid, _GRID)
        shape = {"tokens_per_clip": config.get("num_output_tokens", whole(1, prod(grid)))}
    projector = _read_projector(config, tensors)
    if shape is None or len(faults) > before:
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


def _read_projector(config: Values, tensors: Tensors) -> str:
    keys = [key for key in tensors if re.fullmatch(r"proj\.\d+\.weight", key)]
    found = "linear" if len(keys) == 1 else f"mlp{len(keys)}x_gelu"
    told = config.get("projector_type", nothing_or(any_text), found)
    # The same layers under another name: one layer is "linear" for the original.
    if told is not None and told != found and (told, found) != ("mlp1x_gelu", "linear"):
        config.refuse("projector_type", f"is {told[:60]!r}, and the tensors say {found}")
    return found


def _read_resampler(config: Values, tensors: Tensors, notes: list[str]) -> str:
    """The original takes any name that it does not know for the Perceiver."""
    told = config.get("resampler_type", nothing_or(any_text), None) or ""
    if told in RESAMPLERS:
        return told
    said = f"is {told[:60]!r}" if told else "is missing"
    if "resampler.latents" in tensors:
        notes.append(f"{config.where}: resampler_type {said}; the tensors are the Perceiver's")
    else:
        config.refuse("resampler_type", f"{said}; allowed are {', '.join(RESAMPLERS)}")
    return "perciver"


def _read_perceiver(config: Values, tensors: Tensors, width: int) -> dict[str, Any] | None:
    shapes = shapes_of(tensors, _PERCEIVER, CONNECTOR, config.faults)
    heads = config.get("resampler_n_heads", whole(1, 65536))
    if shapes is None or heads is None:
        return None
    (queries, _), (keys, _), (gates, _), (latents, _) = shapes
    told = config.get("resampler_head_dim", nothing_or(whole(1, 65536)), None)
    head = told or queries // heads or 1
    if head * heads != queries or keys % head or heads % max(1, keys // head):
        config.refuse(
            "resampler_n_heads",
            f"is {heads}: with resampler_head_dim {head}, they do not fill the {queries} "
            f"query rows and {keys} key rows of the tensors",
        )
    if gates % width:
        config.faults.append(f"{CONNECTOR}: {gates} gate rows are no multiple of {width}")
    depth = count_layers(tensors, "resampler.layers.")
    return {
        "tokens_per_clip": agree(config, "num_output_tokens", latents),
        "depth": agree(config, "resampler_depth", depth),
        "heads": heads,
        "head_width": head,
        "key_heads": agree(config, "num_key_value_heads", keys // head),
        "ff_multi": agree(config, "ff_multi", gates // width),
    }


@dataclass(frozen=True)
class AssumedNetwork:
    """A network as far as it is public.

    Attributes:
        config: its shape. assumed: what no public document tells, in words.
    """

    config: NetworkConfig
    assumed: tuple[str, ...]


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
    table = tomllib.loads(_TABLE.read_text("utf-8"))
    unused_layers = 1 + table["select_layer"]
    video, image = table["internvideo2"], table["siglip"]
    encoders = (
        internvideo2_encoder(
            "internvideo2",
            InternVideo2Shape(
                depth=video.pop("layers") + unused_layers, frames=table["frames_per_clip"], **video
            ),
        ),
        siglip_encoder(
            "siglip-so400m-patch14-384",
            SiglipShape(depth=image.pop("layers") + unused_layers, **image),
        ),
    )
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
