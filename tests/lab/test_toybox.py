"""The drawn world: the same from the same seed, true to its facts, and readable as a file."""

import re
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest

from lab.phrases import KIND_PATTERNS
from lab.questions import (
    EXTRA_KINDS,
    KINDS,
    Question,
    ask,
    is_right,
    list_things,
)
from lab.toybox import (
    COLOURS,
    NEW_SHAPES,
    SHAPES,
    draw,
    draw_owners,
    place,
    sample_world,
    with_new_shape,
    write_video,
)
from lab.videos import CLASSES, MOTIONS, label_patches

SEEDS = range(40)


def test_a_seed_gives_the_same_world_and_the_same_pictures():
    for seed in SEEDS:
        first, again = sample_world(seed), sample_world(seed)
        assert first == again
        assert np.array_equal(draw(first, 1.3), draw(again, 1.3))
    assert len({sample_world(seed) for seed in SEEDS}) == len(SEEDS)


def test_a_new_shape_changes_that_thing_alone():
    for seed in SEEDS:
        old = sample_world(seed)
        assert not {thing.shape for thing in old.things} & set(NEW_SHAPES)
        new = with_new_shape(old, "ring")
        seconds = old.things[0].start_seconds
        differs = (draw(new, seconds) != draw(old, seconds)).any(axis=2)
        assert differs.any()
        firsts = [replace(world, things=world.things[:1], digit=None) for world in (old, new)]
        owners = [draw_owners(first, seconds) for first in firsts]
        assert not differs[(owners[0] == 0) & (owners[1] == 0)].any()
        question = ask(new, "describe", np.random.default_rng(seed))
        assert question is not None
        assert "ring" in question.answer


def test_a_ring_has_a_hole():
    world = replace(sample_world(3), digit=None)
    ring = replace(world.things[0], shape="ring", x=0.5, y=0.5, direction=None, rate=0.0)
    owners = draw_owners(replace(world, things=(ring,)), ring.start_seconds)
    middle = owners[world.height // 2]
    assert middle[world.width // 2] == 0
    assert np.count_nonzero(np.diff(middle)) == 4


def test_worlds_keep_to_what_questions_assume():
    for seed in SEEDS:
        world = sample_world(seed)
        assert 5 <= world.duration_seconds <= 60
        assert 1 <= len(world.things) <= 3
        assert len({t.shape for t in world.things}) == len(world.things)
        assert len({t.colour for t in world.things}) == len(world.things)
        for thing in world.things:
            assert 0 <= thing.start_seconds < thing.end_seconds <= world.duration_seconds
            assert thing.end_seconds - thing.start_seconds >= 1.9
        if world.digit is not None:
            assert world.digit.end_seconds - world.digit.start_seconds >= 1.2


def test_pixels_show_a_thing_exactly_while_it_is_there():
    for seed in SEEDS:
        world = sample_world(seed)
        for number, thing in enumerate(world.things, start=1):
            alone = replace(world, things=(thing,), digit=None)
            for seconds in (thing.start_seconds - 0.05, thing.start_seconds + 0.05):
                shown = bool((draw_owners(alone, seconds) == 1).any())
                assert shown == thing.is_there(seconds), (seed, number, seconds)


@pytest.mark.parametrize(
    ("direction", "axis", "sign"), [("left", 0, -1), ("right", 0, 1), ("up", 1, -1), ("down", 1, 1)]
)
def test_things_move_the_way_they_say(direction: str, axis: int, sign: int):
    world = sample_world(3)
    thing = replace(world.things[0], direction=direction, rate=0.05, x=0.5, y=0.5)
    moved = np.subtract(place(world, thing, 1.0), place(world, thing, 0.0))
    assert moved[axis] == pytest.approx(sign * 0.05 * max(world.width, world.height))
    assert moved[1 - axis] == pytest.approx(0)


def test_patch_labels_name_what_is_drawn_there():
    world = sample_world(11, 4.0, crowded=True)
    labels = label_patches(world, np.arange(4) / 2)
    shapes = {SHAPES[value - 1] for value in np.unique(labels["shape"]) if value}
    colours = {list(COLOURS)[value - 1] for value in np.unique(labels["colour"]) if value}
    assert shapes <= {thing.shape for thing in world.things}
    assert colours <= {thing.colour for thing in world.things}
    assert shapes
    assert all(labels[name].max() < count for name, count in CLASSES.items())
    assert labels["motion"].max() < len(MOTIONS)


def test_a_file_shows_what_was_drawn(tmp_path: Path):
    world = replace(sample_world(5, 5.0), fps=10)
    write_video(world, tmp_path / "world.mp4", scale=2)
    with av.open(str(tmp_path / "world.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        stream = container.streams.video[0]
        assert stream.duration is not None and stream.time_base is not None
        assert float(stream.duration * stream.time_base) == pytest.approx(5.0)
    assert len(frames) == world.frame_count
    assert frames[0].shape[:2] == (2 * world.height, 2 * world.width)
    large = replace(world, width=2 * world.width, height=2 * world.height)
    difference = np.abs(frames[17].astype(int) - draw(large, 1.7).astype(int))
    assert difference.mean() < 4


def test_answers_follow_from_the_facts():
    seen = set()
    for seed in range(120):
        world, rng = sample_world(seed), np.random.default_rng(seed)
        for kind in (*KINDS, *EXTRA_KINDS):
            question = ask(world, kind, rng)
            if question is None:
                continue
            seen.add(kind)
            assert question.kind == kind
            assert is_right(question, question.answer)
            assert is_right(question, question.answer.upper() + ".")
            assert not is_right(question, "pancake")
            if kind == "colour":
                assert question.answer in {thing.colour for thing in world.things}
            if kind == "choice":
                assert question.answer in question.text
    assert seen == {*KINDS, *EXTRA_KINDS}


def test_patterns_tell_the_kind_of_every_question():
    for seed in range(300):
        world, rng = sample_world(seed), np.random.default_rng(seed)
        for kind in (*KINDS, *EXTRA_KINDS):
            question = ask(world, kind, rng)
            if question is not None:
                text = question.text.lower()
                first = next(k for k, p in KIND_PATTERNS.items() if re.search(p, text))
                assert first == kind, text


def test_yes_and_no_are_about_equally_often_right():
    rng = np.random.default_rng(0)
    asked = [ask(sample_world(seed), "yesno", rng) for seed in range(400)]
    share = np.mean([question is not None and question.answer == "yes" for question in asked])
    assert 0.4 < share < 0.6


@pytest.mark.parametrize(
    ("answer", "right"),
    [("at 6 seconds", True), ("at 7 seconds", True), ("at 8 seconds", False), ("at 5", False)],
)
def test_when_is_right_within_a_second(answer: str, right: bool):
    question = Question("when", "When does the ball appear?", "at 6 seconds", seconds=6.4)
    assert is_right(question, answer) == right


def test_a_list_of_things_reads_like_english():
    red, blue, green = (
        replace(sample_world(0).things[0], colour=c) for c in ("red", "blue", "green")
    )
    shape = red.shape
    assert list_things([], None) == "nothing"
    assert list_things([], 4) == "the digit 4"
    assert list_things([red, blue], None) == f"a red {shape} and a blue {shape}"
    wanted = f"a red {shape}, a blue {shape}, a green {shape} and the digit 7"
    assert list_things([red, blue, green], 7) == wanted
