"""Looking at all files of a data set once, without decoding: what is broken, what is too long.

What was found out about a good file is kept beside the result, so that a second look is quick.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np

from apollo_cli._version import __version__
from apollo_cli.config import SamplingOptions
from apollo_cli.errors import FitError, MediaError, UsageError
from apollo_cli.finetune.examples import IGNORED, plan_sample, spell_turns
from apollo_cli.finetune.faults import Fault
from apollo_cli.finetune.sample import Sample, Visual
from apollo_cli.planning import Planner
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.opening import shown
from apollo_cli.watching import Progress, no_progress

# Name of the facts in the folder of a result.
FACTS_NAME = "files.json"

_END_SLACK_SECONDS = 0.5
_LARGEST_CACHE = 512 * 2**20
_STALL_SECONDS = 30.0


@dataclass(frozen=True)
class FileFacts:
    """What a plan needs to know of a file, small enough to keep of ten thousand files.

    The times of single pictures are left out and taken as evenly spaced. Where they are not, the
    words of a time label may differ by a digit, and so may the length of a sample.

    Attributes:
        first_seconds, last_seconds: when the first and the last picture appear.
        others: as in ``VideoInfo``.
    """

    kind: Literal["video", "image"]
    duration_seconds: float
    frames: int
    first_seconds: float
    last_seconds: float
    source_fps: float | None
    constant_rate: bool
    tick_seconds: float
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, info: VideoInfo) -> FileFacts:
        """The facts of a probed file."""
        return cls(
            info.kind,
            info.duration_seconds,
            len(info.times),
            float(info.times[0]),
            float(info.times[-1]),
            info.source_fps,
            info.constant_rate,
            info.tick_seconds,
            info.warnings,
        )

    def info(self, path: Path) -> VideoInfo:
        """What can be planned with; nothing can be read with it."""
        return VideoInfo(
            path=path,
            kind=self.kind,
            times=np.linspace(self.first_seconds, self.last_seconds, self.frames),
            duration_seconds=self.duration_seconds,
            stored_size=(0, 0),
            display_size=(0, 0),
            codec="",
            container="",
            source_fps=self.source_fps,
            constant_rate=self.constant_rate,
            tick_seconds=self.tick_seconds,
        )


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

    def measure(
        self, sample: Sample, infos: Sequence[VideoInfo], faults: list[Fault]
    ) -> Length | None:
        """The length of a sample, or None and a fault where it is too long."""
        try:
            planned = plan_sample(self.planner, sample, infos, self.sampling, self.max_tokens)
        except FitError as error:
            words = error.received.removeprefix(f"{sample.name}: ")
            faults.append(Fault("too_long", sample.name, words, error.allowed))
            return None
        labels = spell_turns(self.planner.prompts, sample.turns, bool(infos))[1]
        trained = sum(label != IGNORED for label in labels)
        for visual, plan in zip(sample.visuals, planned.plans, strict=True):
            if len(plan) < plan.wanted_clips:
                words = f"{shown(visual.path.name)}: {plan.describe()}"
                faults.append(Fault("thinned", sample.name, words))
        coverage = min((plan.coverage for plan in planned.plans), default=1.0)
        return Length(planned.tokens, trained, sum(map(len, planned.plans)), coverage)


class FactsCache:
    """Facts of files on disk, known by path, size and time of change.

    Args:
        path: a JSON file; one that is missing, damaged or of another version counts as empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[str, list[Any]] = {}
        try:
            if path.stat().st_size <= _LARGEST_CACHE:
                kept = json.loads(path.read_text("utf-8"))
                if kept["version"] == __version__ and isinstance(kept["files"], dict):
                    self._rows = kept["files"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass

    def get(self, path: Path) -> FileFacts | None:
        """The facts of a file that has not changed since."""
        row = self._rows.get(str(path))
        try:
            if row is None or row[:2] != _stamp(path):
                return None
            facts = FileFacts(**{**row[2], "warnings": tuple(row[2]["warnings"])})
            numbers = (facts.duration_seconds, facts.first_seconds, facts.last_seconds)
            is_sound = all(math.isfinite(number) for number in numbers) and facts.frames > 0
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        return facts if is_sound and facts.kind in ("video", "image") else None

    def put(self, path: Path, facts: FileFacts) -> None:
        """Remember the facts of a file."""
        self._rows[str(path)] = [*_stamp(path), asdict(facts)]

    def save(self) -> None:
        """Write them down; a place that cannot be written is no loss."""
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"version": __version__, "files": self._rows}), "utf-8")
            partial.replace(self.path)
        except OSError:
            with suppress(OSError):
                partial.unlink()


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def probe_files(
    samples: Sequence[Sample],
    *,
    cache: Path | None = None,
    readers: int = 2,
    stall_seconds: float = _STALL_SECONDS,
    on_progress: Progress = no_progress,
) -> dict[Path, FileFacts | str]:
    """Look at every file of the samples once.

    Args:
        cache: a JSON file of what was found out before; None keeps nothing.
        readers: files that are looked at at the same time, each by a process of its own.
        stall_seconds: longest time without progress in one file.
        on_progress: called with ``check``, files done, and files in all.

    Returns:
        For each file its facts, or in words why it cannot be read.
    """
    kept = FactsCache(cache) if cache else None
    paths = list(dict.fromkeys(v.path for sample in samples for v in sample.visuals))
    found: dict[Path, FileFacts | str] = {}
    for path in paths if kept else ():
        facts = kept.get(path) if kept else None
        if facts is not None:
            found[path] = facts
    missing = [path for path in paths if path not in found]
    try:
        with closing(_probe_all(missing, readers, stall_seconds)) as probed:
            for path, facts in probed:
                found[path] = facts
                if kept and isinstance(facts, FileFacts):
                    kept.put(path, facts)
                on_progress("check", len(found), len(paths))
    finally:
        if kept and missing:
            kept.save()
    return found


def _probe_all(
    paths: Sequence[Path], readers: int, stall_seconds: float
) -> Generator[tuple[Path, FileFacts | str]]:
    count = max(1, min(readers, len(paths)))
    own = [GuardedReader(stall_seconds=stall_seconds) for _ in range(count)]
    free: SimpleQueue[GuardedReader] = SimpleQueue()
    for reader in own:
        free.put(reader)

    def probe(path: Path) -> FileFacts | str:
        reader = free.get()
        try:
            return FileFacts.of(reader.probe(path))
        except (MediaError, UsageError) as error:
            return error.message.removeprefix(shown(path)).lstrip(": ")
        finally:
            free.put(reader)

    pool = ThreadPoolExecutor(count, "survey")
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
    files: dict[Path, FileFacts | str],
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
        if isinstance(facts, FileFacts)
        for warning in facts.warnings
    ]

    # Samples of one video mostly stand together.
    @lru_cache(maxsize=64)
    def info_of(path: Path) -> VideoInfo:
        facts = files[path]
        assert isinstance(facts, FileFacts)
        return facts.info(path)

    lengths: list[Length | None] = []
    for number, sample in enumerate(samples, start=1):
        found = _file_faults(sample, files)
        faults += found
        broken = any(fault.cost == "sample" for fault in found)
        infos = [] if broken else [info_of(visual.path) for visual in sample.visuals]
        lengths.append(None if broken else ruler.measure(sample, infos, faults))
        if number % 64 == 0 or number == len(samples):
            on_progress("measure", number, len(samples))
    return lengths, faults


def _file_faults(sample: Sample, files: dict[Path, FileFacts | str]) -> list[Fault]:
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


def _window_faults(sample: Sample, visual: Visual, facts: FileFacts) -> Iterator[Fault]:
    length = f"{shown(visual.path.name)} ends at {facts.duration_seconds:.1f} s"
    if visual.start_seconds and visual.start_seconds >= facts.duration_seconds:
        yield Fault("outside_video", sample.name, f"from is {visual.start_seconds:g}; {length}")
    elif (visual.end_seconds or 0.0) > facts.duration_seconds + _END_SLACK_SECONDS:
        yield Fault("end_after_video", sample.name, f"to is {visual.end_seconds:g}; {length}")
