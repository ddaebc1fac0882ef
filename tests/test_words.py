"""How numbers stand in a sentence."""

import pytest

from apollo_cli.text import count


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 files are"), (1, "1 file is"), (2, "2 files are")]
)
def test_one_of_a_thing_takes_no_s(number: int, text: str):
    assert count(number, "file is", "files are") == text
    assert count(number, "file") == text.rpartition(" ")[0]
