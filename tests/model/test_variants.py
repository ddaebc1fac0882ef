"""Checkpoints of other shapes give what a second, independent implementation gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apollo_cli.model.connector import pooled_grid
from apollo_cli.model.encoders import normalise
from apollo_cli.weights.load import load_model
from tests import tiny
from tests.model import straight
from tests.tiny import IMAGE, VIDEO, Tiny

VARIANTS = {
    "as released": Tiny(),
    "encoders in the other order": Tiny(order=(IMAGE, VIDEO), seed=1),
    "tied embeddings": Tiny(tied=True, seed=2),
    "other depths": Tiny(video_depth=5, image_depth=2, resampler_depth=1, seed=3),
    "other head counts": Tiny(video_heads=4, heads=6, key_heads=3, seed=4),
    "all key heads": Tiny(heads=2, key_heads=2, seed=5),
    "one projector layer": Tiny(projector_layers=1, seed=6),
    "three projector layers": Tiny(projector_layers=3, seed=7),
    "tubelets of two": Tiny(tubelet=2, seed=8),
    "tubelets of four": Tiny(tubelet=4, seed=9),
    "fused MLP": Tiny(fused_mlp=True, seed=10),
    "three shards": Tiny(shards=3, seed=11),
    "bfloat16 tensors": Tiny(dtype=torch.bfloat16, seed=12),
}


def random_clips(clips: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(0, 256, (clips, 4, 3, size, size), generator=generator).byte()
        for name, size in ((VIDEO, 24), (IMAGE, 30))
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_visual_tokens_and_logits_equal_straight_line_code(variant: str, tmp_path: Path):
    folder = tiny.save(tmp_path / "checkpoint", VARIANTS[variant])
    model, _ = load_model(folder)
    clips = random_clips(2)
    ready = {
        encoder.name: normalise(clips[encoder.name], encoder.pixels, torch.float32)
        for encoder in model.config.encoders
    }
    with torch.inference_mode():
        tokens = model.encode_clips(clips)
        embeddings = model.embed([5, 6, *[-200] * 16, 7], tokens.flatten(0, 1))
        logits = model.llm(inputs_embeds=embeddings).logits[0]
    torch.testing.assert_close(tokens, straight.encode(folder, ready), rtol=0, atol=1e-4)
    expected = straight.llm_logits(folder, embeddings[0])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("resampler", ["avg", "conv2d_avg"])
@pytest.mark.parametrize("integration", ["plain", "start_end", "timestamps", "both"])
def test_every_resampler_works_with_every_integration(
    resampler: str, integration: str, tmp_path: Path
):
    variant = Tiny(resampler=resampler, integration=integration)
    model, _ = load_model(tiny.save(tmp_path / "checkpoint", variant))
    with torch.inference_mode():
        tokens = model.encode_clips(random_clips(3))
    ends = 2 if integration in ("start_end", "both") else 0
    assert tokens.shape == (3, 8 + ends, 32)
    assert tokens.shape[1] == model.config.visual_tokens_per_clip
    if ends:
        torch.testing.assert_close(tokens[:, 0], model.connector.clip_start.expand(3, -1))
        torch.testing.assert_close(tokens[:, -1], model.connector.clip_end.expand(3, -1))


def test_average_pooling_is_the_mean_of_its_share_of_the_grid(tmp_path: Path):
    model, _ = load_model(tiny.save(tmp_path / "checkpoint", Tiny(resampler="avg")))
    grid = model.grid
    context = torch.randn(1, grid[0] * grid[1] * grid[2], 32)
    assert pooled_grid(8, grid) == (4, 1, 2)
    pooled = model.connector.resampler(context)
    cube = context[0].reshape(*grid, 32)
    torch.testing.assert_close(pooled[0, 0], cube[0, :, :3].mean((0, 1)))


def test_encoding_in_batches_equals_encoding_one_clip_at_a_time(tmp_path: Path):
    model, _ = load_model(tiny.save(tmp_path / "checkpoint"))
    clips = random_clips(5)
    with torch.inference_mode():
        together = model.encode_clips(clips)
        alone = [model.encode_clips({k: v[i : i + 1] for k, v in clips.items()}) for i in range(5)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
