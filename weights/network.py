"""From the plain data of a checkpoint to the shape of the network, without torch.

What a config lacks is read off the tensor shapes where they can tell; what they cannot tell
(heads, clip length, order of the encoders) is asked for by name, never guessed.
"""

from __future__ import annotations

from typing import Any

from apollo_cli.errors import WeightsError
from apollo_cli.model.config import (
    ConnectorConfig,
    EncoderConfig,
    InternVideo2Config,
    NetworkConfig,
    common_grid,
)
from apollo_cli.model.prompt import TEMPLATES
from apollo_cli.video.transforms import PixelSpec
from apollo_cli.weights.checkpoint import Checkpoint, TensorInfo, encoder_part

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEFAULT_SELECT_LAYER = -2
DEFAULT_CONTEXT = 32768
DEFAULT_FRAMES_PER_CLIP = 4

Tensors = dict[str, TensorInfo]


def build_network_config(checkpoint: Checkpoint) -> NetworkConfig:
    """Work out the network of a checkpoint.

    Raises:
        WeightsError: values are missing or unsupported; all of them are listed.
    """
    reader = _Reader(checkpoint)
    config = reader.read()
    if reader.faults:
        raise WeightsError(
            f"checkpoint {checkpoint.root}: {'; '.join(reader.faults)}",
            next_step="complete the named config files",
        )
    assert config is not None
    return config


class _Reader:
    """Reads one checkpoint and collects faults instead of stopping at the first."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.faults: list[str] = []

    def read(self) -> NetworkConfig | None:
        root = self.checkpoint.config
        clip_seconds = self._number(root, "clip_duration", "config.json")
        frames = int(root.get("frames_per_clip") or DEFAULT_FRAMES_PER_CLIP)
        encoders = [self._encoder(name, frames) for name in self.checkpoint.encoder_names]
        known = [encoder for encoder in encoders if encoder is not None]
        connector = self._connector(known) if len(known) == len(encoders) else None
        template = root.get("apollo_template", "qwen_2")
        if template not in TEMPLATES:
            self.faults.append(f"config.json: apollo_template {template!r} is unknown")
        if self.faults or connector is None:
            return None
        return NetworkConfig(
            clip_seconds=clip_seconds,
            frames_per_clip=frames,
            encoders=tuple(known),
            connector=connector,
            llm=self._llm(),
            context=self._context(),
            template=template,
            eos_ids=self._eos_ids(),
            generation=self.checkpoint.generation_config,
        )

    def _number(self, config: dict[str, Any], key: str, where: str) -> Any:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            told = "is missing" if value is None else f"is {value!r}, not a number above 0"
            self.faults.append(f"{where}: {key} {told}")
            return 1
        return value

    def _shape(self, tensors: Tensors, key: str, where: str) -> tuple[int, ...]:
        if key in tensors:
            return tensors[key].shape
        self.faults.append(f"{where} lacks the tensor {key}")
        return (1, 1, 1, 1, 1)

    def _llm(self) -> dict[str, Any]:
        ours = dict(self.checkpoint.llm_config)
        # Paths of the training machine, and keys that name classes: never ours to follow.
        for key in (
            "_name_or_path",
            "auto_map",
            "architectures",
            "torch_dtype",
            "dtype",
            "quantization_config",
        ):
            ours.pop(key, None)
        ours["tie_word_embeddings"] = self.checkpoint.tied_head
        return ours

    def _context(self) -> int:
        for config in (self.checkpoint.config, self.checkpoint.llm_config):
            value = config.get("model_max_length")
            if isinstance(value, int) and value > 0:
                return value
        return DEFAULT_CONTEXT

    def _eos_ids(self) -> tuple[int, ...]:
        eos = self.checkpoint.generation_config.get("eos_token_id")
        eos = self.checkpoint.llm_config.get("eos_token_id") if eos is None else eos
        found = eos if isinstance(eos, list) else [eos]
        return tuple(int(token) for token in found if isinstance(token, int))

    def _select_layer(self) -> int:
        value = self.checkpoint.config.get("mm_vision_select_layer", DEFAULT_SELECT_LAYER)
        if isinstance(value, int) and value < 0:
            return value
        self.faults.append(f"config.json: mm_vision_select_layer is {value!r}, not below 0")
        return DEFAULT_SELECT_LAYER

    def _depth(self, tensors: Tensors, prefix: str, where: str) -> int:
        """Layers to run: all up to the selected one; the ones behind it are not even read."""
        numbers = [
            int(key.removeprefix(prefix).split(".")[0]) for key in tensors if key.startswith(prefix)
        ]
        depth = max(numbers, default=-1) + 2 + self._select_layer()
        if depth < 1:
            self.faults.append(f"{where} has too few layers for the selected layer")
        return depth

    def _encoder(self, name: str, frames: int) -> EncoderConfig | None:
        lowered = name.lower()
        if "internvideo" in lowered:
            return self._internvideo2(name, frames)
        if "siglip" in lowered:
            return self._siglip(name)
        self.faults.append(
            f"vision encoder {name!r} is unknown (supported are names that contain internvideo "
            "or siglip)"
        )
        return None

    def _internvideo2(self, name: str, frames: int) -> EncoderConfig:
        where = encoder_part(name)
        tensors, config = self.checkpoint.tensors[where], self.checkpoint.encoder_configs[name]
        kernel = self._shape(tensors, "patch_embed.proj.weight", where)
        width, tubelet, patch = kernel[0], kernel[2], kernel[3]
        tokens = self._shape(tensors, "pos_embed", where)[1] - 1
        side = round((tokens / max(1, frames // tubelet)) ** 0.5)
        if frames % tubelet or side * side * (frames // tubelet) != tokens:
            self.faults.append(
                f"{where}: {tokens} positions do not fit clips of {frames} frames "
                f"(tubelet {tubelet}) on a square grid"
            )
        heads = self._number(config, "num_heads", f"{where}/config.json")
        shape = InternVideo2Config(
            width=width,
            heads=heads,
            mlp_width=self._shape(tensors, "blocks.0.mlp.fc1.weight", where)[0],
            depth=self._depth(tensors, "blocks.", where),
            image_size=int(config.get("img_size") or side * patch),
            patch_size=patch,
            frames=frames,
            tubelet=tubelet,
            tanh_gelu=bool(config.get("use_fused_mlp")),
        )
        if width % heads:
            self.faults.append(f"{where}: {heads} heads do not divide the width {width}")
        red, green, blue = (int(mean * 255) for mean in IMAGENET_MEAN)
        pad = (red, green, blue)
        pixels = PixelSpec(name, shape.image_size, "bilinear", pad, IMAGENET_MEAN, IMAGENET_STD)
        return EncoderConfig(name, "internvideo2", width, shape.grid, pixels, internvideo2=shape)

    def _siglip(self, name: str) -> EncoderConfig:
        where = encoder_part(name)
        tensors, config = self.checkpoint.tensors[where], self.checkpoint.encoder_configs[name]
        width, _, patch, _ = self._shape(
            tensors, "vision_model.embeddings.patch_embedding.weight", where
        )[:4]
        size = self._number(config, "image_size", f"{where}/config.json")
        self._number(config, "num_attention_heads", f"{where}/config.json")
        prefix = "vision_model.encoder.layers."
        depth = self._depth(tensors, prefix, where)
        mlp = self._shape(tensors, f"{prefix}0.mlp.fc1.weight", where)[0]
        ours = {**config, "hidden_size": width, "patch_size": patch, "intermediate_size": mlp}
        for key in ("_name_or_path", "auto_map", "architectures", "torch_dtype", "dtype"):
            ours.pop(key, None)
        pixels = self._siglip_pixels(name, size)
        side = size // patch
        return EncoderConfig(name, "siglip", width, (1, side, side), pixels, siglip=(ours, depth))

    def _siglip_pixels(self, name: str, size: int) -> PixelSpec:
        preprocessor = self.checkpoint.preprocessor_configs.get(name, {})
        mean = tuple(float(v) for v in preprocessor.get("image_mean") or (0.5, 0.5, 0.5))
        std = tuple(float(v) for v in preprocessor.get("image_std") or (0.5, 0.5, 0.5))
        pad = tuple(int(value * 255) for value in mean)
        return PixelSpec(name, size, "bicubic", pad, mean, std)  # pyright: ignore[reportArgumentType]

    def _connector(self, encoders: list[EncoderConfig]) -> ConnectorConfig:
        where = "mm_connector"
        tensors, config = self.checkpoint.tensors[where], self.checkpoint.connector_config
        self._refuse_other_projectors(tensors)
        text_width, vision_width = self._shape(tensors, "proj.0.weight", where)[:2]
        widths = sum(encoder.width for encoder in encoders)
        if not self.faults and widths != vision_width:
            self.faults.append(
                f"mm_connector takes {vision_width} channels, the encoders give {widths}"
            )
        resampler = config.get("resampler_type", "perciver")
        linears = sum(key.startswith("proj.") and key.endswith(".weight") for key in tensors)
        shape: dict[str, Any] = {
            "vision_width": vision_width,
            "text_width": text_width,
            "projector": "linear" if linears == 1 else f"mlp{linears}x_gelu",
            "resampler": resampler,
            "grid": common_grid(encoders),
            "integration": config.get("integration", "timestamps"),
        }
        if resampler == "perciver":
            shape |= self._perceiver(tensors, config, where)
        else:
            tokens = self._number(config, "num_output_tokens", f"{where}/config.json")
            shape["tokens_per_clip"] = tokens
        return ConnectorConfig(**shape)

    def _perceiver(self, tensors: Tensors, config: dict[str, Any], where: str) -> dict[str, Any]:
        layer = "resampler.layers.0."
        heads = self._number(config, "resampler_n_heads", f"{where}/config.json")
        query_rows = self._shape(tensors, f"{layer}self_attn.q_proj.weight", where)[0]
        key_rows = self._shape(tensors, f"{layer}self_attn.k_proj.weight", where)[0]
        gate_rows = self._shape(tensors, f"{layer}mlp.gate_proj.weight", where)[0]
        tokens, width = self._shape(tensors, "resampler.latents", where)[:2]
        head_width = query_rows // heads
        if head_width * heads != query_rows or key_rows % max(1, head_width):
            self.faults.append(f"{where}: {heads} heads do not divide {query_rows} query rows")
        prefix = "resampler.layers."
        depth = 1 + max(
            (int(k.removeprefix(prefix).split(".")[0]) for k in tensors if k.startswith(prefix)),
            default=0,
        )
        return {
            "tokens_per_clip": tokens,
            "depth": depth,
            "heads": heads,
            "head_width": head_width,
            "key_heads": key_rows // max(1, head_width),
            "ff_multi": gate_rows // width,
        }

    def _refuse_other_projectors(self, tensors: Tensors) -> None:
        for key, name in (
            ("proj.gate_proj.", "perceiver_mlp"),
            ("proj.layer1.", "conv2d"),
            ("proj.s1.", "stc"),
            ("proj.readout.", "stc"),
        ):
            if any(tensor.startswith(key) for tensor in tensors):
                self.faults.append(f"mm_connector has a {name} projector, which is not supported")
                return
