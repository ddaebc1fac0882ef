"""Watched once is as good as decoded each time, and nothing is decoded a second time."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apollo_cli import engine
from apollo_cli.config import SamplingOptions
from apollo_cli.engine import Apollo
from apollo_cli.errors import ApolloError, DataError, MediaError
from apollo_cli.finetune.data.samples import Sample, Visual
from apollo_cli.finetune.training.examples import ExampleBuilder
from apollo_cli.finetune.training.features import FeatureStore, limit_reading
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.memory_file import MemoryWriter
from apollo_cli.model.prompt import Turn
from apollo_cli.video.guard import GuardedReader
from tests import tiny
from tests.cases import FOLDER
from tests.waiting import PATIENCE_SECONDS

TALK = (Turn("what is this?", "a test"),)
LONG_TALK = (Turn("what is this? " * 30, "a test"),)
CLIP = Visual(FOLDER / "cfr30.mp4", "video")
PART = Visual(FOLDER / "one_key_60s.mp4", "video", 5, 25)
LONG = Visual(FOLDER / "one_key_60s.mp4", "video")
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
    store.fill(SAMPLES)
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
    again.fill(SAMPLES)
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
    faults: list[tuple[Sample, ApolloError]] = []
    store.fill([broken, gone, SAMPLES[0]], on_broken=lambda *fault: faults.append(fault))
    assert [sample.name for sample, _ in faults] == ["bad", "gone"]
    assert all(isinstance(error, MediaError) for _, error in faults)
    assert store.find(SAMPLES[0]) is not None
    with pytest.raises(MediaError, match=r"html_page\.mp4"):
        store.fill([broken])


def test_a_file_that_hangs_costs_its_sample_and_the_time_limit(
    apollo: Apollo, builder: ExampleBuilder, tmp_path: Path
):
    builder.read_seconds = 2.0
    builder.reader.probe(CLIP.path)
    assert builder.reader.process_id is not None
    os.kill(builder.reader.process_id, signal.SIGSTOP)
    faults: list[str] = []
    store = open_store(tmp_path, builder, apollo)

    def note(sample: Sample, error: ApolloError) -> None:
        faults.append(f"{sample.name}: {error.message}")
        builder.read_seconds = PATIENCE_SECONDS

    store.fill([SAMPLES[0], SAMPLES[2]], on_broken=note)
    assert len(faults) == 1
    assert faults[0].startswith("video: ")
    assert "cfr30.mp4: reading took longer than 2 s" in faults[0]
    assert store.find(SAMPLES[2]) is not None


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Put the clock forward by some seconds."""
    monotonic, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead[0])

    def put_forward(seconds: float) -> None:
        ahead[0] += seconds

    return put_forward


def test_batches_that_each_come_in_time_are_counted_together(
    builder: ExampleBuilder, later: Callable[[float], None]
):
    info = builder.reader.probe(LONG.path)
    plan = builder.planner.plan_everything(info, builder.sampling).plan
    specs = [encoder.pixels for encoder in builder.planner.config.encoders]
    batches = builder.reader.read_clips(info, plan.times, specs, batch_clips=1)
    sample = Sample("long", TALK, (LONG,))
    with (
        pytest.raises(MediaError, match=r"one_key_60s\.mp4: reading took longer than 9999 s"),
        limit_reading(builder.reader, sample, 9999.0) as count,
    ):
        for number, _ in enumerate(batches):
            later(1000.0)
            count("decode", number, len(plan))
            count("encode", number, len(plan))


def test_slow_encoding_is_not_taken_for_slow_reading(
    apollo: Apollo,
    builder: ExampleBuilder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    later: Callable[[float], None],
):
    encode = apollo.network.encode_clips

    def slowly(pixels: dict[str, torch.Tensor]) -> torch.Tensor:
        later(9999.0)
        return encode(pixels)

    monkeypatch.setattr(apollo.network, "encode_clips", slowly)
    builder.reader.probe(LONG.path)
    builder.read_seconds = PATIENCE_SECONDS
    sample = Sample("long", TALK, (LONG,))
    store = open_store(tmp_path, builder, apollo)
    store.fill([sample])
    assert store.find(sample) is not None


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
