"""Recipes: all faults named at once, paths from their own folder, and a dump that loads again."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from apollo_cli.errors import DataError
from apollo_cli.finetune.places import spell
from apollo_cli.finetune.recipe import DataSource, Recipe, checks_of, load_recipe, to_toml

GOOD = {"model": "apollo-nano", "stage": 3, "method": "lora", "output": "out"}


def write(folder: Path, values: dict[str, Any], data: str = '[[data]]\npath = "a.jsonl"\n') -> Path:
    (folder / "a.jsonl").touch()
    path = folder / "recipe.toml"
    path.write_text("\n".join(f"{k} = {spell(v)}" for k, v in values.items()) + "\n" + data)
    return path


def faults(folder: Path, values: dict[str, Any], data: str | None = None) -> tuple[str, ...]:
    path = write(folder, values) if data is None else write(folder, values, data)
    with pytest.raises(DataError) as caught:
        load_recipe(path)
    assert caught.value.exit_code == 7
    return caught.value.faults


def test_a_short_recipe_takes_the_parts_of_its_stage(tmp_path: Path):
    recipe = load_recipe(write(tmp_path, GOOD))
    assert recipe.train == ("llm", "connector")
    assert recipe.output == tmp_path / "out"
    assert recipe.data == (DataSource(tmp_path / "a.jsonl"),)


def test_the_defaults_pass_their_own_checks():
    checks = checks_of(Recipe)
    for field in fields(Recipe):
        if field.name in checks and isinstance(field.default, str | int | float | bool):
            assert checks[field.name](field.default) == field.default


def test_all_faults_come_at_once_each_on_a_line(tmp_path: Path):
    values = GOOD | {"stage": 4, "learnin_rate": 1e-4, "seed": True, "epochs": 0}
    found = faults(tmp_path, values, '[[data]]\npath = "none.jsonl"\n[[data]]\nshare = 2.0\n')
    assert len(found) == 7
    message = str(DataError("recipe", faults=found))
    assert message.count("\n") == 7


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learnin_rate": 1.0}, "did you mean learning_rate?"),
        ({"learning_rate": 2.0}, "above 0, up to 1"),
        ({"learning_rate": float("nan")}, "above 0, up to 1"),
        ({"connector_learning_rate": True}, "allowed is a number"),
        ({"batch_size": 1.5}, "whole number from 1"),
        ({"micro_batch_size": 16}, "above batch_size, which is 8"),
        ({"method": "lra"}, '"full", "lora", "qlora"'),
        ({"stage": True}, 'allowed are 1, 2, 3, "custom"'),
        ({"stage": "3"}, 'allowed are 1, 2, 3, "custom"'),
        ({"train": ["llm", "llm"]}, "each may be named once"),
        ({"train": "llm"}, "allowed is a list"),
        ({"train": []}, "train names no part"),
        ({"train": ["encoders"]}, 'stage = "custom" trains anything'),
        ({"stage": "custom"}, "train names no part"),
        ({"stage": 1, "learning_rate": 1e-4}, "that part is not trained"),
        ({"lora_encoders": True}, "train does not name"),
        ({"gradient_checkpointing": 1}, "true and false"),
        ({"model": "apollo-9b"}, "unknown model"),
        ({"model": " "}, "not empty"),
        ({"adapters": ["nowhere"]}, "run the recipe that writes it first"),
        ({"output": "a.jsonl"}, "is a file"),
        ({"dtype": "float16"}, '"bfloat16", "float32"'),
    ],
)
def test_a_fault_is_named_with_what_is_allowed(tmp_path: Path, values: dict[str, Any], words: str):
    found = faults(tmp_path, GOOD | values)
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("", "data is missing"),
        ("data = []", "data names no file"),
        ('data = "a.jsonl"', "written as tables"),
        ("[[data]]\nshare = 1.0", "path is missing"),
        ('[[data]]\npath = "a.jsonl"\nformat = "xml"', '"llava"'),
        ('[[data]]\npath = "a.jsonl"\nmedia = "videos"', "media folder"),
        ('[[data]]\npath = "a.jsonl"\nshare = 0.4', "sum to 0.4; they must sum to 1"),
        ('[[data]]\npath = "a.jsonl"\nshare = 0.4\n[[data]]\npath = "a.jsonl"', "all or for none"),
        (
            '[[data]]\npath = "a.jsonl"\n[[validation]]\npath = "a.jsonl"\nshare = 1.0',
            "validation 1: share belongs to a file of data",
        ),
    ],
)
def test_a_fault_of_the_data_is_named(tmp_path: Path, data: str, words: str):
    assert words in faults(tmp_path, GOOD, data)[0]


@pytest.mark.parametrize("missing", GOOD)
def test_a_missing_key_is_named(tmp_path: Path, missing: str):
    values = {key: value for key, value in GOOD.items() if key != missing}
    (told,) = [fault for fault in faults(tmp_path, values) if fault.startswith(missing)]
    assert re.match(rf"{missing} is missing; \w+", told)


@pytest.mark.parametrize(
    "raw", [b"model = ", b"\xff\xfe", b"a" * 2_000_000, b"a = " + b"[" * 5000 + b"]" * 5000]
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path: Path, raw: bytes):
    path = tmp_path / "recipe.toml"
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)
    assert "recursion" not in str(caught.value)


def test_a_recipe_that_is_not_there_says_how_to_write_one(tmp_path: Path):
    with pytest.raises(DataError, match="apollo finetune new"):
        load_recipe(tmp_path / "recipe.toml")


def test_a_model_folder_beside_the_recipe_is_found(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    assert load_recipe(write(tmp_path, GOOD | {"model": "mine"})).model == str(tmp_path / "mine")


def test_the_dump_loads_to_the_same_recipe_from_any_folder(tmp_path: Path):
    odd = tmp_path / 'a "b" \\ ü\x7f'
    odd.mkdir()
    shares = '[[data]]\npath = "a.jsonl"\nshare = 0.25\nmedia = "."\n' + (
        '[[data]]\npath = "./a.jsonl"\nshare = 0.75\nformat = "jsonl"\n'
        '[[validation]]\npath = "a.jsonl"\n'
    )
    recipe = load_recipe(write(odd, GOOD | {"steps": 3, "fps": 0.1, "learning_rate": 1e-5}, shares))
    elsewhere = tmp_path / "dump.toml"
    elsewhere.write_text(to_toml(recipe), "utf-8")
    loaded = load_recipe(elsewhere)
    assert loaded == recipe
    assert loaded.path != recipe.path


def test_the_length_of_a_run_follows_samples_and_batch(tmp_path: Path):
    recipe = load_recipe(write(tmp_path, GOOD | {"epochs": 1.5, "batch_size": 4}))
    assert recipe.total_steps(10) == 4
    assert recipe.total_steps(1) == 1
    assert replace(recipe, steps=7).total_steps(10) == 7


def test_a_folder_in_place_of_a_file_is_not_called_missing(tmp_path: Path):
    (tmp_path / "videos").write_text("")
    data = '[[data]]\npath = "../a"\nmedia = "videos"\n[[data]]\npath = "/dev/zero"'
    (tmp_path / "a").mkdir()
    told = faults(tmp_path / "a", GOOD, data)
    assert f"data: {tmp_path / 'a'} is a folder; name a file" in told
    assert "data: /dev/zero is a device or socket; name a file" in told


def test_too_many_steps_are_told_with_the_limit(tmp_path: Path):
    told = faults(tmp_path, GOOD | {"steps": 10**30})
    assert told[0].endswith("allowed is a whole number from 1 to 1,000,000,000")


RESULT = '{"adapters": [{"relative": "../low", "absolute": "/nowhere/low"}]}'


@pytest.mark.parametrize("output", ["old", "./low/../old", "old/new", ".", "link", "low", "../top"])
def test_an_output_never_destroys_what_the_run_starts_from(tmp_path: Path, output: str):
    (tmp_path / "top" / "old").mkdir(parents=True)
    (tmp_path / "top" / "old" / "apollo_adapter.json").write_text(RESULT)
    (tmp_path / "top" / "link").symlink_to("old")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    folder = tmp_path / "recipes"
    folder.mkdir()
    place = tmp_path / "top" / output
    data = f"[[data]]\npath = {spell(tmp_path / 'data' / 'a.jsonl')}\n"
    values = GOOD | {"output": str(place), "adapters": [str(tmp_path / "top" / "old")]}
    (told,) = faults(folder, values, data)
    assert "which this run starts from; name another folder" in told
    fine = values | {"output": str(tmp_path / "top" / "new")}
    assert load_recipe(write(folder, fine, data)).adapters


@pytest.mark.parametrize(
    ("output", "owner"),
    [
        (".", "this recipe"),
        ("../talks", "a file of data"),
        ("../seen", "a file of validation"),
        ("../videos", "the media"),
        ("link", "this recipe"),
        ("out", "a file of data"),
    ],
)
def test_an_output_never_writes_over_the_files_of_the_user(tmp_path: Path, output: str, owner: str):
    for name in ("bees", "talks", "seen", "videos", "bees/out"):
        (tmp_path / name).mkdir()
    for name in ("talks/a.jsonl", "seen/a.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "bees" / "link").symlink_to(".")
    data = '[[data]]\npath = "../talks/a.jsonl"\nmedia = "../videos"\n'
    data += '[[validation]]\npath = "../seen/a.jsonl"\n'
    fine = load_recipe(write(tmp_path / "bees", GOOD, data))
    assert fine.output == tmp_path / "bees" / "out"
    # A name in an output that leads out of it.
    (tmp_path / "bees" / "out" / "log.jsonl").symlink_to("../../talks/a.jsonl")
    (told,) = faults(tmp_path / "bees", GOOD | {"output": output}, data)
    assert f"is the folder of {owner}" in told


def test_a_file_of_data_with_two_media_folders_is_refused_since_its_samples_have_one_name(
    tmp_path: Path,
):
    (tmp_path / "more").mkdir()
    first, again = '[[data]]\npath = "a.jsonl"\n', '[[data]]\npath = "./a.jsonl"\n'
    (told,) = faults(tmp_path, GOOD, f'{first}{again}media = "more"\n')
    assert "a.jsonl is named twice, with two media folders; copy the file" in told
    assert load_recipe(write(tmp_path, GOOD, f'{first}{again}media = "."\n'))


@pytest.mark.parametrize(
    "line",
    [
        ".".join(["a"] * 40_000) + " = 1",
        "x = {" + ".".join(["a"] * 40_000) + " = 1}",
        "[" + ".".join(["a"] * 40_000) + "]",
        "x = " + "[" * 90_000,
        "seed = " + "9" * 5000,
        "# " + "x" * 200_000,
    ],
)
def test_a_recipe_that_would_take_gigabytes_to_read_is_refused_at_once(tmp_path: Path, line: str):
    path = write(tmp_path, GOOD)
    path.write_text(f"{line}\n{path.read_text()}")
    tracemalloc.start()
    with pytest.raises(DataError) as caught:
        load_recipe(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.exit_code == 7
    assert len(caught.value.message) < 1000
    assert peak < 20e6


def test_an_unknown_key_of_a_data_file_is_told_with_those_that_are_known(tmp_path: Path):
    data = '[[data]]\npath = "a.jsonl"\nwieght = 2\n'
    told = faults(tmp_path, GOOD, data)[0]
    assert all(key in told for key in ("wieght", *checks_of(DataSource)))
