"""The network once more, in straight lines from a checkpoint's tensors: no module of ours.

Slow and explicit on purpose: attention head by head as plain matrix products, no fused kernel,
everything in float32. What it shares with the program is the file format alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def read(folder: Path) -> Tensors:
    """All tensors of one part, from one file or shards, in float32."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return {key: value.float() for key, value in found.items()}


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, shared: int = 1):
    """Head by head over (N, heads x width); ``shared`` query heads use the same keys."""
    width = q.shape[-1] // heads
    out = []
    for head in range(heads):
        other = head // shared
        own = slice(head * width, (head + 1) * width)
        kept = slice(other * width, (other + 1) * width)
        scores = q[:, own] @ k[:, kept].T / width**0.5
        out.append(scores.softmax(-1) @ v[:, kept])
    return torch.cat(out, -1)


def internvideo2(w: Tensors, clip: torch.Tensor, heads: int, skip: int, tanh: bool):
    """One normalised clip (T, 3, S, S) to (t, G, G, D)."""
    kernel = w["patch_embed.proj.weight"]
    tubelet, patch = kernel.shape[2:4]
    frames, side = clip.shape[0] // tubelet, clip.shape[-1] // patch
    tokens = [w["cls_token"][0, 0]]
    for t in range(frames):
        for row in range(side):
            for column in range(side):
                cut = clip[
                    t * tubelet : (t + 1) * tubelet,
                    :,
                    row * patch : (row + 1) * patch,
                    column * patch : (column + 1) * patch,
                ]
                value = (kernel * cut.transpose(0, 1)).sum((1, 2, 3, 4))
                tokens.append(value + w["patch_embed.proj.bias"])
    x = torch.stack(tokens) + w["pos_embed"][0]
    depth = 1 + max(int(key.split(".")[1]) for key in w if key.startswith("blocks."))
    for number in range(depth - skip):
        b = {k.removeprefix(f"blocks.{number}."): v for k, v in w.items()}
        normed = rms(x, b["norm1.weight"])
        q, k, v = (normed @ b["attn.qkv.weight"].T).chunk(3, -1)
        q, k = rms(q, b["attn.q_norm.weight"]), rms(k, b["attn.k_norm.weight"])
        mixed = attend(q, k, v, heads) @ b["attn.proj.weight"].T + b["attn.proj.bias"]
        x = x + b["ls1.gamma"] * mixed
        hidden = rms(x, b["norm2.weight"]) @ b["mlp.fc1.weight"].T + b["mlp.fc1.bias"]
        hidden = F.gelu(hidden, approximate="tanh" if tanh else "none")
        x = x + b["ls2.gamma"] * (hidden @ b["mlp.fc2.weight"].T + b["mlp.fc2.bias"])
    return x[1:].reshape(frames, side, side, -1)


def siglip(w: Tensors, frame: torch.Tensor, heads: int, skip: int) -> torch.Tensor:
    """One normalised frame (3, S, S) to (G, G, D)."""
    w = {key.removeprefix("vision_model."): value for key, value in w.items()}
    kernel = w["embeddings.patch_embedding.weight"]
    patch, side = kernel.shape[-1], frame.shape[-1] // kernel.shape[-1]
    tokens = [
        (kernel * frame[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]).sum((1, 2, 3))
        + w["embeddings.patch_embedding.bias"]
        for r in range(side)
        for c in range(side)
    ]
    x = torch.stack(tokens) + w["embeddings.position_embedding.weight"]
    depth = 1 + max(int(key.split(".")[2]) for key in w if key.startswith("encoder.layers."))
    for number in range(depth - skip):
        b = {k.removeprefix(f"encoder.layers.{number}."): v for k, v in w.items()}

        def linear(name: str, x: torch.Tensor, b: Tensors = b) -> torch.Tensor:
            return x @ b[f"{name}.weight"].T + b[f"{name}.bias"]

        def norm(name: str, x: torch.Tensor, b: Tensors = b) -> torch.Tensor:
            return F.layer_norm(x, x.shape[-1:], b[f"{name}.weight"], b[f"{name}.bias"], 1e-6)

        normed = norm("layer_norm1", x)
        q, k, v = (linear(f"self_attn.{name}_proj", normed) for name in "qkv")
        x = x + linear("self_attn.out_proj", attend(q, k, v, heads))
        x = x + linear(
            "mlp.fc2", F.gelu(linear("mlp.fc1", norm("layer_norm2", x)), approximate="tanh")
        )
    return x.reshape(side, side, -1)


def weighted_norm(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    normed = F.layer_norm(x, x.shape[-1:], w[f"{name}.norm.weight"], w[f"{name}.norm.bias"], 1e-5)
    return normed * w[f"{name}.wheight"]


def connector(w: Tensors, x: torch.Tensor, heads: int) -> torch.Tensor:
    """Features (N, V) of one clip to (R, H)."""
    for layer in range(0, 99, 2):
        if f"proj.{layer}.weight" not in w:
            break
        x = F.gelu(x) if layer else x
        x = x @ w[f"proj.{layer}.weight"].T + w[f"proj.{layer}.bias"]
    z = w["resampler.latents"]
    for layer in range(99):
        prefix = f"resampler.layers.{layer}."
        if f"{prefix}self_attn.q_proj.weight" not in w:
            break
        a = weighted_norm(w, f"{prefix}input_latents_norm", z)
        c = weighted_norm(w, f"{prefix}input_context_norm", x)
        q = a @ w[f"{prefix}self_attn.q_proj.weight"].T
        seen = torch.cat((c, a))
        k = seen @ w[f"{prefix}self_attn.k_proj.weight"].T
        v = seen @ w[f"{prefix}self_attn.v_proj.weight"].T
        shared = q.shape[-1] // k.shape[-1]
        z = z + attend(q, k, v, heads, shared) @ w[f"{prefix}self_attn.o_proj.weight"].T
        normed = weighted_norm(w, f"{prefix}post_attention_layernorm", z)
        gate = F.silu(normed @ w[f"{prefix}mlp.gate_proj.weight"].T)
        z = z + (gate * (normed @ w[f"{prefix}mlp.up_proj.weight"].T)) @ (
            w[f"{prefix}mlp.down_proj.weight"].T
        )
    return weighted_norm(w, "resampler.norm", z)


def resize(features: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """Trilinear, corners not aligned, one axis after the other."""
    for axis, size in enumerate(grid):
        old = features.shape[axis]
        place = ((torch.arange(size) + 0.5) * old / size - 0.5).clamp(0, old - 1)
        low = place.floor().long()
        high = (low + 1).clamp(max=old - 1)
        part = (place - low).reshape([-1 if a == axis else 1 for a in range(4)])
        low_values, high_values = (
            features.index_select(axis, low),
            features.index_select(axis, high),
        )
        features = low_values * (1 - part) + high_values * part
    return features


def encode(folder: Path, clips: dict[str, torch.Tensor]) -> torch.Tensor:
    """Normalised clips (B, T, 3, S, S) for each encoder, to visual tokens (B, R, H)."""
    order = json.loads((folder / "vision_tower" / "config.json").read_text())["vision_towers"]
    skip = -1 - json.loads((folder / "config.json").read_text())["mm_vision_select_layer"]
    parts = {name: read(folder / "vision_tower" / name) for name in order}
    configs = {
        name: json.loads((folder / "vision_tower" / name / "config.json").read_text())
        for name in order
    }
    bridge = read(folder / "mm_connector")
    heads = json.loads((folder / "mm_connector" / "config.json").read_text())["resampler_n_heads"]
    tokens = []
    for number in range(len(next(iter(clips.values())))):
        grids = {}
        for name in order:
            clip, config = clips[name][number], configs[name]
            if "siglip" in name:
                w = parts[name]
                frames = [siglip(w, f, config["num_attention_heads"], skip) for f in clip]
                grids[name] = torch.stack(frames)
            else:
                tanh = config.get("use_fused_mlp", False)
                grids[name] = internvideo2(parts[name], clip, config["num_heads"], skip, tanh)
        time = min(grid.shape[0] for grid in grids.values())
        for name, features in grids.items():
            grids[name] = features[:: features.shape[0] // time] if "siglip" in name else features
        common = tuple(max(grid.shape[axis] for grid in grids.values()) for axis in range(3))
        fused = torch.cat([resize(grids[name], common) for name in order], -1)  # pyright: ignore[reportArgumentType]
        tokens.append(connector(bridge, fused.flatten(0, 2), heads))
    return torch.stack(tokens)


def llm_logits(folder: Path, x: torch.Tensor) -> torch.Tensor:
    """Embeddings (L, H) to the logits of all positions (L, K)."""
    w = read(folder / "llm")
    config = json.loads((folder / "llm" / "config.json").read_text())
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    width = x.shape[-1] // heads
    angles = torch.arange(len(x))[:, None] / config["rope_theta"] ** (
        torch.arange(0, width, 2) / width
    )
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turn(values: torch.Tensor, count: int) -> torch.Tensor:
        out = []
        for head in values.split(width, -1):
            a, b = head.chunk(2, -1)
            out.append(head * cos + torch.cat((-b, a), -1) * sin)
        assert len(out) == count
        return torch.cat(out, -1)

    for layer in range(config["num_hidden_layers"]):
        b = {k.removeprefix(f"model.layers.{layer}."): v for k, v in w.items()}
        normed = rms(x, b["input_layernorm.weight"])
        q, k, v = (
            normed @ b[f"self_attn.{n}_proj.weight"].T + b[f"self_attn.{n}_proj.bias"]
            for n in "qkv"
        )
        q, k = turn(q, heads), turn(k, keys)
        mixed = []
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            other = head // (heads // keys)
            kept = slice(other * width, (other + 1) * width)
            scores = q[:, own] @ k[:, kept].T / width**0.5
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
            mixed.append(scores.softmax(-1) @ v[:, kept])
        x = x + torch.cat(mixed, -1) @ b["self_attn.o_proj.weight"].T
        normed = rms(x, b["post_attention_layernorm.weight"])
        gate = F.silu(normed @ b["mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ b["mlp.up_proj.weight"].T)) @ b["mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms(x, w["model.norm.weight"]) @ head.T
