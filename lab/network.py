"""apollo-nano: the released architecture in miniature, and its files in the released layout.

The shape is written once, here; the files are read back by the same loader as the released ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.config import (
    ConnectorConfig,
    InternVideo2Shape,
    NetworkConfig,
    SiglipShape,
)
from apollo_cli.model.encoders import InternVideo2
from apollo_cli.weights.encoders import internvideo2_encoder, siglip_encoder
from lab.tokenizer import build_tokenizer, end_token_id

VIDEO_NAME, IMAGE_NAME = "internvideo2-nano", "siglip-nano"
IMAGE_SIZE, PATCH, FRAMES, CLIP_SECONDS = 64, 8, 4, 2
GRID = (1, IMAGE_SIZE // PATCH, IMAGE_SIZE // PATCH)
VISION_WIDTH, VISION_LAYERS, VISION_MLP, VISION_HEADS = 96, 4, 288, 4
TEXT_WIDTH, TEXT_LAYERS, TEXT_MLP, TEXT_HEADS = 128, 5, 352, 4
TOKENS_PER_CLIP, RESAMPLER_DEPTH, RESAMPLER_HEADS, CONTEXT = 8, 2, 4, 1024
# Words and visual tokens enter the language model equally loud: louder ones drown what early
# layers write next to them, such as the time of a clip.
WORD_RMS = 0.15


def siglip_config() -> dict[str, Any]:
    """The image encoder's config.json."""
    return {
        "model_type": "siglip_vision_model",
        "architectures": ["SiglipVisionModel"],
        "hidden_size": VISION_WIDTH,
        "intermediate_size": VISION_MLP,
        "num_hidden_layers": VISION_LAYERS,
        "num_attention_heads": VISION_HEADS,
        "num_channels": 3,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
    }


def internvideo2_config() -> dict[str, Any]:
    """The video encoder's config.json: one tubelet spans the whole clip."""
    return {
        "model_type": "internvideo2",
        "architectures": ["PretrainInternVideo2"],
        "d_model": VISION_WIDTH,
        "num_heads": VISION_HEADS,
        "depth": VISION_LAYERS,
        "img_size": IMAGE_SIZE,
        "patch_size": PATCH,
        "num_frames": FRAMES,
        "tubelet_size": FRAMES,
        "use_flash_attn": False,
        "use_fused_mlp": False,
        "use_fused_rmsnorm": False,
    }


_SHAPE: dict[str, Any] = {
    "width": VISION_WIDTH,
    "heads": VISION_HEADS,
    "mlp_width": VISION_MLP,
    "depth": VISION_LAYERS,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH,
}
ENCODERS = (
    internvideo2_encoder(
        VIDEO_NAME,
        InternVideo2Shape(**_SHAPE, frames=FRAMES, tubelet=FRAMES),
    ),
    siglip_encoder(IMAGE_NAME, SiglipShape(**_SHAPE)),
)
PIXELS = tuple(encoder.pixels for encoder in ENCODERS)


def connector_config() -> dict[str, Any]:
    """The connector's config.json."""
    return {
        "model_type": "mm_connector",
        "architectures": ["Connector"],
        "vision_hidden_size": 2 * VISION_WIDTH,
        "text_hidden_size": TEXT_WIDTH,
        "token_input_shape": list(GRID),
        "projector_type": "mlp2x_gelu",
        "resampler_type": "perciver",
        "resampler_depth": RESAMPLER_DEPTH,
        "resampler_n_heads": RESAMPLER_HEADS,
        "resampler_head_dim": TEXT_WIDTH // RESAMPLER_HEADS,
        "num_key_value_heads": RESAMPLER_HEADS,
        "num_output_tokens": TOKENS_PER_CLIP,
        "ff_multi": 2,
        "hidden_act": "silu",
    }


def llm_config(vocabulary: int, end_id: int) -> dict[str, Any]:
    """The language model's config.json."""
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": TEXT_MLP,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": TEXT_HEADS,
        "num_key_value_heads": TEXT_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "model_max_length": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
    }


def network_config(vocabulary: int, end_id: int) -> NetworkConfig:
    """The shape of the network, as the loader would read it from the files."""
    connector = ConnectorConfig(
        vision_width=2 * VISION_WIDTH,
        text_width=TEXT_WIDTH,
        projector="mlp2x_gelu",
        resampler="perciver",
        tokens_per_clip=TOKENS_PER_CLIP,
        grid=GRID,
        depth=RESAMPLER_DEPTH,
        heads=RESAMPLER_HEADS,
        head_width=TEXT_WIDTH // RESAMPLER_HEADS,
        key_heads=RESAMPLER_HEADS,
        ff_multi=2,
    )
    return NetworkConfig(
        clip_seconds=CLIP_SECONDS,
        frames_per_clip=FRAMES,
        encoders=ENCODERS,
        connector=connector,
        llm=llm_config(vocabulary, end_id),
        context=CONTEXT,
        template="qwen_2",
        eos_ids=(end_id,),
        generation={},
    )


def build_nano(seed: int) -> ApolloModel:
    """Build the network with random weights."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    end_id = end_token_id(tokenizer)
    model = ApolloModel(network_config(tokenizer.get_vocab_size(), end_id))
    for module in model.encoders.modules():
        if isinstance(module, InternVideo2):
            nn.init.normal_(module.pos_embed, std=0.02)
            nn.init.normal_(module.cls_token, std=0.02)
            for name, parameter in module.named_parameters():
                # The tiny start of the original is for towers of forty blocks.
                if name.endswith("gamma"):
                    nn.init.ones_(parameter)
    llm, connector = dict(model.llm.named_parameters()), dict(model.connector.named_parameters())
    nn.init.normal_(llm["model.embed_tokens.weight"], std=WORD_RMS)
    nn.init.constant_(connector["resampler.norm.wheight"], WORD_RMS)
    return model


def tower_config() -> dict[str, Any]:
    """The vision tower's config.json: both encoders, in the order of concatenation."""
    return {
        "model_type": "hybrid_vision_tower",
        "vision_towers": [VIDEO_NAME, IMAGE_NAME],
        "num_vision_encoders": 2,
        "token_output_shape": list(GRID),
        "configs": {},
    }


def root_config(llm: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The root config.json."""
    return {
        "model_type": "apollo",
        "architectures": ["ApolloForCausalLM"],
        "apollo_template": "qwen_2",
        "clip_duration": CLIP_SECONDS,
        "frames_per_clip": FRAMES,
        "encode_batch_size": 16,
        "model_max_length": CONTEXT,
        "mm_vision_select_layer": -1,
        "mm_vision_select_feature": "patch",
        "use_mm_start_end": False,
        "model_dtype": str(dtype),
        "vocab_size": llm["vocab_size"],
        "hidden_size": TEXT_WIDTH,
        "llm_cfg": llm,
        "vision_tower_cfg": tower_config(),
        "mm_connector_cfg": connector_config(),
    }


def save_nano(model: ApolloModel, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write the network in the released layout, tokenizer included."""
    tokenizer = build_tokenizer()
    end_id = end_token_id(tokenizer)
    llm = llm_config(tokenizer.get_vocab_size(), end_id)
    generation = {"eos_token_id": [end_id], "pad_token_id": end_id, "do_sample": False}
    preprocessor = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "resample": 3,
        "image_mean": list(PIXELS[1].mean),
        "image_std": list(PIXELS[1].std),
    }
    files = {
        "config.json": root_config(llm, dtype),
        "vision_tower/config.json": tower_config(),
        f"vision_tower/{VIDEO_NAME}/config.json": internvideo2_config(),
        f"vision_tower/{IMAGE_NAME}/config.json": siglip_config(),
        f"vision_tower/{IMAGE_NAME}/preprocessor_config.json": preprocessor,
        "mm_connector/config.json": connector_config(),
        "llm/config.json": llm,
        "llm/generation_config.json": generation,
        "llm/tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    (folder / "llm/tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", "utf-8")
    parts = {
        f"vision_tower/{VIDEO_NAME}": model.encoders[0],
        f"vision_tower/{IMAGE_NAME}": model.encoders[1],
        "mm_connector": model.connector,
        "llm": model.llm,
    }
    for name, module in parts.items():
        tensors = {
            key: value.detach().to(dtype).contiguous() for key, value in module.named_parameters()
        }
        path = folder / name / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)
