"""Each decoder that is installed gives the right pictures of a handed case, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError, UsageError
from apollo_cli.video.backends import Decoder, installed_decoders
from apollo_cli.video.guard import GuardedReader
from tests.cases import CASES, FOLDER
from tests.cases.marker import read_marker

INSTALLED = [name for name, version in installed_decoders().items() if version]
# One has no room for a marker; the damage of the other is noticed by PyAV only.
LEFT_OUT = ("tiny16.mp4", "bit_flips.mp4")
READABLE = {
    case["name"]: case
    for case in CASES
    if (FOLDER / case["name"]).is_file()
    and case["klass"] != "error"
    and case["name"] not in LEFT_OUT
}


@pytest.fixture(scope="module")
def guard() -> Iterator[GuardedReader]:
    with GuardedReader(stall_seconds=10) as reader:
        yield reader


def skip_if_it_cannot_be_loaded(guard: GuardedReader, decoder: Decoder) -> None:
    try:
        list(
            guard.read_frames(
                guard.probe(FOLDER / "cfr30.mp4"), [0.0], ReadingOptions(decoder=decoder)
            )
        )
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", READABLE)
@pytest.mark.parametrize("decoder", INSTALLED)
def test_a_decoder_is_right_or_refuses(guard: GuardedReader, decoder: Decoder, name: str):
    info = guard.probe(FOLDER / name)
    skip_if_it_cannot_be_loaded(guard, decoder)
    marks = READABLE[name]["facts"].get("marks") or list(range(info.frame_count))
    count = min(info.frame_count, 5)
    indices = np.random.default_rng(1).choice(info.frame_count, count, replace=False)
    try:
        for frame in guard.read_frames(info, info.times[indices], ReadingOptions(decoder=decoder)):
            mark = read_marker(frame.rgb)
            assert mark is not None
            assert (mark.number, mark.turned) == (marks[indices[frame.position]], 0)
    except MediaError as error:
        assert decoder != "pyav"
        assert "leave out --decoder" in str(error)


@pytest.mark.parametrize("decoder", ["decord", "torchcodec"])
def test_a_decoder_that_is_missing_is_named_with_its_remedy(guard: GuardedReader, decoder: Decoder):
    if decoder in INSTALLED:
        pytest.skip(f"{decoder} is installed")
    info = guard.probe(FOLDER / "cfr30.mp4")
    with pytest.raises(UsageError, match=f"{decoder}, which is not installed; pip install"):
        list(guard.read_frames(info, [0.0], ReadingOptions(decoder=decoder)))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("field_pairs.mpg", "program streams"), ("ts_jump_back.ts", "time line of the file repeats")],
)
def test_torchcodec_refuses_where_it_would_be_wrong(guard: GuardedReader, name: str, fault: str):
    if "torchcodec" not in INSTALLED:
        pytest.skip("torchcodec is not installed")
    skip_if_it_cannot_be_loaded(guard, "torchcodec")
    info = guard.probe(FOLDER / name)
    with pytest.raises(MediaError, match=fault):
        list(guard.read_frames(info, info.times, ReadingOptions(decoder="torchcodec")))


def test_the_default_decoder_is_always_there():
    assert installed_decoders()["pyav"]
