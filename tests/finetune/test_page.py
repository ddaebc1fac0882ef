"""docs/finetuning.md: its tables are those of now, and its examples of data can be trained on."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copyfile

import pytest

from apollo_cli.finetune.data.formats import FORMATS, load_samples
from apollo_cli.finetune.recipe import DataSource
from apollo_cli.finetune.stages import SCHEDULES
from tests.cases import FOLDER
from tests.finetune import cards

PAGE = cards.PAGE.read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)[^\n]*\n(.*?)```", PAGE, re.DOTALL)
DATA = [text for language, text in BLOCKS if language in ("json", "csv")]
FORMS = tuple(FORMATS)


def test_the_tables_are_those_of_now():
    assert cards.page_with_tables(PAGE) == PAGE, "run python -m tests.finetune.cards"


def test_numbers_that_nobody_measured_are_marked():
    assert "These numbers are computed, not measured" in " ".join(PAGE.split())


@pytest.mark.parametrize("form", ["auto", "own"])
@pytest.mark.parametrize("number", range(len(FORMS)), ids=FORMS)
def test_each_example_of_data_can_be_trained_on(number: int, form: str, tmp_path: Path):
    copyfile(FOLDER / "one_key_60s.mp4", tmp_path / "hive.mp4")
    copyfile(FOLDER / "photo.jpg", tmp_path / "bee.jpg")
    (tmp_path / "data").write_text(DATA[number])
    source = DataSource(tmp_path / "data", format=FORMS[number] if form == "own" else "auto")
    samples, faults = load_samples(source)
    assert faults == []
    assert len(samples) == len(DATA[number].splitlines()) - (FORMS[number] == "csv")


def test_all_forms_have_an_example():
    assert len(DATA) == len(FORMS)


def test_every_schedule_is_on_the_page():
    assert all(f"| `{name}` |" in PAGE for name in SCHEDULES)
