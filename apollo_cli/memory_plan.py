"""What a question takes in memory, and what to reduce so that it fits; arithmetic without torch.

The peak is that of the dearest stage: loading, encoding a batch of clips, or reading the prompt.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from apollo_cli.config import ENCODE_BATCH, PREFILL_CHUNK, SMALLEST_CHUNK, SamplingOptions
from apollo_cli.errors import DeviceError, FitError
from apollo_cli.hardware import FLASH, HardwareChoice, free_bytes
from apollo_cli.model.config import NetworkConfig
from apollo_cli.model.sizes import (
    LlmSizes,
    clip_bytes,
    connector_values,
    llm_sizes,
    prefill_bytes,
    quantised_workspace,
)
from apollo_cli.planner import Planned, Planner, Spoken
from apollo_cli.text import apart, count
from apollo_cli.video.info import VideoInfo
from apollo_cli.weights.checkpoint import (
    KINDS,
    QuantKind,
    allowed_kinds,
    fits_quantisation,
    quantised_bytes,
)

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Python with torch, transformers and a decoder, and bitsandbytes besides; measured on Linux.
_LIBRARY_BYTES, _QUANT_LIBRARY_BYTES = 285_000_000, 50_000_000
# A torch that is built for CUDA registers the kernels of all its libraries when it is imported,
# also where there is no GPU; measured with torch 2.14 and 2.15 for CUDA 13.
_CUDA_BUILD_BYTES = 145_000_000
# glibc keeps freed blocks of up to 32 MiB, so small activations leave more behind than they take;
# measured as a share of one batch in float32, which some steps use in every dtype.
_HOST_KEPT_SHARE, _HOST_KEPT_BYTES = 1.5, 160_000_000
# Context, kernels and workspaces: assumed, of the size that drivers commonly take.
CUDA_RUNTIME_BYTES = 600_000_000
# Bytes for each value of a layer while it is quantised: on a CPU in float32, on a GPU in place.
_QUANTISING_BYTES = {"cpu": 12, "cuda": 3, "mps": 3}
# Beside the weights while no question is known: keys and values of a long context, activations,
# and the runtime itself.
_ROOM_FACTOR, _ROOM_BYTES = 1.1, 3_000_000_000


@dataclass(frozen=True)
class Settings:
    """What can be given up for memory.

    Attributes:
        encode_batch: clips encoded at a time. prefill_chunk: prompt tokens read at a time.
        quant: bits of the language model's weights; None is the dtype of the run.
        clips: number of clips that are looked at.
        most_clips: of any later question; None unless clips had to be given up.
    """

    encode_batch: int
    prefill_chunk: int
    quant: QuantKind | None
    clips: int
    most_clips: int | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device while a video is watched and a question answered.

    Attributes:
        weights: all of them. runtime: libraries, context, and what the allocator keeps.
        loading: the largest layer while it is quantised.
        visual: tokens of all clips, kept for further questions.
        encode: activations of one batch of clips.
        kv_cache: keys and values of prompt and answer.
        prefill: embeddings of the prompt, and activations of one chunk.
    """

    weights: int
    runtime: int
    loading: int
    visual: int
    encode: int
    kv_cache: int
    prefill: int

    @property
    def peak(self) -> int:
        """The most that is held at one time."""
        running = self.visual + max(self.encode, self.kv_cache + self.prefill)
        return self.weights + self.runtime + max(self.loading, running)


@dataclass(frozen=True)
class TokenDemand:
    """Tokens of a question about a number of clips.

    Attributes:
        visual: tokens of the clips. text: everything around them. answer: the longest one.
    """

    visual: int
    text: int
    answer: int

    @property
    def prompt(self) -> int:
        """What is read before the answer is written."""
        return self.visual + self.text


@dataclass(frozen=True)
class Run:
    """One network on one kind of device.

    Attributes:
        config: the network. device: ``cpu``, ``cuda`` or ``mps``.
        dtype: of weights and activations that are not quantised.
        fused: whether attention runs in flash-attn.
    """

    config: NetworkConfig
    device: str
    dtype: str
    fused: bool = False

    @property
    def value_bytes(self) -> int:
        """Bytes of one value."""
        return VALUE_BYTES[self.dtype]

    @property
    def llm(self) -> LlmSizes:
        """Sizes of the language model."""
        return llm_sizes(self.config.llm)

    def settings(self, clips: int, quant: QuantKind | None = None) -> Settings:
        """The settings of a run that has memory enough."""
        return Settings(ENCODE_BATCH[self.device], PREFILL_CHUNK, quant, clips)


def weights_bytes(run: Run, quant: QuantKind | None) -> int:
    """Memory of all weights on the device."""
    llm = run.llm
    values = sum(encoder.shape.values for encoder in run.config.encoders)
    values += connector_values(run.config.connector)
    return (values + llm.other_values) * run.value_bytes + llm.layers * sum(
        quantised_bytes(quant, rows, columns)
        if quant is not None and fits_quantisation(quant, columns)
        else rows * columns * run.value_bytes
        for rows, columns in llm.layer_linears
    )


def room_for(
    hardware: HardwareChoice, quant: QuantKind | None, free_bytes: int | None
) -> Callable[[NetworkConfig], bool]:
    """Whether a network fits a device as it would be loaded there, for ``locate_model``.

    Args:
        free_bytes: of the device; None, where it does not say, is enough for any.
    """

    def fits(config: NetworkConfig) -> bool:
        run = Run(config, hardware.device.split(":")[0], hardware.dtype)
        needed = weights_bytes(run, quant) * _ROOM_FACTOR + _ROOM_BYTES
        return free_bytes is None or needed <= free_bytes

    return fits


def estimate_memory(run: Run, settings: Settings, tokens: TokenDemand) -> MemoryEstimate:
    """Add up what a question takes.

    Args:
        run: network, device and dtype.
        settings: how it is run. ``settings.clips`` says how many there are to encode.
        tokens: of that many clips.
    """
    llm, size, quant = run.llm, run.value_bytes, settings.quant
    batch = min(settings.encode_batch, settings.clips)
    chunk = min(settings.prefill_chunk, tokens.prompt)
    reading = prefill_bytes(llm, chunk, tokens.prompt, size, run.fused)
    loading = 0
    if quant is not None:
        largest = max(rows * columns for rows, columns in llm.layer_linears)
        loading = largest * _QUANTISING_BYTES[run.device]
        reading += quantised_workspace(llm, quant, chunk, size)
    return MemoryEstimate(
        weights=weights_bytes(run, quant),
        runtime=_runtime_bytes(run, quant, batch),
        loading=loading,
        visual=tokens.visual * llm.width * size,
        encode=batch * clip_bytes(run.config, size),
        kv_cache=(tokens.prompt + tokens.answer) * llm.kv_values_per_token * size,
        # The prompt's embeddings, and beside them the visual tokens that were put into it.
        prefill=(tokens.prompt + tokens.visual) * llm.width * size + reading,
    )


@cache
def host_runtime_bytes(quant: QuantKind | None) -> int:
    """Main memory that the libraries take, for the build of torch that is installed here."""
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found else None
    cuda = any(any(Path(folder, "lib").glob("*torch_cuda*")) for folder in folders or ())
    return (
        _LIBRARY_BYTES + (_CUDA_BUILD_BYTES if cuda else 0) + (_QUANT_LIBRARY_BYTES if quant else 0)
    )


def _runtime_bytes(run: Run, quant: QuantKind | None, batch: int) -> int:
    if run.device == "cuda":
        return CUDA_RUNTIME_BYTES
    kept = _HOST_KEPT_SHARE * batch * clip_bytes(run.config, VALUE_BYTES["float32"])
    return host_runtime_bytes(quant) + int(min(kept, _HOST_KEPT_BYTES))


@dataclass(frozen=True)
class Fitted:
    """Settings that fit.

    Attributes:
        settings: to run with. estimate: what they take.
        given_up: a sentence for each thing that is not as it was wanted.
    """

    settings: Settings
    estimate: MemoryEstimate
    given_up: tuple[str, ...]


def fit_settings(
    run: Run,
    wanted: Settings,
    free_bytes: int,
    tokens_of: Callable[[int], TokenDemand],
    *,
    kinds: Sequence[QuantKind | None] = (None, "8bit", "4bit"),
    fewest_clips: int = 1,
) -> Fitted:
    """Reduce settings until they fit: encoder batches, prompt chunks, precision, and last clips.

    The first two cost a little time, the third a little accuracy, the last leaves out moments of
    the video. Each is reduced only where reducing those in front of it is not enough.

    Args:
        run: network, device and dtype.
        wanted: the settings to begin with.
        free_bytes: free memory of the device.
        tokens_of: tokens of a number of clips.
        kinds: precisions that may be used, the wanted one first.
        fewest_clips: one for each video.

    Raises:
        FitError: not even the smallest settings fit.
    """

    def estimate(settings: Settings) -> MemoryEstimate:
        return estimate_memory(run, settings, tokens_of(settings.clips))

    smallest = wanted
    for kind in kinds:
        for smallest in _smaller_steps(replace(wanted, quant=kind)):
            taken = estimate(smallest)
            if taken.peak <= free_bytes:
                return Fitted(smallest, taken, _given_up(run, wanted, smallest))
    fits, too_many = fewest_clips - 1, wanted.clips
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        is_enough = estimate(replace(smallest, clips=middle)).peak <= free_bytes
        fits, too_many = (middle, too_many) if is_enough else (fits, middle)
    if fits < fewest_clips:
        needed = estimate(replace(smallest, clips=fewest_clips)).peak
        least, free = apart(needed / 1e9, free_bytes / 1e9)
        raise FitError(
            f"{least} GB of memory are needed for the smallest run",
            f"{free} GB are free on {run.device}",
            "take a smaller model, or close what else uses the memory",
        )
    settings = replace(smallest, clips=fits, most_clips=fits)
    return Fitted(settings, estimate(settings), _given_up(run, wanted, settings))


def _smaller_steps(settings: Settings) -> Iterator[Settings]:
    """The settings themselves, then smaller batches, then shorter chunks besides."""
    yield settings
    for field, least in (("encode_batch", 1), ("prefill_chunk", SMALLEST_CHUNK)):
        while getattr(settings, field) > least:
            settings = replace(settings, **{field: getattr(settings, field) // 2})
            yield settings


def _given_up(run: Run, wanted: Settings, taken: Settings) -> tuple[str, ...]:
    """A sentence for each setting that was reduced."""
    fewer = count(taken.clips, "clip is looked at", "clips are looked at")
    sentences = {
        "encode_batch": f"clips are encoded {taken.encode_batch} at a time instead of "
        f"{wanted.encode_batch}, which is slower",
        "prefill_chunk": f"the prompt is read {taken.prefill_chunk} tokens at a time instead of "
        f"{wanted.prefill_chunk}, which is slower",
        "quant": f"the language model runs in {taken.quant} instead of "
        f"{wanted.quant or run.dtype}: answers may differ",
        "clips": f"{fewer} instead of {wanted.clips}",
    }
    return tuple(
        sentence
        for field, sentence in sentences.items()
        if getattr(taken, field) != getattr(wanted, field)
    )


@dataclass(frozen=True)
class Demand:
    """Tokens of the planned clips of some videos.

    Attributes:
        clips: that the context of the model holds. videos: that they come from.
        visual, text: tokens of these clips, and of what stands between them.
        tokens_of: tokens of any number of clips, question and answer included.
    """

    clips: int
    videos: int
    visual: int
    text: int
    tokens_of: Callable[[int], TokenDemand]


def measure_demand(
    planner: Planner, planned: Sequence[Planned], *, question_tokens: int, answer_tokens: int
) -> Demand:
    """Count the tokens of planned videos, and of fewer of their clips."""
    parts = [planner.part(file) for file in planned]
    listed = "".join(file.listed for file in planned)
    said = len(planner.prompts.tokenizer.encode(listed))
    clips = sum(len(file.plan) for file in planned)
    each = planner.config.visual_tokens_per_clip
    text = len(planner.prompts.prefix_ids(parts)) - clips * each

    def tokens_of(count: int) -> TokenDemand:
        labels = -(-text * count // clips)
        return TokenDemand(count * each, labels + said + question_tokens, answer_tokens)

    return Demand(clips, len(planned), clips * each, text + said, tokens_of)


def fit_videos(
    planner: Planner,
    hardware: HardwareChoice,
    infos: Sequence[VideoInfo],
    sampling: SamplingOptions,
    *,
    spoken: Sequence[Spoken] | None = None,
    question_bytes: int,
    answer_tokens: int,
    quant: QuantKind | None = None,
    stored: QuantKind | None = None,
) -> Fitted:
    """Choose settings with which a question about videos fits the free memory of its device.

    Args:
        planner, hardware: of the model.
        infos: the videos and images. spoken: subtitles of each; None is without.
        question_bytes: length of the longest question. answer_tokens: of the longest answer.
        quant: the precision that was asked for. stored: the one of the checkpoint.

    Raises:
        FitError: not even the smallest settings fit.
        DeviceError: the device does not tell how much memory is free.
    """
    free = free_bytes(hardware.device)
    if free is None:
        raise DeviceError(
            f"--fit auto: {hardware.device} does not say how much memory is free",
            next_step="leave it out, and lower --max-clips by hand",
        )
    # No token stands for less than a byte, so this is never too little.
    reserve, spare = question_bytes + answer_tokens, planner.spare_for(question_bytes)
    planned = planner.plan(infos, sampling, reserve, spoken, spare_tokens=spare)
    demand = measure_demand(
        planner, planned, question_tokens=question_bytes, answer_tokens=answer_tokens
    )
    kind = hardware.device.split(":")[0]
    run = Run(planner.config, kind, hardware.dtype, fused=hardware.attention == FLASH)
    return fit_settings(
        run,
        run.settings(demand.clips, quant),
        free,
        demand.tokens_of,
        kinds=allowed_kinds(quant, hardware.device, stored),
        fewest_clips=demand.videos,
    )


def precision_name(quant: QuantKind | None, dtype: str) -> str:
    """How a precision is called in tables."""
    return quant or {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]


def precisions() -> tuple[QuantKind | None, ...]:
    """All precisions of the language model, the largest first."""
    return (None, *reversed(KINDS))
