"""Random checkpoints of any shape in the released layout, for measurements of memory and time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from safetensors.torch import save_file

from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.config import (
    ConnectorConfig,
    EncoderConfig,
    InternVideo2Shape,
    NetworkConfig,
    SiglipShape,
    common_grid,
)
from apollo_cli.video.transforms import PixelSpec
from apollo_cli.weights.load import parameters_on_meta

TOKENIZER = Path(__file__).parent.parent / "tests" / "golden" / "tiny-checkpoint" / "llm"
MEAN, STD, GREY = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Shape:
    """What varies: widths and depths. Patches and heads follow.

    Attributes:
        llm_width, llm_hidden, llm_layers, vocabulary, tied: of the language model.
        video_width, video_depth: of InternVideo2. image_width, image_depth: of SigLIP.
        image_side: pixels of a side, for both encoders; patches are 14 pixels wide.
    """

    llm_width: int = 512
    llm_hidden: int = 1408
    llm_layers: int = 4
    vocabulary: int = 512
    tied: bool = True
    video_width: int = 176
    video_depth: int = 2
    image_width: int = 144
    image_depth: int = 2
    image_side: int = 112


def network(shape: Shape) -> NetworkConfig:
    """The network of a shape."""
    video = InternVideo2Shape(
        width=shape.video_width,
        heads=4,
        mlp_width=4 * shape.video_width,
        depth=shape.video_depth,
        image_size=shape.image_side,
        patch_size=14,
        frames=4,
    )
    image = SiglipShape(
        width=shape.image_width,
        heads=4,
        mlp_width=4 * shape.image_width,
        depth=shape.image_depth,
        image_size=shape.image_side,
        patch_size=14,
    )
    side = shape.image_side
    encoders = (
        EncoderConfig(
            "internvideo2",
            video,
            PixelSpec("internvideo2", side, "bilinear", (123, 116, 103), MEAN, STD),
        ),
        EncoderConfig(
            "siglip", image, PixelSpec("siglip", side, "bicubic", (127, 127, 127), GREY, GREY)
        ),
    )
    connector = ConnectorConfig(
        vision_width=shape.video_width + shape.image_width,
        text_width=shape.llm_width,
        projector="mlp2x_gelu",
        resampler="perciver",
        tokens_per_clip=32,
        grid=common_grid(encoders),
        depth=1,
        heads=4,
        head_width=shape.llm_width // 8,
        key_heads=2,
        ff_multi=2,
    )
    llm = {
        "model_type": "qwen2",
        "hidden_size": shape.llm_width,
        "intermediate_size": shape.llm_hidden,
        "num_hidden_layers": shape.llm_layers,
        "num_attention_heads": max(1, shape.llm_width // 64),
        "num_key_value_heads": 2,
        "vocab_size": shape.vocabulary,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": 482,
    }
    return NetworkConfig(2, 4, encoders, connector, llm, 32768, "qwen_2", (482,), {})


def save(
    folder: Path, shape: Shape, dtype: torch.dtype = torch.bfloat16, shard_bytes: int = 2**40
) -> Path:
    """Write a checkpoint of a shape and return its folder."""
    return save_network(folder, network(shape), dtype, shard_bytes)


def save_network(
    folder: Path,
    config: NetworkConfig,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 2**40,
) -> Path:
    """Write a checkpoint of a network and return its folder."""
    with parameters_on_meta():
        model = ApolloModel(config)
    # Drawn once and repeated: what is measured does not look at the values.
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(dtype) * 0.02
    encoders = [f"vision_tower/{encoder.name}" for encoder in config.encoders]
    for part in ("llm", "mm_connector", *encoders):
        shapes = {name: value.shape for name, value in model.part(part).named_parameters()}
        _write(folder / part, shapes, noise, shard_bytes)
    for relative, content in _configs(config).items():
        (folder / relative / "config.json").write_text(json.dumps(content))
    for file in TOKENIZER.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            copyfile(file, folder / "llm" / file.name)
    return folder


def _write(
    folder: Path, shapes: dict[str, torch.Size], noise: torch.Tensor, shard_bytes: int
) -> None:
    folder.mkdir(parents=True)
    groups: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in shapes.items():
        size = shape.numel() * noise.element_size()
        if groups[-1] and sum(t.nbytes for t in groups[-1].values()) + size > shard_bytes:
            save_file(groups[-1], folder / f"part{len(groups)}.safetensors")
            groups[-1] = dict.fromkeys(groups[-1], torch.empty(0))
            groups.append({})
        repeats = -(-shape.numel() // len(noise))
        groups[-1][name] = noise.repeat(repeats)[: shape.numel()].reshape(shape).clone()
    if len(groups) == 1:
        save_file(groups[0], folder / "model.safetensors")
        return
    save_file(groups[-1], folder / f"part{len(groups)}.safetensors")
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    for number, name in enumerate(names, start=1):
        (folder / f"part{number}.safetensors").rename(folder / name)
    weight_map = {key: name for name, group in zip(names, groups, strict=True) for key in group}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _configs(config: NetworkConfig) -> dict[str, dict[str, Any]]:
    video, image = config.encoders
    return {
        "": {"clip_duration": 2, "model_max_length": 32768, "mm_vision_select_layer": -1},
        "llm": config.llm,
        "mm_connector": {
            "resampler_type": "perciver",
            "projector_type": "mlp2x_gelu",
            "resampler_n_heads": config.connector.heads,
            "num_output_tokens": config.connector.tokens_per_clip,
        },
        "vision_tower": {"vision_towers": [video.name, image.name]},
        f"vision_tower/{video.name}": {
            "num_heads": video.shape.heads,
            "img_size": video.shape.image_size,
        },
        f"vision_tower/{image.name}": {
            "hidden_size": image.shape.width,
            "intermediate_size": image.shape.mlp_width,
            "num_hidden_layers": image.shape.depth,
            "num_attention_heads": image.shape.heads,
            "image_size": image.shape.image_size,
            "patch_size": image.shape.patch_size,
        },
    }
