"""Answers that can be checked: choices, the blind check, cited times, loops that are stopped."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from apollo_cli import engine
from apollo_cli.answer import cited_times, clock, times_in
from apollo_cli.config import GenerationOptions
from apollo_cli.engine import Apollo
from apollo_cli.errors import UsageError
from apollo_cli.scoring import BlindCheck, blind_check, choose, lettered, shuffle
from apollo_cli.session import is_looping
from apollo_cli.video.sampler import ClipPlan
from apollo_cli.video_memory import VideoMemory
from tests import tiny

CASES = Path(__file__).parent / "cases"
SHORT = GenerationOptions(max_new_tokens=8)


@pytest.fixture(scope="module")
def apollo(tmp_path_factory: pytest.TempPathFactory) -> Apollo:
    folder = tiny.save(tmp_path_factory.mktemp("honest") / "checkpoint")
    return engine.load(folder, use_cache=False)


@pytest.fixture(scope="module")
def video(apollo: Apollo) -> VideoMemory:
    return apollo.watch(CASES / "one_key_60s.mp4")


def memory_at(starts: list[float], duration: float) -> VideoMemory:
    times = np.array(starts)[:, None] + np.arange(4) * 0.5
    plan = ClipPlan(times, 2.0, 0.0, duration, math.ceil(duration / 2))
    tokens = torch.zeros(len(starts), 8, 32)
    return VideoMemory(Path("/x.mp4"), "video", duration, plan, tokens, times, 2)


def test_probabilities_sum_to_one_and_do_not_depend_on_the_order(
    apollo: Apollo, video: VideoMemory
):
    options = ("red", "blue", "green")
    choice = choose(apollo, [video], "Which?", options)
    assert sum(choice.probabilities) == pytest.approx(1)
    turned = choose(apollo, [video], "Which?", (*options[1:], options[0]))
    found = dict(zip(turned.options, turned.probabilities, strict=True))
    for option, share in zip(choice.options, choice.probabilities, strict=True):
        assert found[option] == pytest.approx(share, abs=1e-4)
    assert choice.to_dict()["answer"] == choice.options[choice.index]


def test_choices_are_shown_as_the_benchmarks_write_them():
    assert lettered("Which?", ["red", "blue"]) == (
        "Which?\nA. red\nB. blue\nAnswer with the option's letter from the given choices directly."
    )


@pytest.mark.parametrize("options", [("red",), ("red", "red"), tuple("abcdefghijk")])
def test_choices_that_cannot_be_told_apart_are_refused(
    options: tuple[str, ...], apollo: Apollo, video: VideoMemory
):
    with pytest.raises(UsageError, match="2 to 10"):
        choose(apollo, [video], "Which?", options)


def test_the_score_of_an_answer_is_what_generation_would_give_it(
    apollo: Apollo, video: VideoMemory
):
    suffix = apollo.prompts.suffix_ids("one?")
    answer = [11, 12, 13]
    score = apollo.session.score([video], suffix, answer)
    ids = apollo.prompts.prefix_ids([video.part]) + suffix + answer
    embeddings = apollo.network.embed(ids, video.tokens.flatten(0, 1))
    with torch.inference_mode():
        logits = apollo.network.llm(inputs_embeds=embeddings).logits[0].log_softmax(-1)
    places = range(len(ids) - 4, len(ids) - 1)
    expected = sum(float(logits[p, t]) for p, t in zip(places, answer, strict=True)) / 3
    assert score == pytest.approx(expected, abs=1e-4)


def test_the_blind_check_asks_without_the_video_and_with_shuffled_clips(
    apollo: Apollo, video: VideoMemory
):
    seen = apollo.ask(video, "one?", SHORT)
    check = blind_check(apollo, [video], seen, SHORT)
    assert check.blind.tokens.visual == 0
    assert check.shuffled is not None
    assert check.shuffled.tokens == seen.tokens
    assert apollo.ask(video, "one?", SHORT).text == seen.text
    same = BlindCheck(seen, seen, None)
    assert "may not rest on what was seen" in same.verdict


def test_shuffling_moves_every_clip_under_other_times_and_loses_none(video: VideoMemory):
    mixed = shuffle(video)
    assert not torch.equal(mixed.tokens, video.tokens)
    assert torch.equal(mixed.tokens.sum(0).round(decimals=2), video.tokens.sum(0).round(decimals=2))
    assert mixed.part == video.part


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("It appears at 12 seconds.", [12.0]),
        ("From 12.5-14.0 seconds and again at 1:05.", [12.5, 14.0, 65.0]),
        ("at 0:01:02", [62.0]),
        ("between 3 and 5 s", [3.0, 5.0]),
        ("There are 5 cars and 12 people.", []),
        ("at 300 seconds", []),
        ("ratio 16:9 of 2:75", []),
        ("at 7.123456789 s and 0:08.123456789", [7.123456789, 8.123456789]),
        ("1234567 seconds, 1.2.3 s", []),
    ],
)
def test_times_in_an_answer_are_found_and_others_are_not(text: str, seconds: list[float]):
    memory = memory_at([0, 10, 20, 60, 100], 200)
    assert [citation.seconds for citation in cited_times(text, memory)] == seconds


def test_a_cited_time_is_tied_to_the_clip_that_was_seen_or_said_to_be_unseen():
    inside, outside = cited_times("at 11 s and at 15 s", memory_at([0, 10, 20], 30))
    assert (inside.clip_seconds, inside.seen) == ((10, 12), True)
    assert (outside.clip_seconds, outside.seen) == ((10, 12), False)
    assert "nearest clip is 0:10-0:12" in outside.describe()
    assert [clock(t) for t in (5, 65.9, 3723)] == ["0:05", "1:05", "1:02:03"]


@pytest.mark.parametrize("piece", ["1", "1 ", "1.", "1-", "1:", "0:00:", "1 and ", "1 - ", "1.1 "])
@pytest.mark.parametrize(
    ("head", "tail"), [("", ""), ("1.", " s"), ("1", ":"), ("0:00.", ":"), ("1 to ", " seconds")]
)
def test_no_answer_takes_long_to_be_searched_for_times(head: str, piece: str, tail: str):
    def seconds(count: int) -> float:
        # Of this thread alone, whatever else the machine does.
        started = time.thread_time()
        for *_, moments in times_in(head + piece * count + " " * count + tail):
            assert all(clock(moment) for moment in moments)
        return time.thread_time() - started

    # Ten times as much takes ten times as long, not a hundred times.
    assert seconds(20_000) < 50 * max(seconds(2_000), 0.002)


def test_a_loop_is_noticed_and_honest_text_is_not():
    assert is_looping([1, 2, 3] + [7, 8] * 12)
    assert is_looping([9] * 24)
    assert not is_looping([9] * 20)
    assert not is_looping(list(range(200)))
    assert not is_looping([n // 2 for n in range(100)])


def test_an_answer_that_repeats_itself_is_stopped_and_said(
    apollo: Apollo, video: VideoMemory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(apollo.session, "write", lambda logits, options: iter([11, 12] * 100))
    answer = apollo.ask(video, "one?", GenerationOptions(max_new_tokens=300))
    assert answer.stop == "repetition"
    assert answer.generated == 24
    assert any("repeat itself" in note for note in answer.notes)
