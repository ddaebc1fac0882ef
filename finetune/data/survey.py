"""All files of a dataset are probed once, without decoding, and all samples are measured."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from apollo_cli.config import SamplingOptions
from apollo_cli.errors import FitError, MediaError, UsageError
from apollo_cli.finetune.data.samples import Fault, Sample
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
from apollo_cli.watcher import Progress, no_progress

# What is known of each file, or in words why it cannot be read.
Files = dict[Path, VideoInfo | str]

_END_SLACK_SECONDS = 0.5


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


def probe_files(
    samples: Sequence[Sample],
    *,
    readers: int = 2,
    stall_seconds: float = 30.0,
    on_progress: Progress = no_progress,
) -> Files:
    """Probe every file of the samples once.

    Args:
        readers: files that are probed at the same time, each by a process of its own.
        stall_seconds: longest time without progress in one file.
        on_progress: called with ``check``, files done, and files in all.
    """
    paths = list(dict.fromkeys(v.path for sample in samples for v in sample.visuals))
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

    found: Files = {}
    pool = ThreadPoolExecutor(threads, "survey")
    try:
        for path, info in zip(paths, pool.map(probe, paths), strict=True):
            found[path] = info
            on_progress("check", len(found), len(paths))
    finally:
        # An interrupt does not wait for a slow file: without its process the reading fails.
        pool.shutdown(wait=False, cancel_futures=True)
        for reader in own:
            reader.close()
        pool.shutdown()
    return found


def measure_samples(
    samples: Sequence[Sample],
    files: Files,
    *,
    planner: Planner,
    sampling: SamplingOptions,
    max_tokens: int | None = None,
    on_progress: Progress = no_progress,
) -> tuple[dict[str, Length], list[Fault]]:
    """Measure samples as a run will plan them.

    Args:
        files: what ``probe_files`` found. planner: of the model.
        sampling, max_tokens: of the recipe.
        on_progress: called with ``measure``, samples done, and samples in all.

    Returns:
        The length of each sample that can be trained on, by its name; and all faults of files and
        lengths.
    """
    faults = [
        Fault("odd_file", shown(path.name), warning)
        for path, info in files.items()
        if isinstance(info, VideoInfo)
        for warning in info.warnings
    ]
    lengths: dict[str, Length] = {}
    # The smallest max_tokens of each sample that is too long; 0 above the model's context.
    needed: list[int] = []
    for number, sample in enumerate(samples, start=1):
        found = file_faults(sample, files)
        if not any(fault.cost == "sample" for fault in found):
            infos = infos_of(sample, files)
            labels = spell_turns(planner.prompts, sample.turns, bool(infos))[1]
            trained = sum(label != IGNORED for label in labels)
            try:
                planned = plan_sample(planner, sample, infos, sampling, max_tokens)
            except FitError as error:
                needed.append(_smallest_limit(planner, sample, infos, sampling))
                words = error.received.removeprefix(f"{sample.name}: ")
                found.append(Fault("too_long", sample.name, words, error.allowed, error.next_step))
            else:
                plans = [file.plan for file in planned.files]
                for visual, plan in zip(sample.visuals, plans, strict=True):
                    if len(plan) < plan.wanted_clips:
                        words = f"{shown(visual.path.name)}: {plan.describe()}"
                        remedy = "" if is_bound(planner, max_tokens) else "set from and to"
                        found.append(Fault("thinned", sample.name, words, next_step=remedy))
                coverage = min((plan.coverage for plan in plans), default=1.0)
                clips = sum(map(len, plans))
                lengths[sample.name] = Length(planned.tokens, trained, clips, coverage)
        faults += found
        if number % 64 == 0 or number == len(samples):
            on_progress("measure", number, len(samples))
    if len(needed) > len(samples) / 2:
        share = f"{len(needed)} of {count(len(samples), 'sample')}"
        words = f"{share} are longer than the model's context"
        remedy = "shorten their texts, or choose another model"
        if any(needed):
            words = f"{share} need {max(needed)} tokens or less with one clip of each video"
            words = f"max_tokens = {max_tokens} is too small: {words}"
            remedy = f"set max_tokens = {max(needed)} or more, or leave it out"
        faults.append(Fault("mostly_too_long", "lengths", words, next_step=remedy))
    return lengths, faults


def _smallest_limit(
    planner: Planner, sample: Sample, infos: Sequence[VideoInfo], sampling: SamplingOptions
) -> int:
    """The smallest max_tokens that holds a sample; 0 where the model's context does not."""
    try:
        planned = plan_sample(planner, sample, infos, replace(sampling, max_clips=1))
    except FitError:
        return 0
    text = len(spell_turns(planner.prompts, sample.turns, bool(infos))[0])
    return planned.tokens - text + reserve_of(text) if infos else text


def infos_of(sample: Sample, files: Files) -> list[VideoInfo]:
    """What is known of the files of a sample that can be read."""
    found = (files[visual.path] for visual in sample.visuals)
    return [info for info in found if isinstance(info, VideoInfo)]


def file_faults(sample: Sample, files: Files) -> list[Fault]:
    """What is wrong with the files of a sample, as ``probe_files`` found them."""
    faults: list[Fault] = []
    for visual in sample.visuals:
        info, name = files[visual.path], shown(visual.path.name)
        if isinstance(info, str):
            faults.append(Fault(f"broken_{visual.kind}", sample.name, f"{name}: {info}"))
        elif info.kind != visual.kind:
            words = f"{name} is of the kind {info.kind}, not {visual.kind}"
            faults.append(Fault("wrong_kind", sample.name, words))
        elif info.kind == "video":
            end = info.duration_seconds
            length = f"{name} ends at {end:g} s"
            if visual.start_seconds and visual.start_seconds >= end:
                words = f"from is {visual.start_seconds:g}; {length}"
                faults.append(Fault("outside_video", sample.name, words))
            elif (visual.end_seconds or 0.0) > end + _END_SLACK_SECONDS:
                words = f"to is {visual.end_seconds:g}; {length}"
                faults.append(Fault("end_after_video", sample.name, words))
    return faults
