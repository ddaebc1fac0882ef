"""Video memory: the same answers without decoding, resumable, bounded, refused for others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copyfile

import pytest
import torch

from apollo_cli import engine
from apollo_cli.cli import main
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions, ShortPolicy
from apollo_cli.engine import Apollo
from apollo_cli.errors import MediaError, UsageError, WeightsError
from apollo_cli.memory_cache import cache_folder, find_memory, identify, list_memories, prune
from apollo_cli.memory_record import read_record
from tests import tiny
from tests.tiny import Tiny

CASES = Path(__file__).parent / "cases"
SHORT = GenerationOptions(max_new_tokens=12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("memory") / "checkpoint")


@pytest.fixture
def apollo(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apollo:
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))
    return engine.load(checkpoint)


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return Path(copyfile(CASES / "one_key_60s.mp4", tmp_path / "video.mp4"))


def stop_after(apollo: Apollo, video: Path, target: Path | None, clips: int) -> None:
    """Watch until so many clips were written, one by one."""

    class Stop(Exception):
        pass

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("encode", clips):
            raise Stop

    batch, apollo.watcher.encode_batch = apollo.watcher.encode_batch, 1
    with pytest.raises(Stop):
        if target is None:
            apollo.watch(video, on_progress=stop)
        else:
            apollo.remember(video, target, on_progress=stop)
    apollo.watcher.encode_batch = batch


def test_the_second_time_nothing_is_decoded_and_the_answer_is_the_same(apollo: Apollo, video: Path):
    first = apollo.watch(video)
    second = apollo.watch(video)
    assert first.remembered is None
    assert second.remembered is not None
    assert second.decode_seconds == 0
    assert torch.equal(first.tokens, second.tokens)
    assert (first.times == second.times).all()
    assert first.part == second.part
    answers = [apollo.ask(memory, "one?", SHORT) for memory in (first, second)]
    assert answers[0].text == answers[1].text
    assert answers[0].tokens == answers[1].tokens


def test_fewer_clips_of_a_file_lie_where_the_plan_puts_them(
    apollo: Apollo, video: Path, tmp_path: Path
):
    clip_seconds = apollo.remember(video, tmp_path / "video.apollo").plan.clip_seconds
    for clips in (1, 2, 3, 7):
        sampling = SamplingOptions(max_clips=clips)
        (planned,) = apollo.planner.plan([apollo.watcher.reader.probe(video)], sampling)
        few = apollo.watch(tmp_path / "video.apollo", sampling)
        assert abs(few.times[:, 0] - planned.plan.times[:, 0]).max() <= clip_seconds


def test_a_memory_where_a_video_is_needed_is_named_as_one(
    apollo: Apollo, video: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    target = str(tmp_path / "video.apollo")
    apollo.remember(video, Path(target))
    for command in ("check", "plan", "frames", "remember"):
        assert main([command, target]) == 3
        written = capfd.readouterr()
        assert "memory" in written.out + written.err


def test_a_denser_plan_is_watched_again(apollo: Apollo, video: Path):
    apollo.watch(video, SamplingOptions(max_clips=6))
    assert apollo.watch(video).remembered is None
    assert apollo.watch(video, SamplingOptions(fps=4.0)).remembered is None


@pytest.mark.parametrize("first", ["watched", "stopped"])
def test_damage_that_was_passed_over_is_an_error_to_a_strict_reading(
    first: str, apollo: Apollo, tmp_path: Path
):
    damaged, strict = CASES / "bit_flips.mp4", ReadingOptions(strict=True)
    if first == "watched":
        assert any("damaged" in note for note in apollo.watch(damaged).notes)
    else:
        stop_after(apollo, damaged, None, clips=3)
    with pytest.raises(MediaError, match="is damaged"):
        apollo.watch(damaged, reading=strict)
    again = apollo.watch(damaged)
    assert (again.remembered is not None) == (first == "watched")


def test_a_sound_video_is_remembered_for_a_strict_reading(apollo: Apollo, video: Path):
    apollo.watch(video)
    assert apollo.watch(video, reading=ReadingOptions(strict=True)).remembered is not None


def test_pictures_of_one_decoder_are_not_served_as_those_of_another(apollo: Apollo, video: Path):
    watcher = apollo.watcher
    info = watcher.reader.probe(video)
    plan = apollo.planner.plan([info], SamplingOptions())[0].plan
    apollo.watch(video)
    found = [
        find_memory(identify(info.path), watcher.fingerprint, plan, ReadingOptions(decoder=name))
        for name in ("pyav", "decord")
    ]
    assert [path is not None for path in found] == [True, False]


@pytest.mark.parametrize("shorts", [("repeat", "stretch"), ("stretch", "repeat")])
def test_a_short_video_is_shown_as_asked_whatever_was_seen_before(
    shorts: tuple[ShortPolicy, ShortPolicy], apollo: Apollo
):
    seen = [apollo.watch(CASES / "five_frames.webm", SamplingOptions(short=s)) for s in shorts]
    assert seen[1].remembered is None
    assert seen[0].times.tolist() != seen[1].times.tolist()


def test_a_memory_of_a_part_is_not_served_for_the_whole(apollo: Apollo, video: Path):
    apollo.watch(video, SamplingOptions(end_seconds=20))
    few = apollo.watch(video, SamplingOptions(max_clips=3))
    assert few.remembered is None
    assert few.times[-1, 0] > 40


def test_a_memory_that_does_not_tell_how_it_was_read_is_missed_quietly(apollo: Apollo, video: Path):
    kept = apollo.watch(video)
    (file,) = cache_folder().glob("*.apollo")
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    for field in (b'"decoder": "pyav", ', b'"damaged": 0, '):
        escaped = field.replace(b'"', b'\\"')
        assert escaped in header
        header = header.replace(escaped, b"")
    file.write_bytes(content[:8] + header.ljust(length) + content[8 + length :])
    assert read_record(file).damaged == -1
    assert torch.equal(apollo.watch(file).tokens, kept.tokens)
    assert apollo.watch(video).remembered is None
    assert apollo.watch(video).remembered is not None


@pytest.mark.parametrize("damage", ["changed", "cut", "vanished"])
def test_a_memory_of_the_cache_that_cannot_be_read_is_made_again(
    damage: str, apollo: Apollo, video: Path
):
    kept = apollo.watch(video)
    (file,) = cache_folder().glob("*.apollo")
    content = bytearray(file.read_bytes())
    content[-900] ^= 0xFF
    if damage == "vanished":
        file.unlink()
        file.symlink_to(file.with_name("gone"))
    else:
        file.write_bytes(content if damage == "changed" else content[:-900])
    again = apollo.watch(video)
    assert again.remembered is None
    assert torch.equal(again.tokens, kept.tokens)
    assert apollo.watch(video).remembered is not None


def test_a_video_that_vanishes_before_it_is_watched_is_named(apollo: Apollo, video: Path):
    info = apollo.watcher.reader.probe(video)
    video.unlink()
    with pytest.raises(MediaError, match=r"video\.mp4"):
        apollo.watch(info)


@pytest.mark.parametrize("limit", ["nan", "-1", "lots"])
def test_a_limit_that_is_no_amount_is_told_before_anything_is_watched(
    limit: str, apollo: Apollo, video: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("APOLLO_CACHE_GB", limit)
    told = []
    with pytest.raises(UsageError, match=f"APOLLO_CACHE_GB={limit}; allowed"):
        apollo.watch(video, on_progress=lambda *step: told.append(step))
    assert told == []


@pytest.mark.parametrize(("limit", "kept"), [("inf", 1), ("", 1), ("1e300", 1), ("0", 0)])
def test_the_cache_may_be_without_a_limit_or_keep_nothing(
    limit: str, kept: int, apollo: Apollo, video: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("APOLLO_CACHE_GB", limit)
    assert len(apollo.watch(video)) == 30
    assert len(list_memories()) == kept


def test_damage_before_a_stop_is_counted_and_told_after_it(apollo: Apollo, tmp_path: Path):
    damaged, target = CASES / "bit_flips.mp4", tmp_path / "video.apollo"
    whole = apollo.remember(damaged, tmp_path / "whole.apollo")
    stop_after(apollo, damaged, target, clips=2)
    resumed = apollo.remember(damaged, target)
    assert resumed.notes == (*whole.notes, "2 clips of an earlier, stopped run were kept")
    told = [read_record(file) for file in (target, tmp_path / "whole.apollo")]
    assert told[0].notes == told[1].notes == whole.notes
    assert told[0].damaged == told[1].damaged > 0


def test_a_changed_file_is_watched_again(apollo: Apollo, video: Path):
    apollo.watch(video)
    before = identify(video)
    copyfile(CASES / "cfr30.mp4", video)
    assert identify(video) != before
    assert apollo.watch(video).remembered is None


def test_a_memory_file_is_asked_like_a_video(apollo: Apollo, video: Path, tmp_path: Path):
    target = tmp_path / "video.apollo"
    made = apollo.remember(video, target)
    assert read_record(target).path == str(video)
    video.unlink()
    read = apollo.watch(target)
    assert torch.equal(made.tokens, read.tokens)
    assert apollo.ask(read, "one?", SHORT).text == apollo.ask(made, "one?", SHORT).text
    part = apollo.watch(target, SamplingOptions(start_seconds=30))
    assert len(part) == 15
    with pytest.raises(UsageError, match="no remembered clip"):
        apollo.watch(target, SamplingOptions(start_seconds=90, end_seconds=95))


def test_a_memory_holds_everything_even_where_a_context_does_not(tmp_path: Path, video: Path):
    small = engine.load(tiny.save(tmp_path / "small", Tiny(context=600)), use_cache=False)
    made = small.remember(video, tmp_path / "video.apollo")
    assert len(made) == 30
    answer = small.ask(made, "one?", SHORT)
    assert answer.tokens.total <= 600
    assert answer.videos[0]["clips"] < 30


def test_a_memory_is_refused_for_another_model(apollo: Apollo, video: Path, tmp_path: Path):
    target = tmp_path / "video.apollo"
    apollo.remember(video, target)
    other = engine.load(tiny.save(tmp_path / "other", Tiny(seed=7)))
    with pytest.raises(WeightsError, match="was made by"):
        other.watch(target)


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_a_damaged_memory_is_a_clear_error(
    damage: str, apollo: Apollo, video: Path, tmp_path: Path
):
    target = tmp_path / "video.apollo"
    apollo.remember(video, target)
    whole = target.read_bytes()
    target.write_bytes({"cut": whole[: len(whole) // 2], "text": b"hello", "empty": b""}[damage])
    with pytest.raises(MediaError, match=r"video\.apollo"):
        apollo.watch(target)


def test_a_killed_run_goes_on_where_it_was(checkpoint: Path, video: Path, tmp_path: Path):
    """The child stops itself with SIGKILL after its third batch was written."""
    target = tmp_path / "video.apollo"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from apollo_cli import engine, memory_file\n"
        "add = memory_file.MemoryWriter.add\n"
        "def add_and_die(self, tokens, times):\n"
        "    add(self, tokens, times)\n"
        "    if self.done >= 12: os.kill(os.getpid(), signal.SIGKILL)\n"
        "memory_file.MemoryWriter.add = add_and_die\n"
        "engine.load(sys.argv[1]).remember(sys.argv[2], Path(sys.argv[3]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint), str(video), str(target)], check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    apollo = engine.load(checkpoint)
    resumed = apollo.remember(video, target)
    said = "12 clips of an earlier, stopped run were kept"
    assert said in resumed.notes
    assert said not in read_record(target).notes
    whole = apollo.remember(video, tmp_path / "again.apollo")
    torch.testing.assert_close(resumed.tokens, whole.tokens, rtol=0, atol=1e-5)
    assert (resumed.times == whole.times).all()


def test_a_part_of_another_plan_is_not_gone_on_with(apollo: Apollo, video: Path, tmp_path: Path):
    target = tmp_path / "video.apollo"
    whole = apollo.remember(video, target)
    part, counter = target.with_name("video.apollo.part"), target.with_name("video.apollo.count")
    target.rename(part)
    counter.write_text("[12, []]")
    fewer = apollo.remember(video, target, SamplingOptions(max_clips=6))
    assert len(fewer) == 6
    assert not any("stopped run" in note for note in fewer.notes)
    assert len(whole) == 30


def test_the_cache_keeps_its_limit_and_drops_what_was_not_used_longest(apollo: Apollo):
    for number, name in enumerate(("cfr30.mp4", "vp8.webm", "fps29_97.mp4")):
        memory = apollo.watch(CASES / name)
        newest = max(cache_folder().glob("*.apollo"), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (number + 1e9, number + 1e9))
        assert memory.remembered is None
    sizes = [memory.size_bytes for memory in list_memories()]
    assert prune(sum(sizes) - 1) == sizes[-1]
    assert [Path(memory.record.path).name for memory in list_memories()] == [
        "fps29_97.mp4",
        "vp8.webm",
    ]


def test_an_hour_of_a_3b_shape_is_small_and_read_as_it_was_written(tmp_path: Path):
    import numpy as np

    from apollo_cli.memory_file import MemoryWriter, load_memory
    from apollo_cli.memory_record import MemoryRecord
    from apollo_cli.weights.network import released_network
    from apollo_cli.weights.registry import known_models

    record = MemoryRecord("m", "f", "s", "/x.mp4", "video", 3600.0, 2, (0, 3600), 2.0, 1800, 1800)
    target = tmp_path / "hour.apollo"
    writer = MemoryWriter(target, record, (1800, 32, 2048), 4, torch.bfloat16)
    for first in range(0, 1800, 100):
        times = first * 2.0 + np.arange(100)[:, None] * 2 + np.arange(4) * 0.5
        writer.add(torch.full((100, 32, 2048), float(first), dtype=torch.bfloat16), times)
    writer.finish(())
    assert target.stat().st_size < 240e6
    config = released_network(known_models()["apollo-3b"]).config
    memory = load_memory(target, "f", "m", config)
    assert memory.tokens[150, 0, 0] == 100
    assert memory.times[-1, -1] == 3599.5
    assert read_record(target).wanted_clips == 1800
