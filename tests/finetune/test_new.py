"""New recipes: each model and method gives files that load, train what they say, explain it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from apollo_cli.cli import main
from apollo_cli.errors import DataError, WeightsError
from apollo_cli.finetune.adapters import load_base, prepare_network
from apollo_cli.finetune.new import plans_of, write_project
from apollo_cli.finetune.recipe import Recipe, load_recipe
from apollo_cli.finetune.stages import METHODS, SCHEDULES, STAGES, Method
from tests import tiny
from tests.cases import FOLDER as MEDIA
from tests.command import apollo

MODELS = ("apollo-nano", "apollo-1.5b", "apollo-3b", "apollo-7b")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("new") / "tiny")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "bees.jsonl"
    path.touch()
    return path


def recipes(folder: Path, data: Path, model: str, method: Method) -> list[Recipe]:
    files = write_project(folder, [data], model, method)
    # The later stages start from results that are not there yet.
    return [
        load_recipe(path, coming=() if number < 2 else None) for number, path in enumerate(files)
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_every_shipped_recipe_loads_and_opens_what_it_says(
    model: str, method: Method, tmp_path: Path, data: Path, checkpoint: Path
):
    for recipe in recipes(tmp_path / "bees", data, model, method):
        assert (recipe.model, recipe.method) == (model, method)
        assert set(recipe.own_rates) == set(recipe.train)
        dry = replace(recipe, model=str(checkpoint), adapters=(), device="cpu", dtype="float32")
        base = load_base(dry)
        trained = prepare_network(base.network, dry)
        groups = trained.groups()
        assert {group["name"].partition(",")[0] for group in groups} == set(recipe.train)
        inside = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(inside) == sorted(map(id, trained.parameters.values()))
        assert {group["lr"] for group in groups} == set(recipe.own_rates.values())


@pytest.mark.parametrize("method", METHODS)
def test_every_line_is_explained(method: Method, tmp_path: Path, data: Path):
    for path in write_project(tmp_path / "bees", [data], "apollo-3b", method):
        settings = [line for line in path.read_text().splitlines() if " = " in line]
        unexplained = [line for line in settings if "#" not in line]
        assert unexplained == ['path = "../bees.jsonl"']


def test_a_stage_starts_from_the_result_of_the_one_before_it(tmp_path: Path, data: Path):
    folder = tmp_path / "bees"
    tuned, first, second, third = recipes(folder, data, "apollo-3b", "qlora")
    assert (tuned.adapters, first.adapters) == ((), ())
    assert second.adapters == (first.output,)
    assert third.adapters == (second.output,)
    assert [r.stage for r in (first, second, third)] == [1, 2, 3]
    assert [r.train for r in (first, second, third)] == [STAGES[n].trains for n in (1, 2, 3)]
    assert tuned.train == ("llm",)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_that_the_paper_compared_can_be_written(
    name: str, tmp_path: Path, data: Path
):
    files = write_project(tmp_path / "bees", [data], "apollo-nano", "lora", name)
    _, *stages = (load_recipe(path, coming=None) for path in files)
    assert [(recipe.stage, recipe.train) for recipe in stages] == list(SCHEDULES[name])
    outputs = [recipe.output for recipe in stages]
    assert [recipe.adapters for recipe in stages] == [(), *((each,) for each in outputs[:-1])]


def test_rates_follow_the_size_of_the_model(tmp_path: Path, data: Path):
    small, large = (
        recipes(tmp_path / model, data, model, "full")[0].learning_rate
        for model in ("apollo-1.5b", "apollo-7b")
    )
    assert small == 4.2e-5
    assert large == 1.9e-5


def test_a_folder_of_the_user_is_named_whole(tmp_path: Path, data: Path, checkpoint: Path):
    recipe = recipes(tmp_path / "bees", data, str(checkpoint), "lora")[0]
    assert recipe.model == str(checkpoint)
    assert recipe.learning_rate is not None


def test_a_recipe_of_the_user_is_never_overwritten(tmp_path: Path, data: Path):
    folder = tmp_path / "bees"
    folder.mkdir()
    (folder / "stage2.toml").write_text("mine")
    with pytest.raises(DataError, match=r"stage2\.toml exists"):
        write_project(folder, [data], "apollo-nano", "lora")
    assert [path.name for path in folder.iterdir()] == ["stage2.toml"]
    assert (folder / "stage2.toml").read_text() == "mine"


def test_what_is_missing_is_said(tmp_path: Path, data: Path):
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        write_project(tmp_path / "bees", [tmp_path / "none.jsonl"], "apollo-nano", "lora")
    with pytest.raises(WeightsError, match="unknown model"):
        write_project(tmp_path / "bees", [data], "apollo-9b", "lora")
    assert not (tmp_path / "bees").exists()


def test_a_folder_in_place_of_the_data_is_not_called_missing(tmp_path: Path):
    with pytest.raises(DataError, match=rf"--data {tmp_path} is a folder; a file of samples"):
        write_project(tmp_path / "bees", [tmp_path / "x" / ".."], "apollo-nano", "lora")


@pytest.mark.parametrize("name", ["cfr30.mp4", "photo.jpg"])
def test_a_video_or_picture_is_no_file_of_samples(tmp_path: Path, name: str):
    with pytest.raises(DataError, match=rf"{name} is no text; JSON lines"):
        write_project(tmp_path / "bees", [MEDIA / name], "apollo-nano", "lora")
    assert not (tmp_path / "bees").exists()


def test_a_place_that_is_taken_is_told_with_a_way_out(tmp_path: Path, data: Path):
    with pytest.raises(DataError, match=r"bees\.jsonl is a file; a folder is needed; name another"):
        write_project(data, [data], "apollo-nano", "lora")
    write_project(tmp_path / "bees", [data], "apollo-nano", "lora")
    with pytest.raises(DataError, match=r"sft\.toml exists; .*; name another folder, or go on"):
        write_project(tmp_path / "bees", [data], "apollo-nano", "lora")


def test_the_next_command_can_be_pasted_whatever_the_folder_is_called(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "my  bees; 'rm'"
    command = ["finetune", "new", str(folder), "--data", str(data), "--model", "apollo-nano"]
    assert main(command) == 0
    told = capsys.readouterr().err.removeprefix("note: next: ").strip()
    assert shlex.split(told) == ["apollo", "finetune", "check", str(folder / "sft.toml")]


def test_the_command_names_the_files_and_what_to_do_next(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = apollo("finetune", "new", "bees", "--data", data.name, "--model", "apollo-nano")
    assert run.stdout.splitlines() == [
        str(tmp_path / "bees" / plan.file) for plan in plans_of("three")
    ]
    assert run.stderr == "note: next: apollo finetune check bees/sft.toml\n"
