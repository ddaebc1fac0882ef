"""However a file is damaged, reading it gives pictures or one line, and never takes the child."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest

from apollo_cli.errors import MediaError
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.probe import probe
from tests.cases import CASES, FOLDER
from tests.video.made import numbers

FILES = sorted(
    case["name"]
    for case in CASES
    if (FOLDER / case["name"]).is_file() and (FOLDER / case["name"]).stat().st_size > 500
)


@pytest.fixture(scope="module")
def guard() -> Iterator[GuardedReader]:
    with GuardedReader(stall_seconds=10) as reader:
        yield reader


def damage(data: bytes, chance: np.random.Generator) -> bytes:
    """Flip, overwrite, cut out, double or cut off some bytes."""
    broken = bytearray(data)
    place = int(chance.integers(0, len(broken)))
    length = int(chance.integers(1, 2000))
    match chance.integers(0, 6):
        case 0:
            for at in chance.integers(0, len(broken), 20):
                broken[at] ^= 1 << int(chance.integers(0, 8))
        case 1:
            for at in chance.integers(0, min(len(broken), 2000), 4):
                broken[at] = int(chance.integers(0, 256))
        case 2:
            broken[place : place + length] = bytes(len(broken[place : place + length]))
        case 3:
            del broken[place : place + length]
        case 4:
            broken[place:place] = broken[place : place + length]
        case _:
            del broken[place:]
    return bytes(broken)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, guard: GuardedReader, name: str):
    chance = np.random.default_rng(len(name))
    path = tmp_path / name
    whole = (FOLDER / name).read_bytes()
    for _ in range(5):
        path.write_bytes(damage(whole, chance))
        try:
            info = guard.probe(path)
            wanted = np.linspace(0, min(info.duration_seconds, 1e6), 5)
            frames = list(guard.read_frames(info, wanted))
        except MediaError as error:
            assert "crashed" not in str(error)
            assert "no progress" not in str(error)
        else:
            assert len(frames) == 5
            assert np.isfinite(info.times).all()
            assert (np.diff(info.times) >= 0).all()


def test_a_stream_that_appears_on_the_way_changes_nothing(tmp_path: Path):
    path = tmp_path / "late.ts"
    data = bytearray((FOLDER / "ts_jump_back.ts").read_bytes())
    # A packet that starts a picture gets an identifier that no table has announced.
    data[39106] = 151
    path.write_bytes(data)
    with av.open(str(path)) as container, pytest.raises(IndexError):
        list(container.demux(container.streams.video[0]))
    info = probe(path)
    assert info.frame_count >= 110
    assert numbers(info, range(100)) == list(range(100))


def test_an_edit_list_that_shows_nothing_is_an_error(tmp_path: Path):
    data = (FOLDER / "cfr30.mp4").read_bytes()
    at = data.index(b"elst")
    broken = bytearray(data)
    # The start lies behind all pictures.
    broken[at + 16 : at + 20] = (1 << 30).to_bytes(4, "big")
    path = tmp_path / "nothing.mp4"
    path.write_bytes(broken)
    with pytest.raises(MediaError, match="shows no picture"):
        probe(path)
