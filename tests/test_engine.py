"""One loaded model, many questions: what is reused changes nothing, and the budget is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apollo_cli import engine
from apollo_cli.config import GenerationOptions, SamplingOptions
from apollo_cli.engine import Apollo
from apollo_cli.errors import FitError, UsageError, WeightsError
from apollo_cli.hardware import DeviceInfo
from apollo_cli.loaded_model import find_model
from apollo_cli.memory_plan import Fitted, fit_videos
from apollo_cli.model.prompt import Turn
from apollo_cli.planner import Spoken
from apollo_cli.video.probe import probe
from apollo_cli.video.subtitles import Subtitle
from apollo_cli.watcher import no_progress
from tests import tiny
from tests.tiny import Tiny

CASES = Path(__file__).parent / "cases"
CLIP, OTHER, PHOTO = CASES / "cfr30.mp4", CASES / "fps29_97.mp4", CASES / "photo.jpg"
LONGER = CASES / "one_key_60s.mp4"
SHORT = GenerationOptions(max_new_tokens=12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def apollo(checkpoint: Path) -> Apollo:
    return engine.load(checkpoint, use_cache=False)


def test_a_later_question_is_answered_as_by_a_fresh_engine(apollo: Apollo, checkpoint: Path):
    video = apollo.watch(CLIP)
    answers = [apollo.ask(video, question, SHORT).text for question in ("one?", "two?", "one?")]
    fresh = engine.load(checkpoint)
    again = fresh.ask(fresh.watch(CLIP), "two?", SHORT).text
    assert answers[1] == again
    assert answers[0] == answers[2]


def test_videos_of_equal_shape_are_never_mistaken_for_each_other(apollo: Apollo):
    sampling = SamplingOptions(max_clips=2)
    first = apollo.watch(CLIP, sampling)
    answer = apollo.ask(first, "one?", SHORT).text
    second = apollo.watch(CLIP, SamplingOptions(max_clips=2))
    second.tokens.neg_()
    assert apollo.ask(second, "one?", SHORT).text != answer
    assert apollo.ask(first, "one?", SHORT).text == answer


def test_the_streamed_pieces_are_the_whole_answer(apollo: Apollo):
    stream = apollo.stream(apollo.watch(CLIP), "one?", GenerationOptions(max_new_tokens=40))
    pieces = list(stream)
    assert stream.answer is not None
    assert "".join(pieces).rstrip() == stream.answer.text
    assert len(pieces) > 5


def test_an_abandoned_answer_leaves_no_trace(apollo: Apollo):
    video = apollo.watch(CLIP)
    whole = apollo.ask(video, "one?", SHORT).text
    for _ in apollo.stream(video, "two?", SHORT):
        break
    assert apollo.ask(video, "one?", SHORT).text == whole


def test_several_videos_and_an_image_share_one_question(apollo: Apollo):
    memories = apollo.watch_all([CLIP, PHOTO, OTHER])
    answer = apollo.ask(memories, "one?", SHORT)
    assert [video["clips"] for video in answer.videos] == [2, 1, 2]
    assert answer.tokens.visual == 5 * 8


def test_text_alone_is_answered_without_visual_tokens(apollo: Apollo):
    answer = apollo.ask(None, "one?", SHORT)
    assert answer.tokens.visual == 0
    assert answer.videos == ()


def test_an_earlier_turn_changes_the_prompt(apollo: Apollo):
    video = apollo.watch(CLIP)
    plain = apollo.ask(video, "two?", SHORT)
    told = apollo.ask(video, "two?", SHORT, history=[Turn("one?", "yes")])
    assert told.tokens.text > plain.tokens.text


def test_the_same_seed_gives_the_same_sampled_answer(apollo: Apollo):
    video = apollo.watch(CLIP)
    warm = [GenerationOptions(max_new_tokens=12, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    first, same, other = (apollo.ask(video, "one?", options).text for options in warm)
    assert first == same
    assert first != other


@pytest.mark.parametrize(
    "options",
    [
        GenerationOptions(max_new_tokens=8, temperature=0.001),
        GenerationOptions(max_new_tokens=8, temperature=100.0),
        GenerationOptions(max_new_tokens=8, temperature=1.0, top_p=0.0001),
    ],
)
def test_the_outermost_values_of_sampling_give_an_answer(
    apollo: Apollo, options: GenerationOptions
):
    assert apollo.ask(None, "one?", options).tokens.answer == 8


def test_everything_that_is_counted_fits_the_context(tmp_path: Path):
    small = engine.load(tiny.save(tmp_path / "small", Tiny(context=600)))
    suffix = len(small.prompts.suffix_ids("one?"))
    video = small.watch(LONGER, reserve_tokens=suffix + 12)
    answer = small.ask(video, "one?", SHORT)
    assert 1 < len(video) < 30
    assert answer.tokens.total <= 600
    assert "seen of every" in video.plan.describe()
    # One more clip would not have fitted.
    assert answer.tokens.total + answer.tokens.visual // len(video) + 20 > 600


def test_a_longer_question_thins_clips_out_and_says_so(tmp_path: Path):
    small = engine.load(tiny.save(tmp_path / "small", Tiny(context=600)))
    video = small.watch(LONGER, reserve_tokens=40)
    answer = small.ask(video, "why " * 60, SHORT)
    assert answer.tokens.total <= 600
    assert any("clips fit beside this question" in note for note in answer.notes)
    assert answer.videos[0]["clips"] < len(video)


def test_a_question_that_cannot_fit_is_refused_with_the_numbers(apollo: Apollo):
    video = apollo.watch(CLIP)
    with pytest.raises(FitError, match="holds 4096"):
        apollo.ask(video, "why " * 5000, SHORT)
    with pytest.raises(FitError, match="holds 4096"):
        apollo.ask(None, "why " * 5000, SHORT)


def test_an_empty_question_is_refused(apollo: Apollo):
    with pytest.raises(UsageError, match="empty"):
        apollo.ask(None, "  ")


def test_a_batch_that_is_too_large_halves_itself_and_says_so(
    apollo: Apollo, monkeypatch: pytest.MonkeyPatch
):
    whole = apollo.watch(LONGER, SamplingOptions(max_clips=7)).tokens
    encode = apollo.network.encode_clips

    def encode_at_most_one(pixels: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(next(iter(pixels.values()))) > 1:
            raise torch.OutOfMemoryError
        return encode(pixels)

    monkeypatch.setattr(apollo.network, "encode_clips", encode_at_most_one)
    monkeypatch.setattr(apollo.watcher, "encode_batch", 4)
    halved = apollo.watch(LONGER, SamplingOptions(max_clips=7))
    torch.testing.assert_close(whole, halved.tokens, rtol=0, atol=1e-5)
    assert [note.split(": ")[0] for note in halved.notes] == ["out of memory", "out of memory"]


def test_learned_ends_and_missing_labels_are_counted(tmp_path: Path):
    both = engine.load(tiny.save(tmp_path / "both", Tiny(integration="both")))
    plain = engine.load(tiny.save(tmp_path / "plain", Tiny(integration="plain")))
    counts = [a.ask(a.watch(CLIP), "one?", SHORT).tokens for a in (both, plain)]
    assert [count.visual for count in counts] == [20, 16]
    assert counts[0].text > counts[1].text


def test_a_model_that_was_not_downloaded_names_the_command_that_fetches_it():
    with pytest.raises(WeightsError, match="apollo models pull"):
        engine.load("apollo-3b")


def test_a_prompt_that_runs_out_of_memory_is_read_again_in_smaller_steps(
    apollo: Apollo, monkeypatch: pytest.MonkeyPatch
):
    video = apollo.watch(CLIP)
    whole = apollo.ask(video, "one?", SHORT).text
    session = engine.Session(apollo.network, apollo.prompts)
    monkeypatch.setattr(apollo, "session", session)
    read = session._read
    sizes = []

    def read_small_only(*arguments: Any) -> torch.Tensor:
        sizes.append(session.chunk_tokens)
        if session.chunk_tokens > 256:
            raise torch.OutOfMemoryError
        return read(*arguments)

    monkeypatch.setattr(session, "_read", read_small_only)
    assert apollo.ask(video, "one?", SHORT).text == whole
    assert sizes == [2048, 256]

    def never(*arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(session, "_read", never)
    with pytest.raises(FitError, match="--fit auto"):
        apollo.ask(video, "one?", SHORT)


def fit(checkpoint: Path, file: Path, spoken: Spoken | None = None) -> Fitted:
    found = find_model(checkpoint, device="cpu")
    return fit_videos(
        found.planner,
        found.hardware,
        [probe(file)],
        SamplingOptions(),
        spoken=spoken and [spoken],
        question_bytes=20,
        answer_tokens=12,
    )


def test_a_fit_to_the_free_memory_gives_up_what_it_says(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    def fit_in(free: int) -> Fitted:
        monkeypatch.setattr(
            "apollo_cli.hardware.list_devices", lambda: [DeviceInfo("cpu", "", free, free)]
        )
        return fit(checkpoint, LONGER)

    roomy = fit_in(10**10)
    assert roomy.given_up == ()
    assert roomy.settings.clips == 30
    tight = fit_in(roomy.estimate.peak - 1)
    assert tight.given_up
    assert tight.estimate.peak < roomy.estimate.peak
    fitted = engine.load(checkpoint, settings=tight.settings, use_cache=False)
    assert fitted.watcher.encode_batch == tight.settings.encode_batch
    with pytest.raises(FitError, match="smaller model"):
        fit_in(10**6)


def test_only_clips_that_were_given_up_limit_what_is_seen_later(checkpoint: Path):
    fitted = fit(checkpoint, PHOTO).settings
    assert (fitted.clips, fitted.most_clips) == (1, None)
    for settings, clips in ((fitted, 30), (replace(fitted, most_clips=3), 3)):
        apollo = engine.load(checkpoint, settings=settings, use_cache=False)
        assert len(apollo.watch(LONGER)) == clips


def test_what_is_said_in_a_video_is_part_of_what_must_fit(checkpoint: Path):
    words = Spoken(tuple(Subtitle(k, k + 1, "many words " * 8) for k in range(60)), "listed")
    silent, told = fit(checkpoint, LONGER), fit(checkpoint, LONGER, words)
    assert told.estimate.kv_cache > silent.estimate.kv_cache


def test_reading_and_writing_tell_how_far_they_are_and_can_be_stopped(apollo: Apollo):
    class Enough(Exception):
        pass

    video, session, told = apollo.watch(LONGER), apollo.session, list[tuple[str, int, int]]()
    whole = apollo.ask(video, "one?", SHORT)
    session.on_progress = lambda *step: told.append(step)
    session._forget()
    assert apollo.ask(video, "one?", SHORT).text == whole.text
    length = whole.tokens.visual + whole.tokens.text
    assert told[0] == ("read", 0, length)
    assert ("read", length, length) in told
    assert told[-1] == ("write", whole.generated, SHORT.max_new_tokens)

    def stop_at(stage: str, done: int) -> None:
        def stop(*step: Any) -> None:
            if step[:1] == (stage,) and step[1] >= done:
                raise Enough

        session.on_progress = stop
        with pytest.raises(Enough):
            apollo.ask(video, "two?", SHORT)
        session.on_progress = no_progress

    session._forget()
    stop_at("read", 1)
    stop_at("read", length)
    stop_at("write", 3)
    assert apollo.ask(video, "one?", SHORT).text == whole.text
