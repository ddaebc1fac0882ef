"""The released shapes on a GPU, with random weights: an hour's worth of clips, three precisions.

    python benchmarks/gpu.py [--models apollo-3b ...] [--quant none 8bit 4bit] [--dry]

For each it prints seconds to load, to encode 666 clips and to read the prompt, tokens a second,
peak memory, and what `apollo plan` had said; then the attention kernels side by side. It writes
checkpoints of the true sizes to a temporary folder, up to 16 GB at a time. With --dry, a tiny
shape runs on the CPU: that proves the script, not the numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parent.parent))

from apollo_cli.config import ENCODE_BATCH, GenerationOptions
from apollo_cli.hardware import choose_device
from apollo_cli.memory_plan import Run, TokenDemand, estimate_memory
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.config import NetworkConfig
from apollo_cli.model.generate import generate, prefill
from apollo_cli.weights.load import load_model
from apollo_cli.weights.network import released_network
from apollo_cli.weights.registry import known_models
from benchmarks.random_checkpoint import Shape, network, save_network

CLIPS, LABEL_TOKENS, ANSWER_TOKENS = 666, 17, 64


def timed(device: str, work: Callable[[], object]) -> float:
    """Seconds of a piece of work, the device's queue emptied before and after."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begin


@torch.inference_mode()
def encode(model: ApolloModel, clips: int, batch: int) -> torch.Tensor:
    """Encode random pixels of so many clips."""
    frames = model.config.frames_per_clip
    tokens = []
    for first in range(0, clips, batch):
        count = min(batch, clips - first)
        pixels = {
            e.name: torch.randint(
                0, 256, (count, frames, 3, e.pixels.size, e.pixels.size), dtype=torch.uint8
            )
            for e in model.config.encoders
        }
        tokens.append(model.encode_clips(pixels))
    return torch.cat(tokens)


def measure(name: str, config: NetworkConfig, quant: str | None, clips: int, device: str) -> None:
    """One model at one precision: a row of the table."""
    hardware = choose_device(device)
    dtype = getattr(torch, hardware.dtype)
    kind = hardware.device.split(":")[0]
    with tempfile.TemporaryDirectory() as folder:
        save_network(Path(folder) / "checkpoint", config, dtype)
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model, _ = load_model(
            Path(folder) / "checkpoint",
            device=hardware.device,
            dtype=dtype,
            kernel=hardware.attention,
            quant=quant,  # pyright: ignore[reportArgumentType]
        )
        loaded = time.perf_counter() - begin
    encode(model, 4, 4)
    visual: list[torch.Tensor] = []
    batch = ENCODE_BATCH[kind]
    encoded = timed(hardware.device, lambda: visual.append(encode(model, clips, batch)))
    ids = ([7] * LABEL_TOKENS + [-200] * config.connector.tokens_per_clip) * clips
    cache = DynamicCache(config=model.llm.config)
    logits: list[torch.Tensor] = []
    embeddings = model.embed(ids, visual[0].flatten(0, 1))
    read = timed(hardware.device, lambda: logits.append(prefill(model, embeddings, cache)))
    options = GenerationOptions(max_new_tokens=ANSWER_TOKENS)
    written = timed(hardware.device, lambda: list(generate(model, logits[0], cache, options, ())))
    tokens = TokenDemand(clips * config.connector.tokens_per_clip, clips * LABEL_TOKENS, 64)
    run = Run(config, kind, hardware.dtype, fused=hardware.attention != "sdpa")
    planned = estimate_memory(run, run.settings(clips, quant), tokens).peak  # pyright: ignore[reportArgumentType]
    peak = torch.cuda.max_memory_allocated() if kind == "cuda" else 0
    print(
        f"| {name} | {quant or hardware.dtype} | {loaded:.1f} | {encoded:.1f} | {read:.2f} "
        f"| {ANSWER_TOKENS / written:.1f} | {peak / 1e9:.2f} | {planned / 1e9:.2f} |",
        flush=True,
    )


def compare_kernels(device: str) -> None:
    """Attention of one layer of the 3B over 32,768 positions, by kernel."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    length = 32768 if device.startswith("cuda") else 512
    query, key, value = (torch.randn(1, 16, length, 128, device=device, dtype=dtype) for _ in "qkv")
    print("\n| kernel | seconds |\n|---|---|")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):

        def attend(backend: SDPBackend = backend) -> object:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True
                )

        try:
            attend()
            print(f"| SDPA {backend.name} | {timed(device, attend):.4f} |")
        except RuntimeError as error:
            print(f"| SDPA {backend.name} | not here ({str(error).splitlines()[0][:60]}) |")
    try:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("| flash-attn | not installed |")
        return
    swapped = [tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)]
    flash_attn_func(*swapped, causal=True)
    print(f"| flash-attn | {timed(device, lambda: flash_attn_func(*swapped, causal=True)):.4f} |")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["apollo-1.5b", "apollo-3b", "apollo-7b"])
    parser.add_argument("--quant", nargs="+", default=["none", "8bit", "4bit"])
    parser.add_argument("--dry", action="store_true", help="a tiny shape on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.dry else choose_device("cuda").device
    if not options.dry:
        print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    print("| model | precision | load s | encode s | prefill s | tokens/s | peak GB | planned GB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in ["tiny"] if options.dry else options.models:
        config = network(Shape()) if options.dry else released_network(known_models()[name]).config
        for quant in options.quant:
            chosen = None if quant == "none" else quant
            measure(name, config, chosen, 8 if options.dry else CLIPS, device)
    compare_kernels(device)


if __name__ == "__main__":
    main()
