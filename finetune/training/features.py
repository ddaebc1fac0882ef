"""What frozen encoders and connector say of each video, watched once and read from then on.

The memories are files of ``apollo remember``, in a folder beside the result. A list says which of
them belong to a sample, so that neither decoding nor looking at the files is needed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import Timeout

from apollo_cli.atomic import write_whole
from apollo_cli.config import ReadingOptions
from apollo_cli.errors import ApolloError, DataError, FitError, MediaError, UsageError
from apollo_cli.finetune.data.samples import Sample
from apollo_cli.finetune.training.examples import (
    ExampleBuilder,
    reserve_of,
    sampling_of,
    spell_turns,
)
from apollo_cli.memory_cache import identify, place_for
from apollo_cli.memory_file import load_memory
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.video.container import shown
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video_memory import VideoMemory
from apollo_cli.watcher import Progress, Watcher, no_progress

_SAVE_EVERY = 50


def _refuse(sample: Sample, error: ApolloError) -> None:
    raise error


class FeatureStore:
    """Memories of the videos and images of a training run.

    Args:
        folder: where they are kept; what an earlier run left there is used.
        builder: plans the samples, with its readers.
        network: of the run; its encoders and connector must be frozen.
        model_name, fingerprint: its identity; the fingerprint covers all that makes tokens.
    """

    def __init__(
        self,
        folder: Path,
        builder: ExampleBuilder,
        network: ApolloModel,
        *,
        model_name: str,
        fingerprint: str,
    ) -> None:
        self.folder = folder
        self._builder = builder
        self._network = network
        self._model_name = model_name
        self._fingerprint = fingerprint
        self._files: dict[str, list[str]] = {}
        self.load()

    def load(self) -> None:
        """Read the lists in the folder, those of other processes included."""
        for path in sorted(self.folder.glob("list-*.json")):
            try:
                found = json.loads(path.read_text("utf-8"))
                self._files |= {str(key): list(map(str, names)) for key, names in found.items()}
            except (OSError, ValueError, AttributeError, TypeError):
                # Without the list, files are looked at again; their memories are still found.
                continue

    def fill(
        self,
        samples: Sequence[Sample],
        *,
        process: int = 0,
        processes: int = 1,
        on_broken: Callable[[Sample, ApolloError], None] = _refuse,
        on_progress: Progress = no_progress,
    ) -> None:
        """Watch all that has not been watched; a stopped run is gone on with.

        Args:
            process: of ``processes``, which share the files between them.
            on_broken: called with each sample that cannot be read, and why; else that is raised.
            on_progress: called with ``watch``, samples done, and samples in all.

        Raises:
            DataError: the folder cannot be written.
            FitError: one clip does not fit the memory of the device.
        """
        own = [s for s in samples if s.visuals and _owner(s, processes) == process]
        try:
            for number, sample in enumerate(own, start=1):
                try:
                    self._remember(sample)
                except (MediaError, FitError, UsageError) as error:
                    if self._is_of_sample(sample, error):
                        on_broken(sample, error)
                if number % _SAVE_EVERY == 0:
                    self._save(process)
                on_progress("watch", number, len(own))
        finally:
            self._save(process)

    def find(self, sample: Sample) -> list[VideoMemory] | None:
        """The memories of a sample's videos and images; None where one is missing or damaged."""
        key = self._key(sample)
        names = self._files.get(key) if key else None
        if names is None:
            return None
        try:
            own = self._fingerprint, self._model_name, self._network.config
            return [load_memory(self.folder / name, *own) for name in names]
        except ApolloError:
            return None

    def _remember(self, sample: Sample) -> None:
        key = self._key(sample)
        if key in self._files and all((self.folder / n).is_file() for n in self._files[key]):
            return
        reader = self._builder.reader
        watcher = Watcher(
            self._network,
            self._builder.planner,
            self._model_name,
            self._fingerprint,
            use_cache=False,
            reader=reader,
        )
        names = []
        with limit_reading(reader, sample, self._builder.read_seconds) as count:
            planned = self._builder.plan(sample)
            for file in planned.files:
                source = identify(file.info.path, file.info.stream_index)
                target = self.folder / place_for(source, self._fingerprint, file.plan).name
                if not target.is_file():
                    watcher.watch(file, ReadingOptions(), target=target, on_progress=count)
                names.append(target.name)
        if key:
            self._files[key] = names

    def _is_of_sample(self, sample: Sample, error: ApolloError) -> bool:
        """Whether a file of the sample is at fault, and not the memory or the folder."""
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise FitError(
                f"sample {sample.name}: {error.received}",
                next_step='set device = "cpu" in the recipe, or choose a smaller model',
            ) from error
        cause = error.__cause__ if isinstance(error, UsageError) else None
        if isinstance(cause, OSError) and not isinstance(cause, Timeout):
            raise self._cannot_write(cause) from error
        # Another process is watching the file for a sample of its own; here it is decoded.
        return not isinstance(cause, Timeout)

    def _cannot_write(self, error: OSError) -> DataError:
        return DataError(
            f"{self.folder} cannot be written ({error.strerror or error})",
            next_step="make room, or set cache_features = false; then run it again",
        )

    def _key(self, sample: Sample) -> str:
        """All that decides what is seen of a sample; empty where a file is gone."""
        prompts = self._builder.planner.prompts
        text = len(spell_turns(prompts, sample.turns, visual=True)[0])
        wishes = sampling_of(sample, self._builder.sampling)
        try:
            facts = [os.stat(visual.path) for visual in sample.visuals]
        except OSError:
            return ""
        told = [
            [str(visual.path), fact.st_size, fact.st_mtime_ns, asdict(wish)]
            for visual, fact, wish in zip(sample.visuals, facts, wishes, strict=True)
        ]
        context = self._builder.planner.config.context
        budget = min(context, self._builder.max_tokens or context) - reserve_of(text)
        described = json.dumps([self._fingerprint, prompts.template_name, budget, told])
        return hashlib.sha256(described.encode()).hexdigest()

    def _save(self, process: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / f"list-{process}.json", json.dumps(self._files))
        except OSError as error:
            raise self._cannot_write(error) from error


@contextmanager
def limit_reading(reader: GuardedReader, sample: Sample, seconds: float) -> Iterator[Progress]:
    """Let the files of a sample take so long to read; encoding between two batches is not counted.

    Yields:
        What the watcher tells its progress.

    Raises:
        MediaError: it took longer.
    """
    spent, since = 0.0, time.monotonic()

    def count(stage: str, done: int, total: int) -> None:
        nonlocal spent, since
        if stage == "encode":
            limit.enter_context(reader.time_limit(seconds))
            since = time.monotonic()
            return
        spent += time.monotonic() - since
        if spent > seconds:
            files = ", ".join(shown(visual.path) for visual in sample.visuals)
            raise MediaError(
                f"{files}: reading took longer than {seconds:g} s",
                next_step="convert the file, or raise read_seconds",
            )

    with ExitStack() as limit:
        limit.enter_context(reader.time_limit(seconds))
        yield count


def _owner(sample: Sample, processes: int) -> int:
    """The process that watches a sample's files: the same for all samples of one video."""
    first = min(str(visual.path) for visual in sample.visuals)
    digest = hashlib.sha256(first.encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[:4]) % processes
