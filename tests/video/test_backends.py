"""Each decoder that is installed gives the right pictures of a handed case, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from apollo_cli.config import Decoder, ReadingOptions
from apollo_cli.errors import UsageError
from apollo_cli.video.guard import GuardedReader
from tests.cases import CASES, FOLDER
from tests.video.matrix import DECODERS, PAGE, case_label, run_case

# PyAV alone notices the damage of these.
DAMAGED = ("bit_flips.mp4",)
READABLE = {
    case["name"]: case
    for case in CASES
    if (FOLDER / case["name"]).is_file()
    and case["klass"] != "error"
    and case["name"] not in DAMAGED
}


@pytest.fixture(scope="module")
def guard() -> Iterator[GuardedReader]:
    with GuardedReader(stall_seconds=10) as reader:
        yield reader


@pytest.mark.parametrize("name", READABLE)
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_decoder_is_right_or_refuses(guard: GuardedReader, decoder: Decoder, name: str):
    result = run_case(guard, decoder, READABLE[name], FOLDER / name)
    assert result.startswith("right" if decoder == "pyav" else ("right", "refused"))


@pytest.mark.skipif("decord" in DECODERS, reason="decord is installed")
def test_a_decoder_that_is_missing_is_named_with_its_remedy(guard: GuardedReader):
    info = guard.probe(FOLDER / "cfr30.mp4")
    with pytest.raises(UsageError, match=r"--decoder decord.*pip install"):
        list(guard.read_frames(info, [0.0], ReadingOptions(decoder="decord")))


def test_the_page_lists_every_case_once_and_pyav_is_right_or_refuses():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    cells = [row.removeprefix("| ").split(" | ") for row in rows]
    assert [row[0] for row in cells] == [case_label(case) for case in CASES]
    for _, _, wanted, result, *_ in cells:
        assert not result.startswith("wrong")
        assert result.startswith("refused") == (wanted == "error")
