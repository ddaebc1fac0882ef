"""Two processes learn what one learns from the same global batch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from apollo_cli.finetune.training.records import read_log
from tests.command import Done, apollo
from tests.finetune.toy import copy_toy, write_toy

KEYS = {
    "steps": 3,
    "batch_size": 5,
    "validation_share": 0.2,
    "learning_rate": 1e-4,
    "connector_learning_rate": 1e-4,
    "lora_dropout": 0.1,
}
LAUNCHER = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def run_twofold(recipe: Path) -> Done:
    """Train in two processes, as a user with two GPUs does."""
    command = [sys.executable, *LAUNCHER, "-m", "apollo_cli", "finetune", "run", str(recipe)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    return Done(ended.returncode, ended.stdout, ended.stderr)


def rows(recipe: Path, key: str) -> list[float]:
    log = read_log(recipe.parent / "out" / "log.jsonl")
    return [row[key] for row in log if "loss" in row]


@pytest.mark.slow
def test_two_processes_give_the_losses_and_the_result_of_one(tmp_path: Path):
    one = write_toy(tmp_path / "one", **KEYS)
    two = copy_toy(one, tmp_path / "two")
    alone, together = apollo("finetune", "run", one), run_twofold(two)
    assert alone.returncode == 0, alone.stderr
    assert together.returncode == 0, together.stderr
    assert rows(two, "loss") == pytest.approx(rows(one, "loss"), abs=1e-5)
    assert rows(two, "tokens") == rows(one, "tokens")
    # One of them talks: the place of the result is there once, and each step too.
    assert together.stdout == f"{tmp_path / 'two' / 'out'}\n"
    assert together.stderr.count("step 1/3 ") == 1
    held_out = [line for line in alone.stderr.splitlines() if line.startswith("held out")]
    assert held_out[0].split(",")[0] == "held out: 2 samples"
    assert held_out[0] in together.stderr
    for name in ("adapter_model.safetensors", "connector.safetensors"):
        first = load_file(tmp_path / "one" / "out" / name)
        second = load_file(tmp_path / "two" / "out" / name)
        assert first.keys() == second.keys()
        assert all(torch.allclose(first[key], second[key], atol=1e-4) for key in first)


@pytest.mark.slow
def test_two_processes_agree_on_what_can_be_read_and_what_teaches_nothing(tmp_path: Path):
    train = {"stage": "custom", "train": ["connector"], "learning_rate": None}
    one = write_toy(tmp_path / "one", **(KEYS | train), epochs=1.0)
    (tmp_path / "one" / "2.mp4").write_bytes(b"not a video")
    two = copy_toy(one, tmp_path / "two")
    for ended in (apollo("finetune", "run", one), run_twofold(two)):
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("2 samples are left out") == 1
    assert rows(two, "loss") == pytest.approx(rows(one, "loss"), abs=1e-5)
    assert rows(two, "tokens") == rows(one, "tokens")
