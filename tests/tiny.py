"""Tiny random checkpoints in the released layout, in the variants that releases may have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from safetensors.torch import save_file

TOKENIZER = Path(__file__).parent / "golden" / "tiny-checkpoint" / "llm"
VIDEO, IMAGE = "internvideo2", "siglip-so400m-patch14-384"


@dataclass(frozen=True)
class Tiny:
    """What varies between checkpoints."""

    order: tuple[str, ...] = (VIDEO, IMAGE)
    tied: bool = False
    video_depth: int = 3
    video_heads: int = 2
    image_depth: int = 3
    resampler: str = "perciver"
    resampler_depth: int = 2
    heads: int = 4
    key_heads: int = 2
    projector_layers: int = 2
    tokens_per_clip: int = 8
    tubelet: int = 1
    integration: str | None = None
    fused_mlp: bool = False
    shards: int = 1
    dtype: torch.dtype = torch.float32
    context: int = 4096
    seed: int = 0


def save(folder: Path, tiny: Tiny | None = None) -> Path:
    """Write a checkpoint and return its folder."""
    tiny = tiny or Tiny()
    generator = torch.Generator().manual_seed(tiny.seed)
    tensors = {
        "llm": _llm(tiny),
        "mm_connector": _connector(tiny),
        f"vision_tower/{VIDEO}": _video(tiny),
        f"vision_tower/{IMAGE}": _image(tiny),
    }
    for part, shapes in tensors.items():
        filled = {key: _fill(key, shape, generator) for key, shape in shapes.items()}
        _write(folder / part, {k: v.to(tiny.dtype) for k, v in filled.items()}, tiny.shards)
    for relative, config in _configs(tiny).items():
        path = folder / relative / "config.json"
        path.write_text(json.dumps(config))
    for file in TOKENIZER.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            copyfile(file, folder / "llm" / file.name)
    return folder


def _fill(key: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1 and not key.endswith("bias"):
        return 1 + 0.1 * noise
    return noise * (0.5 if "embed" in key or "latents" in key else 1.5 / shape[-1] ** 0.5)


def _write(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    folder.mkdir(parents=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::shards]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _configs(tiny: Tiny) -> dict[str, dict[str, Any]]:
    connector: dict[str, Any] = {
        "resampler_type": tiny.resampler,
        "projector_type": f"mlp{tiny.projector_layers}x_gelu",
        "resampler_n_heads": tiny.heads,
        "num_output_tokens": tiny.tokens_per_clip,
    }
    if tiny.integration is not None:
        connector["integration"] = tiny.integration
    llm = {
        "model_type": "qwen2",
        "_name_or_path": "/stale/path",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tiny.tied,
        "eos_token_id": 482,
        "hidden_act": "silu",
    }
    image = {
        "image_size": 30,
        "num_attention_heads": 2,
        "num_hidden_layers": tiny.image_depth,
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "": {"clip_duration": 2, "model_max_length": tiny.context, "mm_vision_select_layer": -2},
        "llm": llm,
        "mm_connector": connector,
        "vision_tower": {"vision_towers": list(tiny.order)},
        f"vision_tower/{VIDEO}": {
            "num_heads": tiny.video_heads,
            "depth": tiny.video_depth,
            "img_size": 24,
            "use_fused_mlp": tiny.fused_mlp,
        },
        f"vision_tower/{IMAGE}": image,
    }


def _llm(tiny: Tiny) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (512, 32),
        "model.norm.weight": (32,),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", 32), ("k", 16), ("v", 16)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, 32)
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (32, 32)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (64, 32)
        shapes[f"{prefix}mlp.up_proj.weight"] = (64, 32)
        shapes[f"{prefix}mlp.down_proj.weight"] = (32, 64)
        shapes[f"{prefix}input_layernorm.weight"] = (32,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (32,)
    if not tiny.tied:
        shapes["lm_head.weight"] = (512, 32)
    return shapes


def _video(tiny: Tiny) -> dict[str, tuple[int, ...]]:
    width, hidden, grid = 16, 40, (4 // tiny.tubelet, 4, 4)
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, 3, tiny.tubelet, 6, 6),
        "patch_embed.proj.bias": (width,),
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + grid[0] * grid[1] * grid[2], width),
        # A pretraining head, which is never read.
        "clip_decoder.0.head.weight": (7, width),
    }
    for block in range(tiny.video_depth):
        prefix = f"blocks.{block}."
        for norm in ("norm1", "norm2", "attn.q_norm", "attn.k_norm"):
            shapes[f"{prefix}{norm}.weight"] = (width,)
        shapes[f"{prefix}attn.qkv.weight"] = (3 * width, width)
        shapes[f"{prefix}attn.proj.weight"] = (width, width)
        shapes[f"{prefix}attn.proj.bias"] = (width,)
        shapes[f"{prefix}ls1.gamma"] = shapes[f"{prefix}ls2.gamma"] = (width,)
        shapes[f"{prefix}mlp.fc1.weight"] = (hidden, width)
        shapes[f"{prefix}mlp.fc1.bias"] = (hidden,)
        shapes[f"{prefix}mlp.fc2.weight"] = (width, hidden)
        shapes[f"{prefix}mlp.fc2.bias"] = (width,)
    return shapes


def _image(tiny: Tiny) -> dict[str, tuple[int, ...]]:
    width, hidden = 12, 20
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.patch_embedding.weight": (width, 3, 6, 6),
        "vision_model.embeddings.patch_embedding.bias": (width,),
        "vision_model.embeddings.position_embedding.weight": (25, width),
        "vision_model.post_layernorm.weight": (width,),
        "vision_model.head.probe": (1, 1, width),
    }
    for layer in range(tiny.image_depth):
        prefix = f"vision_model.encoder.layers.{layer}."
        for name in ("layer_norm1", "layer_norm2"):
            shapes[f"{prefix}{name}.weight"] = shapes[f"{prefix}{name}.bias"] = (width,)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (width, width)
            shapes[f"{prefix}self_attn.{name}.bias"] = (width,)
        shapes[f"{prefix}mlp.fc1.weight"] = (hidden, width)
        shapes[f"{prefix}mlp.fc1.bias"] = (hidden,)
        shapes[f"{prefix}mlp.fc2.weight"] = (width, hidden)
        shapes[f"{prefix}mlp.fc2.bias"] = (width,)
    return shapes


def _connector(tiny: Tiny) -> dict[str, tuple[int, ...]]:
    width, head, vision = 32, 6, 16 + 12
    shapes: dict[str, tuple[int, ...]] = {
        "proj.0.weight": (width, vision),
        "proj.0.bias": (width,),
    }
    for layer in range(1, tiny.projector_layers):
        shapes[f"proj.{2 * layer}.weight"] = (width, width)
        shapes[f"proj.{2 * layer}.bias"] = (width,)
    if tiny.integration in ("start_end", "both"):
        shapes["clip_start"] = shapes["clip_end"] = (width,)
    if tiny.resampler == "conv2d_avg":
        shapes["resampler.conv.weight"] = (width, width, 3, 3)
        shapes["resampler.conv.bias"] = (width,)
    if tiny.resampler != "perciver":
        return shapes
    shapes["resampler.latents"] = (tiny.tokens_per_clip, width)
    norms = ["resampler.norm"]
    for layer in range(tiny.resampler_depth):
        prefix = f"resampler.layers.{layer}."
        norms += [
            f"{prefix}{norm}"
            for norm in ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
        ]
        for name, rows in (("q", tiny.heads), ("k", tiny.key_heads), ("v", tiny.key_heads)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows * head, width)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (width, tiny.heads * head)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (3 * width, width)
        shapes[f"{prefix}mlp.up_proj.weight"] = (3 * width, width)
        shapes[f"{prefix}mlp.down_proj.weight"] = (width, 3 * width)
    for norm in norms:
        shapes[f"{norm}.norm.weight"] = shapes[f"{norm}.norm.bias"] = (width,)
        shapes[f"{norm}.wheight"] = (width,)
    return shapes
