"""``apollo finetune`` as a user types it: exit codes, what goes where, and what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apollo_cli.cli import main
from apollo_cli.weights.adapter import read_adapter
from tests.command import apollo
from tests.finetune.results import recipe_of, train_randomly
from tests.finetune.toy import write_toy

NANO = Path(__file__).parents[2] / "weights" / "nano"
find_spec = importlib.util.find_spec


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), clips=1, questions=1)


def test_a_good_recipe_is_told_on_stdout(toy: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["finetune", "check", str(toy)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("recipe.toml: stage 3, lora")
    for name in ("memory", "steps", "WHAT IS LEARNED"):
        assert name in told.out
    assert told.err == ""


def test_as_json_every_fault_has_a_name(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "data.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}]}\n'
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    (tmp_path / "recipe.toml").write_text(
        'model = "apollo-nano"\nstage = 3\nmethod = "full"\noutput = "out"\n'
        '[[data]]\npath = "data.jsonl"\n'
    )
    assert main(["finetune", "check", str(tmp_path / "recipe.toml"), "--json"]) == 7
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert not report["good"]
    assert "nothing_to_train" in {fault["kind"] for fault in report["faults"]}
    assert told.err.startswith("error: ")


def test_faults_of_a_recipe_come_each_on_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "recipe.toml").write_text('model = "apollo-nano"\nstag = 3\n')
    for verb in ("check", "run"):
        assert main(["finetune", verb, str(tmp_path / "recipe.toml")]) == 7
        told = capsys.readouterr()
        assert told.out == ""
        first, *rest = told.err.splitlines()
        assert first.endswith("has 5 faults")
        assert "  - stag is not a key of a recipe; did you mean stage?" in rest
        assert len(rest) == 5


@pytest.mark.parametrize("package", ["peft", "accelerate"])
def test_a_missing_package_is_told_with_what_to_install(
    package: str,
    toy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def find(name: str, *rest: Any) -> Any:
        return None if name == package else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert main(["finetune", "run", str(toy)]) == 7
    said = capsys.readouterr().err
    assert said == f'error: {package} not installed; pip install "apollo-video-cli[finetune]"\n'


def test_a_run_prints_its_folder_and_a_length_that_is_typed_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = write_toy(tmp_path, clips=1, questions=1)
    assert main(["finetune", "run", str(recipe), "--steps", "1"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{tmp_path / 'out'}\n"
    assert "step 1/1" in told.err


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_a_project_in_a_folder_with_an_odd_name_is_trained_to_its_end(tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"b\xe9es")
    recipe = write_toy(folder, clips=1, questions=1, steps=1)
    for verb in ("check", "run"):
        ended = apollo("finetune", verb, recipe)
        assert ended.returncode == 0, ended.stderr
    assert read_adapter(folder / "out").parts == ("llm", "connector")
    assert (folder / "out" / "run.json").is_file()


def test_a_run_goes_on_when_nobody_reads_what_it_says_any_more(tmp_path: Path):
    recipe = write_toy(tmp_path, clips=0, texts=4, steps=6)
    run = subprocess.Popen(
        [sys.executable, "-m", "apollo_cli", "finetune", "run", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert run.stderr is not None
    assert run.stderr.readline().startswith("step 1/6")
    run.stderr.close()
    assert run.stdout.read() == f"{tmp_path / 'out'}\n"
    assert run.wait() == 0
    assert (tmp_path / "out" / "apollo_adapter.json").is_file()


def test_stages_are_run_in_a_row_and_a_fault_of_a_later_one_is_told_before_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first = write_toy(tmp_path, clips=1, questions=1, texts=0, stage=1, method="full", steps=1)
    text = first.read_text().replace("learning_rate = 0.001\n", "")
    first.write_text(text)
    later = tmp_path / "later.toml"
    chained = text.replace("stage = 1", "stage = 3").replace('output = "out"', 'output = "last"')
    later.write_text(f'adapters = ["out"]\n{chained}'.replace("steps = 1", "stepz = 1"))
    assert main(["finetune", "run", str(first), str(later)]) == 7
    assert "did you mean steps?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    later.write_text(f'adapters = ["out"]\n{chained}')
    assert main(["finetune", "run", str(first), str(later)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n{tmp_path / 'last'}\n"


def test_what_is_wrong_with_the_data_of_a_later_recipe_is_told_before_the_first_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first = write_toy(tmp_path, clips=0, steps=1)
    later = write_toy(tmp_path / "later", clips=0, texts=0, adapters=["../out"])
    assert main(["finetune", "run", str(first), str(later)]) == 7
    assert "data.jsonl: is empty" in capsys.readouterr().err
    same = write_toy(tmp_path / "same", clips=0, output="../out")
    assert main(["finetune", "run", str(first), str(same)]) == 7
    assert "an output of its own" in capsys.readouterr().err
    large = write_toy(tmp_path / "large", clips=0, model="apollo-3b")
    assert main(["finetune", "run", str(first), str(large)]) == 5
    assert "apollo models pull apollo-3b" in capsys.readouterr().err
    alone = write_toy(tmp_path / "alone", clips=0, adapters=["../out"])
    for recipes in ([alone], [alone, first], [first, alone, tmp_path / "none.toml"]):
        assert main(["finetune", "run", *map(str, recipes)]) == 7
    assert not (tmp_path / "out").exists()


def test_a_merge_over_something_is_a_fault_of_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = recipe_of(NANO, tmp_path / "out")
    train_randomly(recipe)
    taken = tmp_path / "taken"
    taken.mkdir()
    assert main(["finetune", "merge", str(recipe.output), "-o", str(taken)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["finetune", "merge", str(tmp_path), "-o", str(tmp_path / "new")]) == 5
    assert "holds no apollo_adapter.json" in capsys.readouterr().err
