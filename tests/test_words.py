"""How numbers stand in a sentence."""

import pytest

from apollo_cli.video.reader import ReadReport
from apollo_cli.words import count


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 files are"), (1, "1 file is"), (2, "2 files are")]
)
def test_one_of_a_thing_takes_no_s(number: int, text: str):
    assert count(number, "file is", "files are") == text
    assert count(number, "file") == text.rpartition(" ")[0]


def test_a_report_of_one_damaged_picture_is_a_sentence():
    assert "1 of 1 picture is damaged" in ReadReport(1, [0.5]).describe()
    assert "2 of 9 pictures are damaged" in ReadReport(9, [0.5, 1.0]).describe()
