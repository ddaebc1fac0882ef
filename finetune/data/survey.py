"""Looking at all files of a data set once, without decoding: what is broken, what is too long."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from apollo_cli.config import SamplingOptions
from apollo_cli.errors import FitError, MediaError, UsageError
from apollo_cli.finetune.data.samples import Fault, Sample, Visual
from apollo_cli.finetune.training.examples import (
    IGNORED,
    is_bound,
    plan_sample,
    reserve_of,
    spell_turns,
)
from apollo_cli.planner import Planner
from apollo_cli.text import count
from apollo_cli.video.container import shown
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.sampler import ClipPlan
from apollo_cli.watcher import Progress, no_progress

if TYPE_CHECKING:
    from apollo_cli.finetune.recipe import Recipe

_END_SLACK_SECONDS = 0.5
_STALL_SECONDS = 30.0
_MOST_PLANS = 1024


@dataclass(frozen=True)
class Length:
    """How long a sample is.

    Attributes:
        tokens: in all. trained: tokens that the loss looks at. clips: of all its files.
        coverage: share of the least seen video that lies inside a clip.
    """

    tokens: int
    trained: int
    clips: int = 0
    coverage: float = 1.0


@dataclass(frozen=True)
class Ruler:
    """Measures samples as a run will plan them.

    Attributes:
        planner: of the model. sampling, max_tokens: of the recipe.
    """

    planner: Planner
    sampling: SamplingOptions
    max_tokens: int | None = None
    _planned: dict[tuple[tuple[Visual, ...], int], tuple[tuple[ClipPlan, ...], int]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def measure(
        self, sample: Sample, infos: Sequence[VideoInfo], faults: list[Fault]
    ) -> Length | None:
        """The length of a sample, or None and a fault where it is too long."""
        labels = spell_turns(self.planner.prompts, sample.turns, bool(infos))[1]
        trained = sum(label != IGNORED for label in labels)
        try:
            plans, prefix = self._look(sample, infos, len(labels))
        except FitError as error:
            words = error.received.removeprefix(f"{sample.name}: ")
            needed = self._needed(sample, infos)
            faults.append(
                Fault("too_long", sample.name, words, error.allowed, error.next_step, needed)
            )
            return None
        for visual, plan in zip(sample.visuals, plans, strict=True):
            if len(plan) < plan.wanted_clips:
                words = f"{shown(visual.path.name)}: {plan.describe()}"
                remedy = "" if is_bound(self.planner, self.max_tokens) else "set from and to"
                faults.append(Fault("thinned", sample.name, words, next_step=remedy))
        coverage = min((plan.coverage for plan in plans), default=1.0)
        return Length(prefix + len(labels), trained, sum(map(len, plans)), coverage)

    def _needed(self, sample: Sample, infos: Sequence[VideoInfo]) -> int:
        """The smallest max_tokens that holds a sample; 0 where the context itself does not."""
        one = replace(self.sampling, max_clips=1)
        try:
            planned = plan_sample(self.planner, sample, infos, one)
        except FitError:
            return 0
        text = len(spell_turns(self.planner.prompts, sample.turns, bool(infos))[0])
        return planned.tokens - text + reserve_of(text) if infos else text

    def _look(
        self, sample: Sample, infos: Sequence[VideoInfo], text: int
    ) -> tuple[tuple[ClipPlan, ...], int]:
        """The clips of a sample, and the tokens in front of its text."""
        # Many questions about one video have the same clips.
        key = sample.visuals, reserve_of(text)
        if key in self._planned:
            return self._planned[key]
        planned = plan_sample(self.planner, sample, infos, self.sampling, self.max_tokens)
        found = tuple(file.plan for file in planned.files), planned.tokens - text
        if infos:
            if len(self._planned) >= _MOST_PLANS:
                self._planned.clear()
            self._planned[key] = found
        return found


def probe_files(
    samples: Sequence[Sample],
    *,
    readers: int = 2,
    stall_seconds: float = _STALL_SECONDS,
    on_progress: Progress = no_progress,
) -> dict[Path, VideoInfo | str]:
    """Look at every file of the samples once.

    Args:
        readers: files that are looked at at the same time, each by a process of its own.
        stall_seconds: longest time without progress in one file.
        on_progress: called with ``check``, files done, and files in all.

    Returns:
        For each file what can be planned with, or in words why it cannot be read.
    """
    paths = list(dict.fromkeys(v.path for sample in samples for v in sample.visuals))
    found: dict[Path, VideoInfo | str] = {}
    with closing(_probe_all(paths, readers, stall_seconds)) as probed:
        for path, info in probed:
            found[path] = info
            on_progress("check", len(found), len(paths))
    # In the order of the samples, whichever file was ready first.
    return {path: found[path] for path in paths}


def _probe_all(
    paths: Sequence[Path], readers: int, stall_seconds: float
) -> Generator[tuple[Path, VideoInfo | str]]:
    threads = max(1, min(readers, len(paths)))
    own = [GuardedReader(stall_seconds=stall_seconds) for _ in range(threads)]
    free: SimpleQueue[GuardedReader] = SimpleQueue()
    for reader in own:
        free.put(reader)

    def probe(path: Path) -> VideoInfo | str:
        reader = free.get()
        try:
            # Nothing is read with it: what the reader needs is large for ten thousand files.
            return replace(reader.probe(path), timeline=None)
        except (MediaError, UsageError) as error:
            return error.message.removeprefix(shown(path)).lstrip(": ")
        finally:
            free.put(reader)

    pool = ThreadPoolExecutor(threads, "survey")
    try:
        futures = {pool.submit(probe, path): path for path in paths}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        # An interrupt does not wait for a slow file: without its process the reading fails.
        pool.shutdown(wait=False, cancel_futures=True)
        for reader in own:
            reader.close()
        pool.shutdown()


def measure_samples(
    samples: Sequence[Sample],
    files: dict[Path, VideoInfo | str],
    ruler: Ruler,
    on_progress: Progress = no_progress,
) -> tuple[list[Length | None], list[Fault]]:
    """The length of each sample, and what is wrong with its files.

    Args:
        files: what ``probe_files`` found. ruler: of the model and recipe.
        on_progress: called with ``measure``, samples done, and samples in all.

    Returns:
        Lengths in the order of the samples, None for one that cannot be trained on; and faults,
        those of a file that is odd but good once only.
    """
    faults = [
        Fault("odd_file", shown(path.name), warning)
        for path, facts in files.items()
        if isinstance(facts, VideoInfo)
        for warning in facts.warnings
    ]
    lengths: list[Length | None] = []
    for number, sample in enumerate(samples, start=1):
        found = list_file_faults(sample, files)
        faults += found
        broken = any(fault.cost == "sample" for fault in found)
        lengths.append(None if broken else ruler.measure(sample, infos_of(sample, files), faults))
        if number % 64 == 0 or number == len(samples):
            on_progress("measure", number, len(samples))
    return lengths, faults


def infos_of(sample: Sample, files: dict[Path, VideoInfo | str]) -> list[VideoInfo]:
    """What is known of the files of a sample that can be read."""
    found = (files[visual.path] for visual in sample.visuals)
    return [info for info in found if isinstance(info, VideoInfo)]


def list_length_faults(faults: Sequence[Fault], samples: int, recipe: Recipe) -> list[Fault]:
    """The fault of a recipe whose max_tokens, or model, leaves out most of its samples.

    Args:
        faults: of the samples. samples: how many there are.
    """
    long = [fault.needed_tokens for fault in faults if fault.kind == "too_long"]
    if len(long) <= samples / 2:
        return []
    needed = [tokens for tokens in long if tokens]
    words = f"{len(long)} of {count(samples, 'sample')} are longer than the model's context"
    remedy = "shorten their texts, or choose another model"
    if needed:
        least, most = min(needed), max(needed)
        span = f"{least} to {most}" if least < most else f"{most}"
        words = (
            f"max_tokens = {recipe.max_tokens} is too small for {len(long)} of "
            f"{count(samples, 'sample')}: they need {span} tokens with one "
            "clip of each video"
        )
        remedy = f"set max_tokens = {most} or more, or leave it out"
    return [Fault("mostly_too_long", shown(recipe.path.name), words, next_step=remedy)]


def list_file_faults(sample: Sample, files: dict[Path, VideoInfo | str]) -> list[Fault]:
    """What is wrong with the files of a sample, as ``probe_files`` found them."""
    found: list[Fault] = []
    for visual in sample.visuals:
        facts, name = files[visual.path], shown(visual.path.name)
        if isinstance(facts, str):
            found.append(Fault(f"broken_{visual.kind}", sample.name, f"{name}: {facts}"))
        elif facts.kind != visual.kind:
            words = f"{name} is of the kind {facts.kind}, not {visual.kind}"
            found.append(Fault("wrong_kind", sample.name, words))
        elif facts.kind == "video":
            found += _window_faults(sample, visual, facts)
    return found


def _window_faults(sample: Sample, visual: Visual, facts: VideoInfo) -> Iterator[Fault]:
    length = f"{shown(visual.path.name)} ends at {facts.duration_seconds:g} s"
    if visual.start_seconds and visual.start_seconds >= facts.duration_seconds:
        yield Fault("outside_video", sample.name, f"from is {visual.start_seconds:g}; {length}")
    elif (visual.end_seconds or 0.0) > facts.duration_seconds + _END_SLACK_SECONDS:
        yield Fault("end_after_video", sample.name, f"to is {visual.end_seconds:g}; {length}")
