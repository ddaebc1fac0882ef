"""What a run tells: a log that is cut back to a checkpoint, progress, and a picture."""

import json
from pathlib import Path

import pytest
from PIL import Image

from apollo_cli.errors import DataError
from apollo_cli.finetune.training.records import (
    Progress,
    RunLog,
    StepRecord,
    draw_loss,
    read_log,
    spell_seconds,
)


def record(step: int, seconds: float = 2.0) -> StepRecord:
    rates = {"llm": 3e-5, "connector": 1e-4}
    return StepRecord(step, 1 / step, rates, 0.5, 100, 20, seconds, 3_100_000_000, ["a:1"])


def test_the_log_has_a_line_a_step(tmp_path: Path):
    log = RunLog(tmp_path, 0)
    log.add(record(1))
    log.add_validation(1, {"loss": 0.5})
    log.add(record(2))
    rows = read_log(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows] == [1, 1, 2]
    assert rows[0]["samples"] == ["a:1"]
    assert rows[1]["validation"] == {"loss": 0.5}
    assert rows[2]["loss"] == 0.5


def test_a_run_that_goes_on_cuts_the_log_back_to_its_checkpoint(tmp_path: Path):
    log = RunLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.add(record(step))
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    log = RunLog(tmp_path, 2)
    log.add(record(3))
    assert [row["step"] for row in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]


def test_a_run_from_the_start_begins_a_new_log(tmp_path: Path):
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 9, "loss": 1.0}) + "\n")
    RunLog(tmp_path, 0)
    assert read_log(tmp_path / "log.jsonl") == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"log\.jsonl cannot be written"):
        RunLog(tmp_path / "none", 0)


def test_progress_tells_step_loss_rates_pace_memory_and_the_time_left():
    assert Progress(62).line(record(2)) == (
        "step 2/62  loss 0.5000  rate 3.0e-05 1.0e-04  50 tokens/s  3.1 GB  2 min left"
    )


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0 s"), (89, "89 s"), (120, "2 min"), (12_000, "3 h 20 min")]
)
def test_durations_are_told_for_readers(seconds: float, told: str):
    assert spell_seconds(seconds) == told


def test_the_loss_is_drawn_as_a_picture(tmp_path: Path):
    log = RunLog(tmp_path, 0)
    for step in range(1, 20):
        log.add(record(step))
    log.add_validation(19, {"loss": 0.2})
    draw_loss(log.path, tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size[0] > 500
    assert not list(tmp_path.glob("*.new"))


def test_tensorboard_gets_its_files_on_request(tmp_path: Path):
    pytest.importorskip("tensorboard")
    log = RunLog(tmp_path, 0, tensorboard=True)
    log.add(record(1))
    log.close()
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 2, "loss": null}',
        '{"step": 2, "loss": "x"}',
        '{"step": 2, "loss": NaN}',
        '{"step": true, "loss": 1}',
        '{"step": "2"}',
        "[" * 100_000,
    ],
)
def test_a_row_of_a_log_that_makes_no_sense_is_left_out(tmp_path: Path, line: str):
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1, "loss": 0.5}}\n{line}\n')
    assert [row["step"] for row in read_log(tmp_path / "log.jsonl")] == [1]
