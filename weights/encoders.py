"""Vision encoders from their configs and tensors: shape, depth and pixels; without torch."""

from __future__ import annotations

from typing import Any

from apollo_cli.model.config import EncoderConfig, InternVideo2Shape, SiglipShape
from apollo_cli.values import Check, Values, flag, list_of, nothing_or, number, one_of, whole
from apollo_cli.video.transforms import PixelSpec
from apollo_cli.weights.checkpoint import Checkpoint, TensorInfo, encoder_part

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
DEFAULT_FRAMES_PER_CLIP = 4
# The original code has the depth of its one InternVideo2 (1B) in the code and not in a config.
_KNOWN_DEPTHS = {1408: 40}
_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "gelu_new", "quick_gelu", "relu", "silu")
_HEADS, _LARGEST_SIDE = whole(1, 65536), 4096
# The tensors that tell the shape, and how many dimensions each has.
_INTERNVIDEO2 = {"patch_embed.proj.weight": 5, "pos_embed": 3, "blocks.0.mlp.fc1.weight": 2}
_SIGLIP_LAYERS = "vision_model.encoder.layers."
_SIGLIP = {
    "vision_model.embeddings.patch_embedding.weight": 4,
    "vision_model.embeddings.position_embedding.weight": 2,
    f"{_SIGLIP_LAYERS}0.mlp.fc1.weight": 2,
}

Tensors = dict[str, TensorInfo]


def internvideo2_encoder(name: str, shape: InternVideo2Shape) -> EncoderConfig:
    """An InternVideo2 encoder of a shape; its pixels are made as the original code makes them."""
    pixels = _pixels(name, shape.image_size, "bilinear", IMAGENET_MEAN, IMAGENET_STD)
    return EncoderConfig(name, shape, pixels)


def siglip_encoder(
    name: str,
    shape: SiglipShape,
    mean: tuple[float, ...] = HALF,
    std: tuple[float, ...] = HALF,
) -> EncoderConfig:
    """A SigLIP encoder of a shape; mean and std are of red, green and blue."""
    return EncoderConfig(name, shape, _pixels(name, shape.image_size, "bicubic", mean, std))


def _pixels(
    name: str, size: int, resize: Any, mean: tuple[float, ...], std: tuple[float, ...]
) -> PixelSpec:
    red, green, blue = (int(value * 255) for value in mean)
    return PixelSpec(name, size, resize, (red, green, blue), mean, std)  # pyright: ignore[reportArgumentType]


def count_layers(tensors: Tensors, prefix: str) -> int:
    """Number of layers in a file, from the highest number behind a prefix."""
    found = (key.removeprefix(prefix).split(".")[0] for key in tensors if key.startswith(prefix))
    return max((int(n) + 1 for n in found if n.isascii() and n.isdigit() and len(n) < 6), default=0)


def shapes_of(
    tensors: Tensors, wanted: dict[str, int], where: str, faults: list[str]
) -> list[tuple[int, ...]] | None:
    """The shapes of tensors with so many dimensions each; None when one is missing or has others.

    Args:
        wanted: number of dimensions by name. where: the part, for a message.
        faults: what is missing or wrong is added.
    """
    before = len(faults)
    for key, dims in wanted.items():
        shape = tensors[key].shape if key in tensors else None
        if shape is None:
            faults.append(f"{where} lacks the tensor {key}")
        elif len(shape) != dims or not all(shape):
            faults.append(f"{where}: {key} is {list(shape)}, needed are {dims} dimensions")
    return [tensors[key].shape for key in wanted] if len(faults) == before else None


def agree(config: Values, key: str, found: Any, check: Check | None = None) -> Any:
    """Check that a value of a config is what the tensors say, where it is there and not null.

    Args:
        found: what the tensors say; None when they cannot tell, so that the config has to.
    """
    check = check or whole(1)
    if found is None:
        return config.get(key, check)
    value = config.get(key, nothing_or(check), found)
    if value not in (None, found):
        config.refuse(key, f"is {value}, and the tensors say {found}")
    return found


class EncoderReader:
    """Reads the encoders of one checkpoint.

    Args:
        checkpoint: as found. select: the selected layer, below zero. frames: of a clip.
        faults: what is missing, wrong or not supported is added. notes: what was assumed.
    """

    def __init__(
        self, checkpoint: Checkpoint, select: int, frames: int, faults: list[str], notes: list[str]
    ) -> None:
        self.checkpoint, self.select, self.frames = checkpoint, select, frames
        self.faults, self.notes = faults, notes

    def read(self, name: str) -> EncoderConfig | None:
        """One encoder, known by its name as the original knows it; None is a fault."""
        kinds = {"internvideo": self._internvideo2, "siglip": self._siglip}
        read = next((reader for kind, reader in kinds.items() if kind in name.lower()), None)
        if read is None:
            self.faults.append(
                f"vision encoder {name!r} is unknown (supported are names that contain internvideo "
                "or siglip)"
            )
            return None
        where, before = encoder_part(name), len(self.faults)
        config = Values(self.checkpoint.encoder_configs[name], f"{where}/config.json", self.faults)
        file = f"{where}/preprocessor_config.json"
        pixels = Values(self.checkpoint.preprocessor_configs.get(name, {}), file, self.faults)
        found = read(name, self.checkpoint.tensors[where], config, pixels)
        return found if len(self.faults) == before else None

    def _depth(self, config: Values, key: str, declared: int | None, held: int) -> int:
        """Layers to run: all up to the selected one; the ones behind it may be left out."""
        total = held if declared is None else declared
        run = total + 1 + self.select
        if run < 1:
            config.refuse(key, f"is {total}, too few for the selected layer {self.select}")
        elif held > total or held < run:
            config.refuse(
                key,
                f"is {total}, and the tensors have {held} layers (with the selected layer "
                f"{self.select}, {run} to {total} of them are needed)",
            )
        return run

    def _internvideo2(
        self, name: str, tensors: Tensors, config: Values, pixels: Values
    ) -> EncoderConfig | None:
        where = encoder_part(name)
        shapes = shapes_of(tensors, _INTERNVIDEO2, where, self.faults)
        heads = config.get("num_heads", _HEADS)
        if shapes is None or heads is None:
            return None
        (width, _, tubelet, patch, _), (_, positions, _), (mlp_width, _) = shapes
        tokens, times = positions - 1, max(1, self.frames // tubelet)
        side = round((tokens / times) ** 0.5)
        if self.frames % tubelet or side * side * times != tokens or not side:
            self.faults.append(
                f"{where}: {tokens} positions do not fit clips of {self.frames} frames "
                f"(tubelet {tubelet}) on a square grid"
            )
        for key, found in {
            "d_model": width,
            "patch_size": patch,
            "tubelet_size": tubelet,
            "img_size": side * patch,
            "num_frames": self.frames,
        }.items():
            agree(config, key, found)
        held = count_layers(tensors, "blocks.")
        declared = config.get("depth", nothing_or(whole(1, 1000)), None) or _KNOWN_DEPTHS.get(width)
        if declared is None and self.select < -1:
            self.notes.append(f"{config.where} has no depth: its file is taken to hold all {held}")
        _check_heads(config, "num_heads", heads, width)
        size = _square(side * patch)
        # The original has these values in its code: a file that says something else is refused.
        for part, checks in {
            "Resize": {"size": size, "interpolation": one_of("bilinear")},
            "CenterCrop": {"size": size},
            "ClipToTensor": {"div_255": one_of(True)},
            "Normalize": {"mean": _exactly(IMAGENET_MEAN), "std": _exactly(IMAGENET_STD)},
        }.items():
            pixels.inside(part).read(checks)
        shape = InternVideo2Shape(
            width=width,
            heads=heads,
            mlp_width=mlp_width,
            depth=self._depth(config, "depth", declared, held),
            image_size=side * patch,
            patch_size=patch,
            frames=self.frames,
            tubelet=tubelet,
            tanh_gelu=_is_fused(config),
        )
        return internvideo2_encoder(name, shape)

    def _siglip(
        self, name: str, tensors: Tensors, config: Values, pixels: Values
    ) -> EncoderConfig | None:
        shapes = shapes_of(tensors, _SIGLIP, encoder_part(name), self.faults)
        size = config.get("image_size", whole(1, _LARGEST_SIDE))
        heads = config.get("num_attention_heads", _HEADS)
        declared = config.get("num_hidden_layers", whole(1, 1000))
        config.get("model_type", one_of("siglip_vision_model", "siglip"), None)
        if shapes is None or not (size and heads and declared):
            return None
        (width, _, patch, _), (positions, _), (mlp_width, _) = shapes
        sizes = {"hidden_size": width, "patch_size": patch, "intermediate_size": mlp_width}
        for key, found in {**sizes, "num_channels": 3}.items():
            agree(config, key, found)
        side = size // patch
        if side * side != positions:
            told = f"is {size}: {side} x {side} patches, and the tensors have {positions}"
            config.refuse("image_size", told)
        _check_heads(config, "num_attention_heads", heads, width)
        shape = SiglipShape(
            width=width,
            heads=heads,
            mlp_width=mlp_width,
            depth=self._depth(
                config, "num_hidden_layers", declared, count_layers(tensors, _SIGLIP_LAYERS)
            ),
            image_size=size,
            patch_size=patch,
            hidden_act=config.get("hidden_act", one_of(*_ACTIVATIONS), _ACTIVATIONS[0]),
            layer_norm_eps=config.get("layer_norm_eps", number(0, 1, above=True), 1e-6),
        )
        told = pixels.read(
            {
                **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), one_of(True)),
                **dict.fromkeys(("do_center_crop", "do_pad"), nothing_or(one_of(False))),
                # Pillow's number for bicubic.
                "resample": one_of(3),
                "rescale_factor": number((1 - 1e-6) / 255, (1 + 1e-6) / 255),
                "size": _square(size),
                "image_mean": list_of(number(0, 1), count=3),
                "image_std": list_of(number(0, 1000, above=True), count=3),
            }
        )
        return siglip_encoder(name, shape, told["image_mean"] or HALF, told["image_std"] or HALF)


def _check_heads(config: Values, key: str, heads: int, width: int) -> None:
    if width % heads:
        config.refuse(key, f"is {heads}, which does not divide the width {width}")


def _is_fused(config: Values) -> bool:
    """Whether the fused kernels of the original made these weights; it takes all or none."""
    keys = [k for k in ("use_fused_mlp", "use_flash_attn", "use_fused_rmsnorm") if k in config]
    found = [config.get(key, flag) for key in keys]
    if len(set(found)) > 1:
        config.refuse(keys[0], f"is {found[0]}, and {' and '.join(keys[1:])} must be the same")
    return bool(found and found[0])


def _exactly(wanted: tuple[float, ...]) -> Check:
    """A list of these numbers."""

    def check(value: Any) -> Any:
        if list_of(number(0, 1), count=len(wanted))(value) != wanted:
            raise ValueError(f"allowed is {list(wanted)}")
        return wanted

    return check


def _square(size: int) -> Check:
    """Any way to write a square of this side: a number, a list of two, an object of sides."""

    def check(value: Any) -> Any:
        sides = [value]
        if isinstance(value, dict):
            sides = [v for k, v in value.items() if k in ("height", "width", "shortest_edge")]
        elif isinstance(value, list):
            sides = value
        if not sides or any(type(side) is not int or side != size for side in sides):
            raise ValueError(f"allowed is {size}, as the tensors are made for")
        return value

    return check
