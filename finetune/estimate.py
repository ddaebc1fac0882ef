"""What training takes in memory, from shapes alone: computed, not measured.

Letters: H width of the language model, M its hidden width, Q and K widths of its queries and keys,
D width of an encoder, N tokens of a clip on the common grid, V encoder widths.
"""

from __future__ import annotations

from dataclasses import dataclass

from apollo_cli.config import ENCODE_BATCH
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.stages import Part
from apollo_cli.memory_plan import (
    CUDA_RUNTIME_BYTES,
    Run,
    host_runtime_bytes,
    weights_bytes,
)
from apollo_cli.model.config import EncoderConfig, NetworkConfig
from apollo_cli.model.sizes import (
    clip_bytes,
    connector_values,
    quantised_workspace,
)
from apollo_cli.weights.checkpoint import QuantKind

FLOAT32 = 4
# Bytes that the optimiser keeps of each trained value.
STATE_BYTES = {"adamw": 8, "adamw8bit": 2}
# Clips that go through at a time where encoders learn, or the connector alone.
ENCODER_CLIPS, CONNECTOR_CLIPS = 1, 4
# Positions whose logits exist at the same time: 0.6 GB for a vocabulary of 152,000 in float32.
LOGIT_ROWS = 1024
# Gradients of activations stand beside those of the layer that is gone through backwards.
_BACKWARD_SHARE = 1.5


@dataclass(frozen=True)
class SampleSize:
    """The size of a sample.

    Attributes:
        tokens: in all. trained: tokens that the loss looks at. clips: of its videos and images.
    """

    tokens: int
    trained: int
    clips: int


@dataclass(frozen=True)
class TrainingEstimate:
    """Bytes on the device while training.

    Attributes:
        weights: frozen ones in the dtype of the run or in 4 bit, trained ones in float32; without
            encoders and connector where these are set aside once all videos are watched.
        gradients, optimiser: of what is trained.
        activations: kept for the backward pass, at the dearest moment.
        logits: of the trained tokens. runtime: libraries and contexts.
        watching: all that is held while videos are watched ahead; 0 where none are.
    """

    weights: int
    gradients: int
    optimiser: int
    activations: int
    logits: int
    runtime: int
    watching: int = 0

    @property
    def peak(self) -> int:
        """The most that is held at one time."""
        kept = self.weights + self.gradients + self.optimiser + self.runtime
        return max(self.watching, kept + self.activations + self.logits)

    def describe(self) -> str:
        """The parts that matter, the largest first."""
        if self.watching == self.peak:
            return "while videos are watched ahead"
        held = {name: size for name, size in vars(self).items() if name != "watching"}
        parts = sorted(held.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts if size >= 5e7)


@dataclass(frozen=True)
class Training:
    """A recipe on one kind of device.

    Attributes:
        recipe: what is trained, and how. run: network, kind of device and dtype.
    """

    recipe: Recipe
    run: Run

    @property
    def config(self) -> NetworkConfig:
        """Shape of the network."""
        return self.run.config

    @property
    def quant(self) -> QuantKind | None:
        """In how many bits the frozen language model is held."""
        return "4bit" if self.recipe.method == "qlora" else None

    @property
    def low_rank(self) -> tuple[Part, ...]:
        """Parts that are trained through low-rank factors."""
        parts: list[Part] = []
        if "llm" in self.recipe.train and self.recipe.method != "full":
            parts.append("llm")
        if "encoders" in self.recipe.train and self.recipe.lora_encoders:
            parts.append("encoders")
        return tuple(parts)

    @property
    def cached(self) -> bool:
        """Whether videos are encoded before training, not while it runs."""
        return self.recipe.cache_features and set(self.recipe.train) == {"llm"}

    def trained_values(self) -> dict[Part, int]:
        """Number of trained values, by part."""
        return {
            part: self._factor_values(part) if part in self.low_rank else self.part_values(part)
            for part in self.recipe.train
        }

    def part_values(self, part: Part) -> int:
        """Number of all values of a part."""
        if part == "llm":
            return self.run.llm.values
        if part == "connector":
            return connector_values(self.config.connector)
        return sum(encoder.shape.values for encoder in self.config.encoders)

    def _factor_values(self, part: Part) -> int:
        llm = self.run.llm
        sides = llm.layers * sum(rows + columns for rows, columns in llm.layer_linears)
        if part == "encoders":
            sides = sum(encoder.shape.linear_sides for encoder in self.config.encoders)
        return sides * self.recipe.lora_rank


def estimate_training(training: Training, sample: SampleSize) -> TrainingEstimate:
    """Add up what training takes.

    Args:
        training: recipe, network and device.
        sample: the longest sample.
    """
    run, recipe = training.run, training.recipe
    values = training.trained_values()
    trained = sum(values.values())
    weights, copies = weights_bytes(run, training.quant), 0
    for part, count in values.items():
        if part in training.low_rank:
            weights += FLOAT32 * count
            continue
        weights += (FLOAT32 - run.value_bytes) * count
        if run.value_bytes < FLOAT32:
            # Autocast keeps a copy in the dtype of the run until the step is done.
            copies += run.value_bytes * count
    runtime = host_runtime_bytes(training.quant)
    if run.device == "cuda":
        runtime = CUDA_RUNTIME_BYTES
    watching = aside = 0
    if training.cached:
        watching = weights + runtime + _watching(training, sample.clips)
        if run.device != "cpu":
            parts = training.part_values("encoders") + training.part_values("connector")
            aside = parts * run.value_bytes
    return TrainingEstimate(
        weights=weights + copies - aside,
        gradients=FLOAT32 * trained,
        optimiser=STATE_BYTES[recipe.optimizer] * trained,
        activations=_activations(training, sample),
        logits=_logits(training, sample),
        runtime=runtime,
        watching=watching,
    )


def _activations(training: Training, sample: SampleSize) -> int:
    """Language model and clips are gone through one after the other."""
    many = training.recipe.micro_batch_size
    kept, moment = _clips(training, sample.clips * many)
    return kept + max(moment, _llm_activations(training, sample.tokens * many))


def _llm_activations(training: Training, tokens: int) -> int:
    recipe, run = training.recipe, training.run
    llm, size = run.llm, run.value_bytes
    queries = llm.heads * llm.head_width
    whole = "llm" in recipe.train and "llm" not in training.low_rank
    residual = FLOAT32 if whole else size
    # What a linear layer's own gradient needs of its input; a cast makes it anew for each layer.
    inputs = 0
    if "llm" in recipe.train:
        shared = whole and size == FLOAT32
        inputs = (2 if shared else 5) * llm.width + queries + llm.hidden
    # Norms work in float32, and keep what their own weights need.
    norms = (4 if whole else 2) * FLOAT32 * llm.width
    # Queries, repeated keys and values, and the result; both halves of the gate, and its curve.
    layer = tokens * (norms + size * (inputs + 4 * queries + 3 * llm.hidden))
    layers = llm.layers * layer
    if recipe.gradient_checkpointing:
        layers = llm.layers * tokens * llm.width * residual + int(_BACKWARD_SHARE * layer)
    workspace = quantised_workspace(llm, "4bit", tokens, size) if training.quant else 0
    # Embeddings of the prompt, and the last hidden states.
    return layers + workspace + 3 * tokens * llm.width * residual


def _clips(training: Training, clips: int) -> tuple[int, int]:
    """Bytes that clips leave behind for the backward pass, and bytes of their dearest moment."""
    recipe, run = training.recipe, training.run
    config, size = run.config, run.value_bytes
    pixels = clips * sum(config.frames_per_clip * 3 * e.pixels.size**2 for e in config.encoders)
    tokens = clips * config.visual_tokens_per_clip * run.llm.width * FLOAT32
    if training.cached:
        return tokens, 0
    learns = "encoders" in recipe.train, "connector" in recipe.train
    if not any(learns):
        return pixels + tokens, _watching(training, clips)
    connector = _connector_bytes(config, size)
    encoders = sum(_encoder_bytes(encoder, config, size) for encoder in config.encoders)
    time, rows, columns = config.connector.grid
    features = time * rows * columns * config.connector.vision_width * size
    inside = max(encoders, connector) if learns[0] else max(clip_bytes(config, size), connector)
    if recipe.gradient_checkpointing:
        batch = min(clips, ENCODER_CLIPS if learns[0] else CONNECTOR_CLIPS)
        return pixels + tokens + clips * features, int(_BACKWARD_SHARE * batch * inside)
    kept = encoders * learns[0] + connector + features
    return pixels + tokens + clips * kept, clip_bytes(config, size)


def _watching(training: Training, clips: int) -> int:
    """Bytes of the dearest moment of clips that nothing is learned from."""
    run = training.run
    return min(clips, ENCODE_BATCH[run.device]) * clip_bytes(run.config, run.value_bytes)


def _connector_bytes(config: NetworkConfig, size: int) -> int:
    """Activations of one clip in the connector, kept for its backward pass."""
    connector = config.connector
    time, rows, columns = connector.grid
    width = connector.text_width
    # Features in float32 and in the dtype of the run; the projector's layers and curves between
    # them; context and norms of the resampler, in float32; keys and values.
    values = connector.vision_width * (FLOAT32 + size) + 5 * width * size + 3 * width * FLOAT32
    values += 4 * connector.heads * connector.head_width * size * max(1, connector.depth)
    return time * rows * columns * values


def _encoder_bytes(encoder: EncoderConfig, config: NetworkConfig, size: int) -> int:
    """Activations of one clip in an encoder, kept for its backward pass."""
    time, rows, columns = encoder.grid
    tokens, width = time * rows * columns, encoder.width
    if encoder.shape.per_frame:
        tokens *= _pictures(config)
    # Norms in float32; inputs, queries, keys, values and results; both sides of the curve.
    layer = tokens * (4 * width * FLOAT32 + size * (8 * width + 3 * encoder.shape.mlp_width))
    return encoder.shape.depth * layer


def _pictures(config: NetworkConfig) -> int:
    """Pictures of a clip that an image encoder looks at."""
    return config.frames_per_clip // max(1, config.frames_per_clip // config.connector.grid[0])


def _logits(training: Training, sample: SampleSize) -> int:
    rows, size = sample.trained * training.recipe.micro_batch_size, training.run.value_bytes
    # Logits, the same in float32, their logarithms, and the gradients of the first two.
    if training.recipe.gradient_checkpointing:
        rows = min(rows, LOGIT_ROWS)
    return rows * training.run.llm.vocabulary * (2 * size + 3 * FLOAT32)
