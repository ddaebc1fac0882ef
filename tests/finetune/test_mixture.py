"""The mixture: the same for everyone at any time, true to its shares, and each sample in turn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from apollo_cli.errors import DataError
from apollo_cli.finetune.data.dataset import Mixture
from apollo_cli.finetune.data.samples import Sample, Visual
from apollo_cli.model.prompt import Turn


def samples(letter: str, count: int, *visuals: Visual) -> list[Sample]:
    return [Sample(f"{letter}{n}", (Turn("q", "a"),), visuals) for n in range(count)]


A, B, C = samples("a", 10), samples("b", 1000), samples("c", 7)
KEPT_ORDER = "a2 a0 a3 a9 a4 a7 a5 a1 a8 a6"
SOURCES = [(A, 0.6), (B, 0.3), (C, 0.1)]


def names(mixture: Mixture, slots: range) -> list[str]:
    return [mixture.sample_at(slot).name for slot in slots]


def test_any_process_at_any_time_gets_the_same_sample() -> None:
    forward = names(Mixture(SOURCES, seed=3), range(300))
    late = Mixture(SOURCES, seed=3)
    assert [late.sample_at(slot).name for slot in reversed(range(300))] == forward[::-1]


def test_the_order_is_the_same_in_every_version() -> None:
    # Kept as it was when first written: a resumed run must go on with the same samples.
    assert names(Mixture([(A, 1.0)], seed=0), range(10)) == KEPT_ORDER.split()


def test_every_stretch_from_the_start_keeps_the_shares() -> None:
    shares = {"a": 0.6, "b": 0.3, "c": 0.1}
    seen: Counter[str] = Counter()
    mixture = Mixture(SOURCES, seed=3)
    for slot in range(2000):
        seen[mixture.sample_at(slot).name[0]] += 1
        for letter, share in shares.items():
            assert abs(seen[letter] - share * (slot + 1)) <= 1.5


def test_shares_of_a_thousandth_and_of_equal_parts_hold_too() -> None:
    rare = Mixture([(A, 0.001), (B, 0.999)], seed=0)
    assert sum(name[0] == "a" for name in names(rare, range(4000))) == 4
    equal = names(Mixture([(A, 1), (B, 1), (C, 1)], seed=0), range(30))
    assert all({name[0] for name in equal[n : n + 3]} == {"a", "b", "c"} for n in range(0, 30, 3))


def test_in_a_source_every_sample_comes_once_before_any_comes_twice() -> None:
    drawn = [name for name in names(Mixture(SOURCES, 5), range(200)) if name[0] == "a"]
    epochs = [drawn[n : n + 10] for n in range(0, 100, 10)]
    assert all(len(set(epoch)) == 10 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_broken_sample_is_replaced_by_others_of_its_source_in_turn() -> None:
    mixture = Mixture(SOURCES, seed=3)
    slot = next(n for n in range(100) if mixture.sample_at(n).name[0] == "c")
    tried = [mixture.sample_at(slot, attempt).name for attempt in range(7)]
    assert sorted(tried) == [sample.name for sample in C]
    assert mixture.sample_at(slot, 2).name == tried[2]


def test_shares_of_kinds_follow_the_sources() -> None:
    photo, clip = Visual(Path("/p.jpg"), "image"), Visual(Path("/v.mp4"), "video")
    mixed = samples("m", 2, photo) + samples("n", 2, photo, photo)
    sources = [(A, 0.2), (mixed, 0.4), (samples("v", 3, photo, clip), 0.4)]
    shares = Mixture(sources, seed=0).shares()
    assert {kind: round(share, 3) for kind, share in shares.items()} == {
        "text": 0.2,
        "image": 0.2,
        "multi-image": 0.2,
        "video": 0.4,
    }


@pytest.mark.parametrize("sources", [[], [([], 1.0)], [(A, 0.0)]])
def test_an_empty_source_is_an_error(sources: list[tuple[list[Sample], float]]) -> None:
    with pytest.raises(DataError, match="empty source"):
        Mixture(sources, seed=0)
