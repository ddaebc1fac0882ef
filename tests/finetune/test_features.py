"""Watched once is as good as decoded each time, and nothing is decoded a second time."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apollo_cli import engine
from apollo_cli.config import SamplingOptions
from apollo_cli.engine import Apollo
from apollo_cli.errors import DataError, MediaError
from apollo_cli.finetune.data.sample import Sample, Visual
from apollo_cli.finetune.training.examples import ExampleBuilder
from apollo_cli.finetune.training.features import FeatureStore
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.memory_file import MemoryWriter
from apollo_cli.model.prompt import Turn
from apollo_cli.video.guard import GuardedReader
from tests import tiny
from tests.cases import FOLDER

TALK = (Turn("what is this?", "a test"),)
LONG_TALK = (Turn("what is this? " * 30, "a test"),)
CLIP = Visual(FOLDER / "cfr30.mp4", "video")
PART = Visual(FOLDER / "one_key_60s.mp4", "video", 5, 25)
PHOTO = Visual(FOLDER / "photo.jpg", "image")
SAMPLES = [
    Sample("video", TALK, (CLIP,)),
    Sample("same video", (Turn("which?", "none"),), (CLIP,)),
    Sample("window and image", TALK, (PART, PHOTO)),
    Sample("text", TALK),
    Sample("longer talk", LONG_TALK, (CLIP,)),
]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def apollo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Apollo:
    folder = tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint")
    name = str(request.param).removeprefix("torch.")
    return engine.load(folder, dtype=name, use_cache=False)


@pytest.fixture
def builder(apollo: Apollo) -> Iterator[ExampleBuilder]:
    with ExampleBuilder(apollo.planner, SamplingOptions()) as made:
        yield made


def open_store(folder: Path, builder: ExampleBuilder, apollo: Apollo) -> FeatureStore:
    return FeatureStore(
        folder, builder, apollo.network, model_name="tiny", fingerprint=apollo.watcher.fingerprint
    )


def test_the_loss_is_the_same_as_with_decoding(
    apollo: Apollo, builder: ExampleBuilder, tmp_path: Path
):
    decoded = [builder.build(sample) for sample in SAMPLES]
    store = open_store(tmp_path, builder, apollo)
    assert store.fill(SAMPLES) == []
    builder.remembered = store.find
    remembered = [builder.build(sample) for sample in SAMPLES]
    trainee = Trainee(apollo.network)
    with torch.no_grad():
        for one, other in zip(decoded, remembered, strict=True):
            assert one.ids == other.ids
            assert one.labels == other.labels
            assert other.pixels is None
            if other.tokens is not None:
                assert other.tokens.dtype == apollo.network.dtype
            assert torch.allclose(trainee([one])[0], trainee([other])[0], rtol=1e-6)


def test_a_file_and_window_is_watched_once(
    apollo: Apollo, builder: ExampleBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = open_store(tmp_path, builder, apollo)
    told: list[tuple[str, int, int]] = []
    store.fill(SAMPLES, on_progress=lambda *step: told.append(step))
    assert told == [("watch", number, 4) for number in range(1, 5)]
    files = sorted(tmp_path.glob("*.apollo"))
    assert len(files) == 3
    before = [os.stat(file).st_mtime_ns for file in files]
    monkeypatch.setattr(GuardedReader, "_start", lambda self: pytest.fail("a file was opened"))
    builder.close()
    again = open_store(tmp_path, builder, apollo)
    assert again.fill(SAMPLES) == []
    builder.remembered = again.find
    assert all(builder.build(sample).tokens is not None for sample in SAMPLES if sample.visuals)
    assert [os.stat(file).st_mtime_ns for file in files] == before


def test_a_stopped_run_goes_on_where_it_was(
    apollo: Apollo, builder: ExampleBuilder, tmp_path: Path
):
    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_store(tmp_path, builder, apollo).fill(SAMPLES, on_progress=stop)
    assert len(list(tmp_path.glob("*.apollo"))) == 1
    store = open_store(tmp_path, builder, apollo)
    assert store.find(SAMPLES[0]) is not None
    assert store.find(SAMPLES[2]) is None
    store.fill(SAMPLES)
    assert store.find(SAMPLES[2]) is not None


def test_a_changed_file_is_watched_again(apollo: Apollo, builder: ExampleBuilder, tmp_path: Path):
    path = shutil.copyfile(FOLDER / "cfr30.mp4", tmp_path / "clip.mp4")
    sample = Sample("copy", TALK, (Visual(path, "video"),))
    store = open_store(tmp_path / "memories", builder, apollo)
    store.fill([sample])
    assert store.find(sample) is not None
    shutil.copyfile(FOLDER / "vfr_screen.mp4", path)
    assert store.find(sample) is None
    store.fill([sample])
    assert store.find(sample) is not None
    path.unlink()
    assert store.find(sample) is None


def test_other_tokens_of_another_recipe_are_never_taken(
    apollo: Apollo, builder: ExampleBuilder, tmp_path: Path
):
    store = open_store(tmp_path, builder, apollo)
    store.fill(SAMPLES)
    fewer = ExampleBuilder(apollo.planner, SamplingOptions(max_clips=1))
    assert open_store(tmp_path, fewer, apollo).find(SAMPLES[0]) is None
    shorter = ExampleBuilder(apollo.planner, SamplingOptions(), max_tokens=300)
    assert open_store(tmp_path, shorter, apollo).find(SAMPLES[0]) is None
    other = FeatureStore(tmp_path, builder, apollo.network, model_name="b", fingerprint="other")
    assert other.find(SAMPLES[0]) is None


def test_a_damaged_memory_or_list_costs_time_only(
    apollo: Apollo, builder: ExampleBuilder, tmp_path: Path
):
    store = open_store(tmp_path, builder, apollo)
    store.fill(SAMPLES)
    (tmp_path / "list-0.json").write_text("[1, 2")
    assert open_store(tmp_path, builder, apollo).find(SAMPLES[0]) is None
    for file in tmp_path.glob("*.apollo"):
        file.write_bytes(file.read_bytes()[:-8])
    builder.remembered = store.find
    example = builder.build(SAMPLES[0])
    assert example.tokens is None
    assert example.pixels is not None


def test_broken_files_are_named_and_the_others_watched(
    apollo: Apollo, builder: ExampleBuilder, tmp_path: Path
):
    broken = replace(SAMPLES[0], name="bad", visuals=(Visual(FOLDER / "html_page.mp4", "video"),))
    gone = replace(SAMPLES[0], name="gone", visuals=(Visual(FOLDER / "none.mp4", "video"),))
    store = open_store(tmp_path, builder, apollo)
    faults = store.fill([broken, gone, SAMPLES[0]])
    assert [sample.name for sample, _ in faults] == ["bad", "gone"]
    assert all(isinstance(error, MediaError) for _, error in faults)
    assert store.find(SAMPLES[0]) is not None


def test_processes_share_the_files(apollo: Apollo, builder: ExampleBuilder, tmp_path: Path):
    stores = [open_store(tmp_path, builder, apollo) for _ in range(3)]
    for number, store in enumerate(stores):
        store.fill(SAMPLES, process=number, processes=3)
    for store in stores:
        store.load()
        assert all(store.find(sample) is not None for sample in SAMPLES if sample.visuals)


def test_a_full_disk_is_a_clear_error(
    apollo: Apollo, builder: ExampleBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(self: MemoryWriter, *args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MemoryWriter, "add", full)
    with pytest.raises(DataError, match=r"No space left on device.*cache_features = false"):
        open_store(tmp_path, builder, apollo).fill(SAMPLES)


def test_the_users_cache_is_left_alone(
    apollo: Apollo, builder: ExampleBuilder, tmp_path: Path, own_home: Path
):
    before = sorted(own_home.rglob("*.apollo"))
    open_store(tmp_path, builder, apollo).fill(SAMPLES)
    assert sorted(own_home.rglob("*.apollo")) == before
