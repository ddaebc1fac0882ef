"""docs/decoders.md names every handed case; its results are written by ``tests.video.matrix``."""

from __future__ import annotations

from tests.cases import CASES
from tests.video.matrix import PAGE, case_label


def test_the_page_lists_every_case_once():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    listed = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert listed == [case_label(case) for case in CASES]


def test_pyav_is_right_or_refuses_in_every_row_of_the_page():
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            wanted, result = line.split(" | ")[2:4]
            assert not result.startswith("wrong")
            assert result.startswith("refused") == (wanted == "error")
