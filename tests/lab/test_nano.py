"""The training of apollo-nano: the same path as asking, no leaks, resumable, and it learns."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.prompt import PromptBuilder
from apollo_cli.model.tokenizer import TextTokenizer
from apollo_cli.weights.load import load_model
from lab.language import (
    LanguageStage,
    align_words,
    answer_logits,
    seed_distance,
    train_language,
    word_directions,
)
from lab.network import CLIP_SECONDS, TOKENS_PER_CLIP, build_nano, save_nano
from lab.optimizer import Optimizer
from lab.tokenizer import build_tokenizer
from lab.toybox import sample_world
from lab.train import load_weights, save_weights
from lab.videos import Videos, ask_many, clip_times, pack_questions
from lab.vision import train_connector

WEIGHTS = {"colour": 0.5, "shape": 0.5}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model is slower on many threads, and far slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder(TextTokenizer(build_tokenizer()), CLIP_SECONDS, TOKENS_PER_CLIP)


@pytest.fixture(scope="module")
def videos() -> Videos:
    worlds = [sample_world(seed, 4.0) for seed in range(6)]
    times = [clip_times(world) for world in worlds]
    first = np.cumsum([0, *(len(t) for t in times)])
    torch.manual_seed(0)
    return Videos(worlds, times, torch.randn(int(first[-1]), 64, 192).half(), first)


@pytest.fixture
def model() -> ApolloModel:
    nano = build_nano(0)
    nano.encoders.requires_grad_(False)
    return nano


def losses(
    model: ApolloModel,
    videos: Videos,
    builder: PromptBuilder,
    *,
    steps: int,
    keep_at: Path | None = None,
    resume: dict[str, torch.Tensor] | None = None,
) -> list[str]:
    """Log lines of a short training."""
    lines: list[str] = []
    stage = LanguageStage("test", steps, WEIGHTS, 0.02, 2e-3, token_budget=300, questions=4)

    def keep(optimizer: Optimizer) -> None:
        if keep_at is not None and optimizer.done == steps // 2:
            save_weights(model, keep_at, optimizer.state())

    train_language(
        model,
        videos,
        builder,
        stage,
        seed=1,
        log=lines.append,
        resume=resume,
        keep=keep,
        every=1,
    )
    return lines


def last_loss(lines: list[str]) -> float:
    return float(lines[-1].rsplit(" ", 1)[1])


def test_twenty_steps_lower_the_loss(model: ApolloModel, videos: Videos, builder: PromptBuilder):
    lines = losses(model, videos, builder, steps=20)
    first = float(lines[0].rsplit(" ", 1)[1])
    assert last_loss(lines) < 0.7 * first


def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(
    videos: Videos, builder: PromptBuilder, tmp_path: Path
):
    whole, stopped = build_nano(0), build_nano(1)
    losses(whole, videos, builder, steps=8, keep_at=tmp_path / "half.safetensors")
    state = load_weights(stopped, tmp_path / "half.safetensors")
    losses(stopped, videos, builder, steps=8, resume=state)
    for (name, one), two in zip(whole.named_parameters(), stopped.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-5), name


def test_questions_on_one_prefix_do_not_see_each_other(
    model: ApolloModel, videos: Videos, builder: PromptBuilder
):
    questions = ask_many(videos.worlds[0], WEIGHTS, 5, np.random.default_rng(0))
    together, _ = answer_logits(
        model, videos, pack_questions(videos, [0], [questions], builder), blind=False
    )
    alone = [
        answer_logits(model, videos, pack_questions(videos, [0], [[q]], builder), blind=False)[0]
        for q in questions
    ]
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)


def test_training_sees_the_prompt_that_asking_builds(videos: Videos, builder: PromptBuilder):
    question = ask_many(videos.worlds[0], WEIGHTS, 1, np.random.default_rng(0))[0]
    batch = pack_questions(videos, [0], [[question]], builder)
    answer = builder.answer_ids(question.answer)
    asked = batch.ids[0].tolist()[: -len(answer)]
    assert asked[-len(builder.suffix_ids(question.text)) :] == builder.suffix_ids(question.text)
    assert batch.targets[batch.targets >= 0].tolist() == answer
    assert batch.positions[0].tolist() == list(range(len(batch.ids[0])))


def test_the_connector_learns_facts_that_words_then_point_to(
    model: ApolloModel, videos: Videos, builder: PromptBuilder
):
    lines: list[str] = []
    readout = train_connector(model, videos, seed=0, steps=50, batch=8, log=lines.append)
    first, last = (float(line.split("loss ")[1].split(":")[0]) for line in (lines[0], lines[-1]))
    assert last < first
    align_words(model.llm, readout, builder.tokenizer)
    (word,) = builder.tokenizer.encode(" red")
    row = dict(model.llm.named_parameters())["model.embed_tokens.weight"][word]
    meaning = word_directions(readout)[" red"]
    assert torch.cosine_similarity(row, meaning, dim=0) > 0.99


def test_a_saved_nano_is_read_by_the_loader_of_released_checkpoints(
    model: ApolloModel, tmp_path: Path
):
    save_nano(model, tmp_path, torch.float32)
    loaded, _ = load_model(tmp_path)
    assert loaded.config.encoders == model.config.encoders
    assert loaded.config.connector == model.config.connector
    assert loaded.config.eos_ids == model.config.eos_ids
    torch.manual_seed(0)
    pixels = {
        encoder.name: torch.randint(0, 256, (2, 4, 3, 64, 64), dtype=torch.uint8)
        for encoder in model.config.encoders
    }
    model.eval()
    assert torch.allclose(loaded.encode_clips(pixels), model.encode_clips(pixels), atol=1e-5)


@pytest.mark.parametrize("distance", [1, 16])
def test_a_seeded_head_looks_back_over_its_distance(model: ApolloModel, distance: int):
    seed_distance(model.llm, 0, 0, distance, sharp=True)
    model.llm.config._attn_implementation = "eager"
    hidden = torch.randn(1, 40, 128) * 0.15
    maps = model.llm.model(inputs_embeds=hidden, output_attentions=True).attentions
    assert maps is not None
    rows = maps[0][0, 0]
    assert all(int(rows[i].argmax()) == i - distance for i in range(distance, 40))


def test_the_tokenizer_keeps_numbers_whole_and_forgets_capitals(builder: PromptBuilder):
    encode = builder.tokenizer.encode
    assert encode("What is shown at 12 seconds?") == encode("WHAT is Shown at 12 Seconds?")
    number = builder.tokenizer.token_id("12")
    assert number in encode(",\n12.0-13.5 seconds: ")
    assert number in encode("\n\nwhat is shown at 12 seconds?")
    text = "naïve 日本 🎈"
    assert builder.tokenizer.decode(encode(text)) == text


def test_the_tokenizer_is_the_same_every_time():
    assert build_tokenizer().to_str() == build_tokenizer().to_str()
