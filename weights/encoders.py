"""Vision encoders from their configs and tensors: shape, depth and pixels; without torch."""

from __future__ import annotations

from typing import Any

from apollo_cli.model.config import EncoderConfig, InternVideo2Config
from apollo_cli.values import Values, flag, list_of, nothing_or, number, one_of, whole
from apollo_cli.video.transforms import PixelSpec
from apollo_cli.weights.checkpoint import Checkpoint, TensorInfo, encoder_part

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
DEFAULT_FRAMES_PER_CLIP = 4
# The original code has the depth of its one InternVideo2 (1B) in the code and not in a config.
_KNOWN_DEPTHS = {1408: 40}
_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "gelu_new", "quick_gelu", "relu", "silu")
_LARGEST_SIDE = 4096

Tensors = dict[str, TensorInfo]


def count_layers(tensors: Tensors, prefix: str) -> int:
    """Number of layers in a file, from the highest number behind a prefix."""
    found = (key.removeprefix(prefix).split(".")[0] for key in tensors if key.startswith(prefix))
    return max((int(n) + 1 for n in found if n.isascii() and n.isdigit() and len(n) < 6), default=0)


def shape_of(
    tensors: Tensors, key: str, dims: int, where: str, faults: list[str]
) -> tuple[int, ...] | None:
    """The shape of a tensor with so many dimensions; None is a fault."""
    if key not in tensors:
        faults.append(f"{where} lacks the tensor {key}")
        return None
    shape = tensors[key].shape
    if len(shape) == dims and all(shape):
        return shape
    faults.append(f"{where}: {key} is {list(shape)}, needed are {dims} dimensions")
    return None


def agree(config: Values, key: str, found: Any, read: Any = None) -> None:
    """Check that a value of a config, where it is there and not null, is what the tensors say."""
    value = config.get(key, nothing_or(read or whole(1)), found)
    if value is not None and value != found:
        config.refuse(key, f"is {value}, and the tensors say {found}")


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
        lowered = name.lower()
        if "internvideo" in lowered:
            return self._internvideo2(name)
        if "siglip" in lowered:
            return self._siglip(name)
        self.faults.append(
            f"vision encoder {name!r} is unknown (supported are names that contain internvideo "
            "or siglip)"
        )
        return None

    def _parts(self, name: str) -> tuple[str, Tensors, Values, Values]:
        where = encoder_part(name)
        config = Values(self.checkpoint.encoder_configs[name], f"{where}/config.json", self.faults)
        pixels = self.checkpoint.preprocessor_configs.get(name, {})
        file = f"{where}/preprocessor_config.json"
        return where, self.checkpoint.tensors[where], config, Values(pixels, file, self.faults)

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

    def _internvideo2(self, name: str) -> EncoderConfig | None:
        where, tensors, config, pixels = self._parts(name)
        before = len(self.faults)
        kernel = shape_of(tensors, "patch_embed.proj.weight", 5, where, self.faults)
        positions = shape_of(tensors, "pos_embed", 3, where, self.faults)
        mlp = shape_of(tensors, "blocks.0.mlp.fc1.weight", 2, where, self.faults)
        heads = config.get("num_heads", whole(1, 65536))
        held = count_layers(tensors, "blocks.")
        if not (kernel and positions and mlp and heads):
            return None
        width, _, tubelet, patch, _ = kernel
        tokens, times = positions[1] - 1, max(1, self.frames // tubelet)
        side = round((tokens / times) ** 0.5)
        if self.frames % tubelet or side * side * times != tokens or not side:
            self.faults.append(
                f"{where}: {tokens} positions do not fit clips of {self.frames} frames "
                f"(tubelet {tubelet}) on a square grid"
            )
        sizes = {"d_model": width, "patch_size": patch, "tubelet_size": tubelet}
        sizes |= {"img_size": side * patch, "num_frames": self.frames}
        for key, found in sizes.items():
            agree(config, key, found)
        declared = config.get("depth", nothing_or(whole(1, 1000)), None) or _KNOWN_DEPTHS.get(width)
        if declared is None and self.select < -1:
            self.notes.append(f"{config.where} has no depth: its file is taken to hold all {held}")
        shape = InternVideo2Config(
            width=width,
            heads=heads,
            mlp_width=mlp[0],
            depth=self._depth(config, "depth", declared, held),
            image_size=side * patch,
            patch_size=patch,
            frames=self.frames,
            tubelet=tubelet,
            tanh_gelu=self._is_fused(config),
        )
        if width % heads:
            config.refuse("num_heads", f"is {heads}, which does not divide the width {width}")
        self._check_transforms(pixels, shape.image_size)
        if len(self.faults) > before:
            return None
        red, green, blue = (int(mean * 255) for mean in IMAGENET_MEAN)
        spec = PixelSpec(
            name, shape.image_size, "bilinear", (red, green, blue), IMAGENET_MEAN, IMAGENET_STD
        )
        return EncoderConfig(name, "internvideo2", width, shape.grid, spec, internvideo2=shape)

    def _is_fused(self, config: Values) -> bool:
        """Whether the fused kernels of the original made these weights; it takes all or none."""
        keys = [k for k in ("use_fused_mlp", "use_flash_attn", "use_fused_rmsnorm") if k in config]
        found = [config.get(key, flag) for key in keys]
        if len(set(found)) > 1:
            config.refuse(keys[0], f"is {found[0]}, and {' and '.join(keys[1:])} must be the same")
        return bool(found and found[0])

    def _check_transforms(self, pixels: Values, size: int) -> None:
        """The original has these values in its code: a file that says something else is refused."""
        resize, crop = pixels.inside("Resize"), pixels.inside("CenterCrop")
        square = _square(size)
        resize.get("size", square, None)
        resize.get("interpolation", one_of("bilinear"), None)
        crop.get("size", square, None)
        pixels.inside("ClipToTensor").get("div_255", one_of(True), None)
        normal = pixels.inside("Normalize")
        for key, wanted in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
            found = normal.get(key, list_of(number(0, 1), count=3), wanted)
            if found is not None and found != wanted:
                normal.refuse(key, f"is {list(found)}; read is {list(wanted)}")

    def _siglip(self, name: str) -> EncoderConfig | None:
        where, tensors, config, preprocessor = self._parts(name)
        before, prefix = len(self.faults), "vision_model.encoder.layers."
        embeddings = "vision_model.embeddings."
        faults = self.faults
        kernel = shape_of(tensors, f"{embeddings}patch_embedding.weight", 4, where, faults)
        positions = shape_of(tensors, f"{embeddings}position_embedding.weight", 2, where, faults)
        mlp = shape_of(tensors, f"{prefix}0.mlp.fc1.weight", 2, where, faults)
        size = config.get("image_size", whole(1, _LARGEST_SIDE))
        heads = config.get("num_attention_heads", whole(1, 65536))
        declared = config.get("num_hidden_layers", whole(1, 1000))
        config.get("model_type", one_of("siglip_vision_model", "siglip"), None)
        if not (kernel and positions and mlp and size and heads and declared):
            return None
        width, _, patch, _ = kernel
        side = size // patch
        for key, found in (
            ("hidden_size", width),
            ("patch_size", patch),
            ("intermediate_size", mlp[0]),
            ("num_channels", 3),
        ):
            agree(config, key, found)
        if side * side != positions[0]:
            config.refuse(
                "image_size",
                f"is {size}: {side} x {side} patches, and the tensors have {positions[0]}",
            )
        if width % heads:
            config.refuse(
                "num_attention_heads", f"is {heads}, which does not divide the width {width}"
            )
        ours = {
            "hidden_size": width,
            "patch_size": patch,
            "intermediate_size": mlp[0],
            "image_size": size,
            "num_attention_heads": heads,
            "hidden_act": config.get("hidden_act", one_of(*_ACTIVATIONS), _ACTIVATIONS[0]),
            "layer_norm_eps": config.get("layer_norm_eps", number(0, 1, above=True), 1e-6),
        }
        held = count_layers(tensors, prefix)
        depth = self._depth(config, "num_hidden_layers", declared, held)
        spec = self._siglip_pixels(name, size, preprocessor)
        if len(self.faults) > before:
            return None
        return EncoderConfig(name, "siglip", width, (1, side, side), spec, siglip=(ours, depth))

    def _siglip_pixels(self, name: str, size: int, pixels: Values) -> PixelSpec:
        for key in ("do_resize", "do_rescale", "do_normalize"):
            pixels.get(key, one_of(True), None)
        # Pillow's number for bicubic.
        pixels.get("resample", one_of(3), None)
        scale = pixels.get("rescale_factor", number(0, 1), 1 / 255)
        if scale is not None and abs(scale * 255 - 1) > 1e-6:
            pixels.refuse("rescale_factor", f"is {scale}; read is 1/255")
        pixels.get("size", _square(size), None)
        for key in ("do_center_crop", "do_pad"):
            pixels.get(key, nothing_or(one_of(False)), None)
        mean = pixels.get("image_mean", list_of(number(0, 1), count=3), HALF)
        std = pixels.get("image_std", list_of(number(0, 1000, above=True), count=3), HALF)
        red, green, blue = (int(value * 255) for value in mean or HALF)
        return PixelSpec(name, size, "bicubic", (red, green, blue), mean or HALF, std or HALF)


def _square(size: int) -> Any:
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
