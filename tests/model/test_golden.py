"""Our network gives the values of the original code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from apollo_cli.config import GenerationOptions
from apollo_cli.model.encoders import encode_grid
from apollo_cli.model.generate import generate, prefill
from tests.model import golden

TOLERANCE = 1e-4
VARIANTS = list(golden.FOLDERS)


def assert_close(ours: torch.Tensor, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=TOLERANCE)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def pixels(name: str) -> torch.Tensor:
    found = torch.tensor(golden.arrays("tubelet 1", "preprocess")[f"tiny_pixels_{name}_clip0"])
    return found.transpose(1, 2) if name == "internvideo" else found


@pytest.mark.parametrize("variant", VARIANTS)
def test_features_of_both_encoders_equal_the_original(variant: str):
    model, features = golden.model(variant), golden.arrays(variant, "features")
    video, image = model.encoders
    tokens = video.forward_tokens(pixels("internvideo"))  # pyright: ignore[reportCallIssue]
    assert_close(tokens, features["internvideo_tokens_with_cls_clip0"])
    assert_close(video(pixels("internvideo")), features["internvideo_selected_clip0"])
    frames = pixels("siglip")[:, :: 4 // model.grid[0]]
    assert_close(image(frames), features["siglip_selected_clip0"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_fusion_projector_and_resampler_equal_the_original(variant: str):
    model, features = golden.model(variant), golden.arrays(variant, "features")
    both = zip(model.encoders, (pixels("internvideo"), pixels("siglip")), strict=True)
    grids = [encode_grid(encoder, clip, model.grid) for encoder, clip in both]  # pyright: ignore[reportArgumentType]
    context = torch.cat(grids, dim=-1).flatten(1, 3)
    assert_close(context, features["concat_clip0"])
    assert_close(model.connector.proj(context), features["projector_clip0"])
    assert_close(model.connector(context), features["resampler"][:1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_uint8_pixels_take_the_same_way_as_the_original_floats(variant: str):
    model, features = golden.model(variant), golden.arrays(variant, "features")
    clip: dict[str, torch.Tensor] = {}
    for config, name in zip(model.config.encoders, ("internvideo", "siglip"), strict=True):
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (config.pixels.mean, config.pixels.std))
        clip[config.name] = ((pixels(name) * std + mean) * 255).round().to(torch.uint8)
    assert_close(model.encode_clips(clip), features["resampler"][:1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_embeddings_logits_and_greedy_ids_equal_the_original(variant: str):
    model, end = golden.model(variant), golden.arrays(variant, "end_to_end")
    visual = torch.tensor(golden.arrays(variant, "features")["resampler"]).flatten(0, 1)
    embeddings = model.embed(end["input_ids"].tolist(), visual)
    assert_close(embeddings[0], end["inputs_embeds"])
    for penalty, key in ((1.0, "greedy_ids"), (1.05, "greedy_ids_repetition_penalty_1_05")):
        cache = DynamicCache(config=model.llm.config)
        logits = prefill(model, embeddings, cache)
        assert_close(logits, end["last_token_logits"])
        options = GenerationOptions(
            max_new_tokens=len(end["greedy_ids"]), repetition_penalty=penalty
        )
        ids = list(generate(model, logits, cache, options, model.config.eos_ids))
        expected = end[key].tolist()
        assert ids == [i for i in expected if i not in model.config.eos_ids]


def test_text_alone_gives_the_logits_of_the_language_model():
    model, end = golden.model("tubelet 1"), golden.arrays("tubelet 1", "end_to_end")
    ids = golden.tokenizer().encode(f"USER: {golden.QUESTION} ASSISTANT:")
    assert ids == end["text_only_ids"].ravel().tolist()
    logits = prefill(model, model.embed(ids, None), DynamicCache(config=model.llm.config))
    assert_close(logits, end["text_only_last_logits"])


def test_a_prompt_prefilled_in_chunks_gives_the_same_logits():
    model, end = golden.model("tubelet 1"), golden.arrays("tubelet 1", "end_to_end")
    embeddings = torch.tensor(end["inputs_embeds"]).unsqueeze(0)
    whole = prefill(model, embeddings, DynamicCache(config=model.llm.config))
    chunked = prefill(model, embeddings, DynamicCache(config=model.llm.config), chunk_tokens=7)
    torch.testing.assert_close(whole, chunked, rtol=0, atol=1e-5)
