"""What is trained on is what ``ask`` would send, and only answers are learned."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from apollo_cli import engine
from apollo_cli.config import GenerationOptions, SamplingOptions
from apollo_cli.engine import Apollo
from apollo_cli.errors import FitError, MediaError, UsageError
from apollo_cli.finetune.data.samples import Sample, Visual
from apollo_cli.finetune.training.examples import (
    IGNORED,
    Example,
    ExampleBuilder,
    plan_sample,
    reserve_of,
    sampling_of,
    spell_turns,
)
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.model.prompt import VISUAL_ID, PromptBuilder, Turn
from apollo_cli.model.tokenizer import load_tokenizer
from apollo_cli.video.probe import probe
from tests import tiny
from tests.cases import FOLDER
from tests.tiny import Tiny
from tests.waiting import PATIENCE_SECONDS, until

NANO = Path(__file__).parents[2] / "weights" / "nano"
CLIP, OTHER, PHOTO = FOLDER / "cfr30.mp4", FOLDER / "vfr_screen.mp4", FOLDER / "photo.jpg"
LONGER = FOLDER / "one_key_60s.mp4"
TALK = (Turn("what is this?", "a test"), Turn(" and then? ", "(nothing)"), Turn("why?", "42."))


@pytest.fixture(scope="module", params=["qwen_2", "qwen_1_5"])
def apollo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Apollo:
    folder = tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")
    return engine.load(folder, template=request.param, use_cache=False)


@pytest.fixture
def builder(apollo: Apollo) -> Iterator[ExampleBuilder]:
    with ExampleBuilder(apollo.planner, SamplingOptions()) as made:
        yield made


def sample_of(*visuals: Visual, turns: tuple[Turn, ...] = TALK[:1]) -> Sample:
    return Sample("bees.jsonl:1", turns, visuals)


def video(path: Path = CLIP, start: float = 0.0, end: float | None = None) -> Visual:
    return Visual(path, "video", start, end)


@pytest.mark.parametrize("template", ["qwen_2", "qwen_1_5"])
@pytest.mark.parametrize("tokenizer", [NANO / "llm", tiny.TOKENIZER])
@pytest.mark.parametrize("visual", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_turn_is_what_a_chat_would_send_and_hear(
    template: str, tokenizer: Path, visual: bool, count: int
):
    prompts = PromptBuilder(load_tokenizer(tokenizer), 2, 8, template)
    ids, labels = spell_turns(prompts, TALK[:count], visual)
    told = [Turn(turn.question.strip(), turn.answer) for turn in TALK]
    for number in range(count):
        sent = prompts.suffix_ids(told[number].question, told[:number], visual)
        heard = prompts.answer_ids(told[number].answer)
        assert ids[: len(sent) + len(heard)] == sent + heard
        assert labels[len(sent) : len(sent) + len(heard)] == heard
        assert heard[-1] == prompts.tokenizer.token_id(prompts.template.end_token)
    learned = [label for label in labels if label != IGNORED]
    assert learned == [i for turn in told[:count] for i in prompts.answer_ids(turn.answer)]


WINDOWS = [
    [video()],
    [video(CLIP, 1.0, 3.5)],
    [Visual(PHOTO, "image")],
    [video(OTHER, 2.0), Visual(PHOTO, "image"), video(CLIP)],
    [],
]


def heard_by_ask(apollo: Apollo, sample: Sample) -> tuple[list[int], dict, torch.Tensor | None]:
    """Ids, pixels and visual tokens that pass through the network when the sample is asked."""
    network, ids, pixels, visual = apollo.network, list[int](), [], []
    encode, embed = network.encode_clips, network.embed

    def note_pixels(given: dict[str, torch.Tensor]) -> torch.Tensor:
        pixels.append(given)
        return encode(given)

    def note_ids(given: list[int], tokens: torch.Tensor | None) -> torch.Tensor:
        ids.extend(given)
        visual.extend([] if tokens is None else [tokens])
        return embed(given, tokens)

    network.encode_clips, network.embed = note_pixels, note_ids  # pyright: ignore[reportAttributeAccessIssue]
    try:
        windows = sampling_of(sample, SamplingOptions())
        memories = [apollo.watch(v.path, w) for v, w in zip(sample.visuals, windows, strict=True)]
        *history, last = [Turn(t.question.strip(), t.answer) for t in sample.turns]
        apollo.ask(memories, last.question, GenerationOptions(max_new_tokens=1), history)
    finally:
        del network.encode_clips, network.embed
    joined = {name: torch.cat([p[name] for p in pixels]) for name in pixels[0]} if pixels else {}
    return ids, joined, torch.cat(visual) if visual else None


@pytest.mark.parametrize("visuals", WINDOWS, ids=["video", "window", "image", "several", "text"])
@pytest.mark.parametrize("turns", [TALK[:1], TALK], ids=["one turn", "three turns"])
def test_training_sees_what_ask_sees(
    apollo: Apollo, builder: ExampleBuilder, visuals: list[Visual], turns: tuple[Turn, ...]
):
    sample = sample_of(*visuals, turns=turns)
    example = builder.build(sample)
    ids, pixels, tokens = heard_by_ask(apollo, sample)
    answer = apollo.prompts.answer_ids(turns[-1].answer)
    assert example.ids == ids + answer
    assert (example.pixels or {}).keys() == pixels.keys()
    assert all(torch.equal(example.pixels[name], pixels[name]) for name in pixels)  # pyright: ignore[reportOptionalSubscript]
    (ours,) = Trainee(apollo.network, False).visual_tokens([example])
    assert (ours is None) == (tokens is None)
    if ours is not None and tokens is not None:
        assert torch.allclose(ours, tokens, atol=1e-6)


def test_only_answers_and_their_end_are_learned(apollo: Apollo, builder: ExampleBuilder):
    example = builder.build(sample_of(video(), turns=TALK[:2]))
    learned = [label for label in example.labels if label != IGNORED]
    both = [apollo.prompts.answer_ids(turn.answer) for turn in TALK[:2]]
    assert learned == both[0] + both[1]
    assert example.trained_tokens == len(learned)
    assert all(label in (IGNORED, i) for label, i in zip(example.labels, example.ids, strict=True))
    assert VISUAL_ID not in learned


def test_a_long_video_is_thinned_as_ask_thins_it(apollo: Apollo):
    sample = sample_of(video(LONGER), turns=TALK)
    with ExampleBuilder(apollo.planner, SamplingOptions(), max_tokens=500) as builder:
        example = builder.build(sample)
        planned = builder.plan(sample)
    text = len(spell_turns(apollo.prompts, TALK, True)[0])
    reserve = apollo.network.config.context - 500 + reserve_of(text)
    memory = apollo.watch(LONGER, reserve_tokens=reserve)
    assert example.ids[:-text] == apollo.prompts.prefix_ids([memory.part])
    assert len(example.ids) == planned.tokens <= 500
    assert 1 < len(memory) < 30


def test_clips_of_all_videos_share_the_budget(apollo: Apollo):
    sample = sample_of(video(LONGER, 0, 40), video(CLIP), Visual(PHOTO, "image"))
    with ExampleBuilder(apollo.planner, SamplingOptions(), max_tokens=500) as builder:
        planned = builder.plan(sample)
        assert len(builder.build(sample).ids) == planned.tokens <= 500
    clips = [len(file.plan) for file in planned.files]
    assert clips[0] > clips[1] >= clips[2] == 1
    assert planned.files[0].plan.end_seconds == 40


def test_text_is_never_cut(apollo: Apollo, builder: ExampleBuilder):
    talk = (Turn("why " * 600, "because"),)
    for visuals in ([], [video()]):
        with pytest.raises(FitError, match=r"bees.jsonl:1: .*allowed are 400; shorten the sample"):
            infos = [probe(visual.path) for visual in visuals]
            sample = sample_of(*visuals, turns=talk)
            plan_sample(apollo.planner, sample, infos, SamplingOptions(), 400)


def test_a_window_outside_the_video_is_an_error(builder: ExampleBuilder):
    with pytest.raises(UsageError):
        builder.build(sample_of(video(CLIP, 500.0)))


def test_a_broken_file_is_an_error_and_the_next_sample_is_read(builder: ExampleBuilder):
    for name in ("html_page.mp4", "missing.mp4", "empty.mp4"):
        with pytest.raises(MediaError, match=name):
            builder.build(sample_of(video(FOLDER / name)))
    assert builder.build(sample_of(video())).trained_tokens > 1


def test_notes_name_the_file(builder: ExampleBuilder):
    notes = builder.build(sample_of(video(FOLDER / "bit_flips.mp4"))).notes
    assert notes
    assert all(note.startswith("bit_flips.mp4: ") for note in notes)


def test_a_decoder_that_hangs_costs_the_time_limit_and_no_more(apollo: Apollo):
    with ExampleBuilder(apollo.planner, SamplingOptions()) as builder:
        child = builder.reader
        child.probe(CLIP)
        assert child.process_id is not None
        os.kill(child.process_id, signal.SIGSTOP)
        builder.read_seconds = 1.0
        with pytest.raises(MediaError, match="reading took longer than 1 s"):
            builder.build(sample_of(video()))
        builder.read_seconds = PATIENCE_SECONDS
        assert builder.build(sample_of(video())).trained_tokens > 1


def test_a_reading_can_be_interrupted_from_outside(apollo: Apollo):
    with (
        ExampleBuilder(apollo.planner, SamplingOptions()) as builder,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(builder.build, sample_of(video())).result()
        child = pool.submit(lambda: builder.reader.process_id).result()
        os.kill(child or 0, signal.SIGSTOP)
        reading = pool.submit(builder.build, sample_of(video()))
        until(reading.running)
        builder.interrupt()
        with pytest.raises(MediaError, match="ended from outside"):
            reading.result()
        assert pool.submit(builder.build, sample_of(video())).result().trained_tokens > 1


def test_a_reading_that_goes_on_and_on_is_ended(apollo: Apollo):
    with ExampleBuilder(apollo.planner, SamplingOptions(), read_seconds=60.0) as builder:
        info = builder.reader.probe(LONGER)
        plan = apollo.planner.plan_everything(info, SamplingOptions()).plan
        specs = [encoder.pixels for encoder in apollo.network.config.encoders]
        with pytest.raises(MediaError, match=r"longer than 0\.3 s"), builder.reader.time_limit(0.3):
            for _ in builder.reader.read_clips(info, plan.times, specs, batch_clips=1):
                time.sleep(0.05)


def test_threads_build_the_same_examples(builder: ExampleBuilder):
    samples = [sample_of(video()), sample_of(Visual(PHOTO, "image")), sample_of()] * 3
    one_by_one = [builder.build(sample) for sample in samples]
    readers = set()

    def build(sample: Sample) -> Example:
        readers.add((threading.get_ident(), id(builder.reader)))
        return builder.build(sample)

    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(build, samples))
    assert [e.ids for e in together] == [e.ids for e in one_by_one]
    assert len({reader for _, reader in readers}) == len({thread for thread, _ in readers})
    for ours, theirs in zip(one_by_one, together, strict=True):
        assert (ours.pixels is None) == (theirs.pixels is None)
        for name, pixels in (ours.pixels or {}).items():
            assert torch.equal(pixels, (theirs.pixels or {})[name])


def test_the_length_is_known_before_decoding(tmp_path: Path):
    small = engine.load(tiny.save(tmp_path / "small", Tiny(context=700)), use_cache=False)
    with ExampleBuilder(small.planner, SamplingOptions(max_clips=3)) as builder:
        for visuals in WINDOWS:
            sample = sample_of(*visuals, turns=TALK)
            assert builder.plan(sample).tokens == len(builder.build(sample).ids)
