"""The feed: the same order for everybody, a broken sample costs itself only, and a clean end."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pytest

from apollo_cli.errors import DataError, DeviceError, MediaError
from apollo_cli.finetune.data.dataset import Mixture
from apollo_cli.finetune.data.samples import Sample, Visual
from apollo_cli.finetune.training.examples import Example
from apollo_cli.finetune.training.feed import Feed, Quarantine, SlotOrder, read_quarantine
from apollo_cli.model.prompt import Turn
from tests.waiting import PATIENCE_SECONDS


def samples(count: int, source: str = "a") -> list[Sample]:
    video = Visual(Path("/videos/7.mp4"), "video")
    return [Sample(f"{source}:{i}", (Turn("What?", "This."),), (video,)) for i in range(count)]


@dataclass
class Reading:
    """A builder that is told which samples are broken, and how long reading takes."""

    broken: frozenset[str] = frozenset()
    seconds: Callable[[str], float] = lambda name: 0.0
    seen: list[str] = field(default_factory=list)
    interrupted: threading.Event = field(default_factory=threading.Event)

    def build(self, sample: Sample) -> Example:
        self.seen.append(sample.name)
        if self.interrupted.wait(self.seconds(sample.name)):
            raise MediaError("the decoder crashed (signal 9)")
        if sample.name in self.broken:
            raise MediaError("7.mp4: no picture can be read", next_step="convert the file")
        return Example(sample.name, [1, 2], [-100, 2])

    def interrupt(self) -> None:
        self.interrupted.set()


def ignore(_: str) -> None:
    """Say nothing."""


def feed(
    mixture: Mixture, builder: Reading, slots: Iterable[int], quarantine: Quarantine, **options
) -> Feed:
    options = {"readers": 2, "ahead": 6, "length_of": lambda slot: 10, "say": ignore} | options
    return Feed(mixture, builder, slots, quarantine, **options)


def take(mixture: Mixture, builder: Reading, count: int, path: Path) -> list[str]:
    with feed(mixture, builder, range(count), Quarantine(path, ignore)) as source:
        return [source.take().name for _ in range(count)]


def expected(mixture: Mixture, count: int) -> list[str]:
    return [mixture.sample_at(slot).name for slot in range(count)]


def test_samples_come_in_the_order_of_their_slots_however_long_each_takes(tmp_path: Path):
    mixture = Mixture([(samples(8), 1.0)], seed=1)
    builder = Reading(seconds=lambda name: 0.02 * (int(name[-1]) % 3))
    assert take(mixture, builder, 16, tmp_path / "q") == expected(mixture, 16)


def test_a_broken_sample_is_written_down_once_and_replaced(tmp_path: Path):
    mixture = Mixture([(samples(8), 1.0)], seed=1)
    builder = Reading(broken=frozenset({"a:3"}))
    said: list[str] = []
    path = tmp_path / "quarantine.jsonl"
    with feed(mixture, builder, range(24), Quarantine(path, said.append)) as source:
        names = [source.take().name for _ in range(24)]
    plain = expected(mixture, 24)
    assert [n for n, p in zip(names, plain, strict=True) if p != "a:3"] == [
        p for p in plain if p != "a:3"
    ]
    assert "a:3" not in names
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["name"], row["files"]) for row in rows] == [("a:3", ["/videos/7.mp4"])]
    assert rows[0]["reason"] == "7.mp4: no picture can be read; convert the file"
    assert said == [f"sample a:3 is left out: {rows[0]['reason']}"]


def test_the_same_samples_come_after_a_stop_without_trying_the_broken_one_again(tmp_path: Path):
    mixture = Mixture([(samples(8), 1.0)], seed=1)
    whole = take(mixture, Reading(broken=frozenset({"a:3"})), 24, tmp_path / "q")
    second = Reading(broken=frozenset({"a:3"}))
    assert take(mixture, second, 24, tmp_path / "q") == whole
    assert "a:3" not in second.seen


def test_a_cut_line_of_a_quarantine_file_is_no_fault(tmp_path: Path):
    path = tmp_path / "q"
    path.write_text('{"name": "a:1", "files": ["/videos/7.mp4"]}\n{"name": "a')
    assert [row["name"] for row in read_quarantine(path)] == ["a:1"]
    quarantine = Quarantine(path, ignore)
    assert [s in quarantine for s in samples(3)] == [False, True, False]


def test_a_run_whose_samples_are_mostly_broken_ends(tmp_path: Path):
    mixture = Mixture([(samples(100), 1.0)], seed=1)
    builder = Reading(broken=frozenset(s.name for s in samples(100)))
    with pytest.raises(DataError, match=r"\d+ of the first .* samples cannot be read.*7\.mp4"):
        take(mixture, builder, 50, tmp_path / "q")


def test_a_source_of_broken_samples_ends_the_run_with_what_to_do(tmp_path: Path):
    mixture = Mixture([(samples(30), 9.0), (samples(2, "b"), 1.0)], seed=1)
    builder = Reading(broken=frozenset({"b:0", "b:1"}))
    with pytest.raises(DataError, match=r"neither b:. nor .* finetune check"):
        take(mixture, builder, 30, tmp_path / "q")


def test_a_fault_of_the_machine_is_not_the_samples(tmp_path: Path):
    class Machine(Reading):
        def build(self, sample: Sample) -> Example:
            raise DeviceError("no device")

    mixture = Mixture([(samples(3), 1.0)], seed=1)
    with pytest.raises(DeviceError):
        take(mixture, Machine(), 3, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_what_is_stuck_is_named_and_an_end_does_not_wait_for_it(tmp_path: Path):
    mixture = Mixture([(samples(4), 1.0)], seed=1)
    said: list[str] = []
    threads = threading.active_count()
    quarantine = Quarantine(tmp_path / "q", ignore)
    builder = Reading(seconds=lambda name: PATIENCE_SECONDS)

    def interrupt(line: str) -> None:
        said.append(line)
        raise KeyboardInterrupt

    source = feed(mixture, builder, range(4), quarantine, say=interrupt, slow_seconds=0.1)
    with pytest.raises(KeyboardInterrupt), source:
        source.take()
    assert said[0].startswith("still reading 7.mp4, ")
    assert threading.active_count() == threads
    # An end is no fault of the samples that were being read.
    assert len(quarantine) == 0


def test_no_more_is_read_ahead_than_allowed(tmp_path: Path):
    mixture = Mixture([(samples(50), 1.0)], seed=1)
    builder = Reading()
    with feed(mixture, builder, range(50), Quarantine(tmp_path / "q", ignore), ahead=4) as source:
        source.take()
        time.sleep(0.1)
        assert len(builder.seen) <= 4
    heavy = Reading()
    options = {"ahead": 40, "length_of": lambda slot: 15_000}
    with feed(mixture, heavy, range(50), Quarantine(tmp_path / "q", ignore), **options) as source:
        source.take()
        time.sleep(0.1)
        assert len(heavy.seen) <= 2


def test_processes_share_the_slots_of_a_step():
    order = SlotOrder(8, 4, 0, None)
    assert order.slots(1) == list(range(8, 16))
    shared = [order.slots(1, process, 3) for process in range(3)]
    assert sorted(chain(*shared)) == order.slots(1)


@pytest.mark.parametrize("steps", [1, 16, 37])
def test_length_grouping_takes_each_slot_once_and_like_lengths_together(steps: int):
    def length(slot: int) -> int:
        return (slot * 7919) % 1000

    order = SlotOrder(4, steps, 0, length)
    batches = [order.slots(step) for step in range(steps)]
    assert sorted(chain(*batches)) == list(range(4 * steps))
    spread = sum(max(map(length, b)) - min(map(length, b)) for b in batches) / steps
    assert steps == 1 or spread < 120


def test_length_grouping_is_the_same_from_any_step_on():
    def length(slot: int) -> int:
        return (slot * 7919) % 1000

    order, late = SlotOrder(4, 40, 5, length), SlotOrder(4, 40, 5, length)
    assert [late.slots(step) for step in (33, 2, 17)] == [order.slots(s) for s in (33, 2, 17)]
