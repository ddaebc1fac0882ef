"""Checkpoints of a run: whole or not there, found again, pruned, and clear when a disk is full."""

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from apollo_cli.errors import DataError
from apollo_cli.finetune.training.checkpoints import (
    find_newest,
    list_changes,
    remove_checkpoints,
    save_checkpoint,
)


def save(root: Path, step: int, *, size: int = 4, keep: int = 2) -> Path:
    tensors = {"trained": {"w": torch.full((size,), float(step))}, "optimizer": {}}
    return save_checkpoint(root, step, tensors, {"schedule": {"rate": 0.1 + 0.2}}, keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def ignore(_: str) -> None:
    """Say nothing."""


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_what_was_saved_comes_back_exactly(tmp_path: Path):
    save(tmp_path, 3)
    found = find_newest(tmp_path, ignore)
    assert found is not None
    assert found.step == 3
    assert found.facts == {"schedule": {"rate": 0.1 + 0.2}}
    assert torch.equal(found.tensors("trained")["w"], torch.full((4,), 3.0))
    assert found.tensors("optimizer") == {}


def test_only_the_newest_are_kept(tmp_path: Path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_no_checkpoint_is_no_fault(tmp_path: Path):
    assert find_newest(tmp_path / "none", ignore) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "no state", "no tensors", "not json"])
def test_a_damaged_one_is_passed_over_with_a_sentence(tmp_path: Path, damage: str):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    tensors, state = folder / "trained.safetensors", folder / "state.json"
    if damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-3])
    elif damage == "flipped":
        raw = bytearray(tensors.read_bytes())
        raw[-1] ^= 1
        tensors.write_bytes(raw)
    elif damage == "not json":
        state.write_text("{")
    else:
        (state if damage == "no state" else tensors).unlink()
    said: list[str] = []
    found = find_newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 1
    assert "step-000002 is damaged" in said[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", True),
        ("step", "2"),
        ("files", {"trained": None}),
        ("facts", []),
        ("facts", {"steps": "x"}),
        ("facts", {"steps": 10**30}),
        ("facts", {"numbers": [1]}),
        ("facts", {"schedule": 3}),
        ("facts", {"identity": None}),
    ],
)
def test_a_forged_state_is_passed_over_by_its_key(tmp_path: Path, key: str, value: object):
    save(tmp_path, 1)
    state = save(tmp_path, 2) / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {key: value}))
    said: list[str] = []
    found = find_newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert f"state.json: {key}" in said[0]


def test_a_damaged_later_one_never_pushes_out_a_good_one(tmp_path: Path):
    save(tmp_path, 1)
    damaged = save(tmp_path, 3)
    (damaged / "state.json").unlink()
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-000002"]


def test_a_torn_one_of_a_killed_run_is_not_found_and_goes_with_the_next(tmp_path: Path):
    save(tmp_path, 1)
    (tmp_path / ".step-000002.part").mkdir()
    found = find_newest(tmp_path, ignore)
    assert found is not None
    assert found.step == 1
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000001", "step-000003"]


def test_a_full_disk_is_one_clear_error_and_the_last_one_stays_whole(tmp_path: Path):
    save(tmp_path, 1)
    with (
        full_disk(100_000),
        pytest.raises(DataError, match=r"last good one is step-000001.*make room"),
    ):
        save(tmp_path, 2, size=1_000_000)
    assert names(tmp_path) == ["step-000001"]
    assert find_newest(tmp_path, ignore) is not None


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="there is no earlier one"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_tensors_that_share_memory_are_saved_each(tmp_path: Path):
    table = torch.arange(4.0)
    save_checkpoint(tmp_path, 1, {"optimizer": {"a": table, "b": table}}, {}, 1)
    found = find_newest(tmp_path, ignore)
    assert found is not None
    assert torch.equal(found.tensors("optimizer")["b"], table)


def test_all_are_deleted_for_a_fresh_start(tmp_path: Path):
    save(tmp_path, 1)
    (tmp_path / ".step-000002.part").mkdir()
    remove_checkpoints(tmp_path)
    assert names(tmp_path) == []
    remove_checkpoints(tmp_path / "none")


def test_changes_are_told_in_words():
    before = {"seed": 0, "train": ["llm"], "data a.jsonl": "0" * 64, "gone": 1}
    now = {"seed": 1, "train": ("llm",), "data a.jsonl": "1" * 64, "more": 2}
    assert list_changes(before, now) == [
        "seed was 0 and is 1",
        "data a.jsonl has changed",
        "gone is gone",
        "more is new",
    ]
