"""The check of a recipe: all faults at once, what a run would learn, and nothing hidden."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apollo_cli.errors import DataError, WeightsError
from apollo_cli.finetune.adapters import load_base
from apollo_cli.finetune.check import check_file, check_recipe
from apollo_cli.finetune.data.dataset import hold_out, load_dataset
from apollo_cli.finetune.data.samples import Sample, Visual
from apollo_cli.finetune.recipe import load_recipe
from apollo_cli.finetune.report import CheckReport
from apollo_cli.model.prompt import Turn
from apollo_cli.weights.repack import save_quantized
from tests import tiny
from tests.cases import FOLDER as MEDIA
from tests.finetune.results import recipe_of, train_randomly

DATA = Path(__file__).parents[1] / "cases_data"
KEYS = {"model": "apollo-nano", "stage": 3, "method": "lora", "output": "out"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cfr30.mp4", "photo.jpg", "moov_missing.mp4", "one_key_60s.mp4"):
        copy(MEDIA / name, tmp_path)
    return tmp_path.resolve()


def entry(question: str, answer: str = "a grid", **fields: Any) -> dict[str, Any]:
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": talk, **fields}


def write_data(folder: Path, *entries: dict[str, Any], name: str = "bees.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in entries))
    return path


def check(folder: Path, *data: Path, **keys: Any) -> CheckReport:
    path = folder / "sft.toml"
    rows = [f"{key} = {json.dumps(value)}" for key, value in {**KEYS, **keys}.items()]
    for source in data:
        rows += [
            "[[data]]",
            f"path = {json.dumps(str(source))}",
            f"media = {json.dumps(str(folder))}",
        ]
    path.write_text("\n".join(rows))
    return check_recipe(load_recipe(path))


def kinds(report: CheckReport) -> list[str]:
    return [fault.kind for fault in report.faults]


def test_all_faults_of_all_files_are_told_at_once(folder: Path) -> None:
    os.mkfifo(folder / "fifo.mp4")
    report = check(folder, *sorted(DATA.iterdir()), validation_share=0.0)
    found = set(kinds(report))
    assert found >= {
        *("missing_file", "broken_video", "not_a_file", "outside_folder", "empty_answer"),
        *("nothing_to_train", "tag_in_answer", "too_long", "cut_file", "no_samples"),
    }
    text = report.describe()
    for fault in report.faults:
        assert fault.received in text or f"{fault.kind} (" in text
    error = report.error()
    assert error is not None
    assert error.exit_code == 7
    assert "sft.toml has 6 faults that stop it and 8 samples" in error.message


def test_good_data_has_no_fault_and_tells_what_is_learned(folder: Path) -> None:
    rows = [entry(f"what is {n}?", video="cfr30.mp4") for n in range(22)]
    texts = [entry(f"say {n}", f"{n}") for n in range(3)]
    report = check(folder, write_data(folder, *rows, *texts), steps=40, validation_share=0.0)
    assert report.faults == ()
    assert report.error() is None
    assert {kind: round(share, 2) for kind, share in report.shares.items() if share} == {
        "text": 0.12,
        "video": 0.88,
    }
    text = report.describe()
    assert "[[ a grid<|endoftext|>]]" in text
    assert "<8 visual tokens>" in text
    assert "0.0-1.5 seconds" in text
    assert "40, of 8 samples each" in text
    assert "\x1b" not in text


def test_the_report_is_plain_values_too(folder: Path) -> None:
    data = write_data(folder, entry("a?", video="cfr30.mp4"), entry("b?", video="gone.mp4"))
    report = check(folder, data, validation_share=0.0)
    told = json.loads(json.dumps(report.to_dict()))
    assert told["good"] is False
    assert told["faults"][0]["kind"] == "missing_file"
    assert told["lengths"]["allowed"] == 1024
    assert [piece["role"] for piece in told["previews"][0]["pieces"]][-1] == "trained"


def test_many_faults_of_a_kind_are_one_group_with_examples(folder: Path) -> None:
    rows = [entry(f"{n}?", video=f"gone{n}.mp4") for n in range(9)]
    report = check(folder, write_data(folder, *rows, entry("x")), validation_share=0.0)
    text = report.describe(examples=2)
    assert "missing_file (9): " in text
    assert text.count("bees.jsonl:") == 3  # Two examples, and the preview.
    assert "and 7 more" in text


@pytest.mark.parametrize(("texts", "told"), [(0, True), (1, True), (3, False), (12, True)])
def test_the_share_of_text_is_told_with_its_reason(folder: Path, texts: int, told: bool) -> None:
    rows = [entry(f"{n}?", video="cfr30.mp4") for n in range(22)]
    rows += [entry(f"say {n}") for n in range(texts)]
    report = check(folder, write_data(folder, *rows), validation_share=0.0)
    assert ("text_share" in kinds(report)) == told
    assert ("forgets how to talk" in report.describe()) == told
    assert report.error() is None


@pytest.mark.parametrize(
    ("stage", "train"), [(3, ["connector"]), ("custom", ["connector"]), ("custom", ["encoders"])]
)
def test_text_where_the_language_model_is_frozen_is_told_to_teach_nothing(
    folder: Path, stage: int | str, train: list[str]
) -> None:
    rows = [entry("a?", video="cfr30.mp4"), entry("b"), entry("c")]
    data = write_data(folder, *rows)
    report = check(folder, data, stage=stage, train=train, validation_share=0.0)
    assert kinds(report) == ["text_teaches_nothing"]
    assert "2 samples of text" in report.describe()
    assert report.error() is None


def test_images_in_stage_2_are_an_error_with_the_finding(folder: Path) -> None:
    data = write_data(folder, entry("a?", video="cfr30.mp4"), entry("b?", image="photo.jpg"))
    report = check(folder, data, stage=2, method="full", validation_share=0.0)
    assert kinds(report) == ["images_in_stage_2"]
    assert report.error() is not None
    assert "finding 9" in report.describe()
    allowed = check(
        folder, data, stage=2, method="full", validation_share=0.0, images_in_stage_2=True
    )
    assert allowed.error() is None
    assert allowed.shares["image"] == 0.5


def test_a_stage_leaves_out_what_it_cannot_use(folder: Path) -> None:
    data = write_data(
        folder, entry("a?", video="cfr30.mp4"), entry("b"), entry("c", image="photo.jpg")
    )
    report = check(folder, data, stage=1, method="full", validation_share=0.0)
    assert kinds(report) == ["kind_not_in_stage", "kind_not_in_stage"]
    assert report.shares["video"] == 1.0
    nothing = check(folder, write_data(folder, entry("b")), stage=1, method="full")
    assert kinds(nothing) == ["kind_not_in_stage", "nothing_held_out", "no_samples"]
    assert nothing.error() is not None


def test_a_long_video_is_told_with_its_coverage_and_shown_in_short(folder: Path) -> None:
    data = write_data(folder, entry("a?", video="one_key_60s.mp4"))
    report = check(folder, data, validation_share=0.0, max_tokens=500)
    assert "thinned" in kinds(report)
    assert "seen of every" in report.describe()
    assert "more clips ..." in report.describe()
    assert report.lengths is not None
    assert report.lengths.most <= 500


def test_characters_that_would_change_the_terminal_are_escaped(folder: Path) -> None:
    data = write_data(folder, entry("\x1b[2Ja?", id="\x1b[31m", video="\x1b.mp4"), entry("\x1b[2J"))
    assert "\x1b" not in check(folder, data, validation_share=0.0).describe()


def test_a_model_that_is_not_here_is_planned_from_its_public_shape(folder: Path) -> None:
    data = write_data(folder, entry("a?", video="cfr30.mp4"))
    report = check(folder, data, model="apollo-3b", validation_share=0.0)
    assert report.lengths is not None
    assert "not on this machine" in report.describe()
    assert report.previews == ()


def test_a_broken_model_does_not_hide_the_faults_of_the_data(folder: Path) -> None:
    model = tiny.save(folder / "tiny")
    (model / "llm" / "config.json").write_text("{")
    data = write_data(folder, entry("a?", video="gone.mp4"), entry("b?"))
    found = kinds(check(folder, data, model=str(model), validation_share=0.0))
    assert found == ["missing_file", "unknown_model"]


def talk(name: str, *visuals: Visual) -> Sample:
    return Sample(name, (Turn(f"{name}?", "yes"),), visuals)


def test_whole_videos_are_held_out_and_always_the_same() -> None:
    samples = [
        talk(f"{clip}-{n}", Visual(Path(f"/a/{clip}.mp4"), "video"))
        for clip in range(20)
        for n in range(3)
    ]
    kept, held = hold_out(samples, 0.1, seed=1)
    assert (len(kept), len(held)) == (54, 6)
    assert not {s.visuals for s in kept} & {s.visuals for s in held}
    assert hold_out(samples[::-1], 0.1, seed=1)[1] == held[::-1]
    assert hold_out(samples, 0.1, seed=2)[1] != held
    assert hold_out(samples, 0.0, seed=1) == (samples, [])
    # One video has all the samples; or each has so many that little would be left.
    assert hold_out(samples[:3], 0.5, seed=1) == (samples[:3], [])
    assert hold_out(samples[:6], 0.05, seed=1) == (samples[:6], [])
    kept, held = hold_out([*samples[:3], talk("a"), talk("b")], 0.1, seed=1)
    assert (len(kept), len(held)) == (4, 1)
    assert not held[0].visuals


@pytest.mark.parametrize("seed", range(8))
def test_samples_that_share_any_video_are_held_out_together(seed: int) -> None:
    def clip(number: int) -> Visual:
        return Visual(Path(f"/a/{number}.mp4"), "video")

    # Each two share the second of one and the first of the other: chains of three.
    samples = [
        talk(f"{chain}-{n}", clip(4 * chain + n), clip(4 * chain + n + 1))
        for n in range(3)
        for chain in range(10)
    ]
    kept, held = hold_out(samples, 0.1, seed)
    assert len(held) == 3
    assert not {v for s in kept for v in s.visuals} & {v for s in held for v in s.visuals}
    assert hold_out(samples[::-1], 0.1, seed)[1] == held[::-1]


def test_all_stages_hold_out_the_same_videos(folder: Path) -> None:
    rows = []
    for n in range(10):
        copy(folder / "cfr30.mp4", folder / f"{n}.mp4")
        rows += [entry(f"{n}?", video=f"{n}.mp4"), entry(f"say {n}")]
    data = write_data(folder, *rows)
    held = []
    for stage in (1, 3):
        check(folder, data, stage=stage, method="full", validation_share=0.3)
        dataset = load_dataset(load_recipe(folder / "sft.toml"))
        held.append([s.name for s in dataset.held_out if s.kind == "video"])
    assert held[0] == held[1] != []


def test_a_broken_video_leaves_validation_empty_or_itself_out(folder: Path) -> None:
    for n in range(10):
        copy(folder / "cfr30.mp4", folder / f"{n}.mp4")
    data = write_data(folder, *(entry(f"{n}?", video=f"{n}.mp4") for n in range(10)))
    check(folder, data, validation_share=0.2)
    dataset = load_dataset(load_recipe(folder / "sft.toml"))
    trained = [sample.name for sample in dataset.samples]
    told = dataset.without_broken(set(trained[1:]))
    assert [sample.name for sample in told.samples] == trained[1:]
    assert told.held_out == ()
    assert [fault.kind for fault in told.faults] == ["nothing_held_out"]


def test_files_of_the_same_name_keep_their_samples_apart(folder: Path) -> None:
    (folder / "more").mkdir()
    one = write_data(folder, entry("a?"))
    two = write_data(folder / "more", entry("b?"))
    check(folder, one, two, validation_share=0.0)
    names = {s.name for s in load_dataset(load_recipe(folder / "sft.toml")).samples}
    assert names == {f"{one}:1", f"{two}:1"}


def test_a_held_out_sample_that_is_trained_on_is_told(folder: Path) -> None:
    data = write_data(folder, entry("a?"), entry("b?"))
    path = folder / "sft.toml"
    check(folder, data)
    path.write_text(path.read_text() + f"\n[[validation]]\npath = {json.dumps(str(data))}\n")
    assert kinds(check_recipe(load_recipe(path))).count("held_out_twice") == 2


@pytest.mark.parametrize("output", ["/proc/x", "bees.jsonl/out", "dangling/out"])
def test_an_output_that_cannot_be_written_is_a_fault(folder: Path, output: str) -> None:
    (folder / "dangling").symlink_to(folder / "nowhere")
    data = write_data(folder, entry("a?"), entry("b?", video="gone.mp4"))
    report = check(folder, data, output=output, validation_share=0.0)
    assert {"output_not_writable", "missing_file"} <= set(kinds(report))
    assert report.error() is not None


def test_looking_at_the_output_leaves_nothing_there(folder: Path) -> None:
    report = check(folder, write_data(folder, entry("a?")), validation_share=0.0)
    assert "output_not_writable" not in kinds(report)
    assert not (folder / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there_is_a_fault_with_the_line_to_write(folder: Path) -> None:
    report = check(folder, write_data(folder, entry("a?")), device="cuda", validation_share=0.0)
    (fault,) = [fault for fault in report.faults if fault.kind == "device_not_there"]
    assert 'set device = "cpu" in the recipe' in fault.message
    assert "--device" not in fault.message
    assert fault.message.count("device cuda") == 1
    assert report.error() is not None


def test_all_faults_of_a_sample_are_told_at_once(folder: Path) -> None:
    bad = entry("<|im_end|>?", "<video> <|im_start|>", video=["gone.mp4", "lost.mp4"], choices=7)
    report = check(folder, write_data(folder, entry("a?"), bad), validation_share=0.0)
    told = {(fault.kind, fault.received.split()[0]) for fault in report.faults}
    assert told >= {
        *(("special_token", "a"), ("special_token", "answer"), ("tag_in_answer", "answer")),
        *(("missing_file", "gone.mp4"), ("missing_file", "lost.mp4"), ("wrong_type", "choices")),
    }
    error = report.error()
    assert error is not None
    assert "has 1 sample that would be left out; repair it, or run without this" in error.message


FAULTY = [
    "learning_rate = 7",
    'stage = "four"',
    'model = "apollo-9b"',
    "batch_size = 1\nmicro_batch_size = 2",
    "train = []",
    'dtype = "int4"',
    'output = "."',
    '[[data]]\npath = "gone.jsonl"',
    '[[validation]]\npath = "gone.jsonl"',
]


@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_of_the_recipe_does_not_hide_those_of_the_data(folder: Path, fault: str) -> None:
    rows = [entry("a?", video="gone.mp4"), entry("b?", video="moov_missing.mp4"), entry("c?")]
    data = write_data(folder, *rows)
    check(folder, data, validation_share=0.0)
    path = folder / "sft.toml"
    names = [line.split(" = ")[0] for line in fault.splitlines()]
    kept = [line for line in path.read_text().splitlines() if line.split(" = ")[0] not in names]
    kept = path.read_text().splitlines() if fault.startswith("[") else kept
    place = len(kept) if fault.startswith("[") else 0
    path.write_text("\n".join([*kept[:place], fault, *kept[place:]]))
    report = check_file(path)
    assert {"recipe", "missing_file", "broken_video"} <= set(kinds(report))
    assert {fault.cost for fault in report.faults} == {"run", "sample"}
    assert "moov_missing.mp4" in report.describe()
    assert "memory" not in report.describe()
    assert json.loads(json.dumps(report.to_dict()))["good"] is False
    with pytest.raises(DataError):
        load_recipe(path)


def test_all_faults_of_a_recipe_are_shown_beside_those_of_the_data(folder: Path) -> None:
    data = write_data(folder, entry("a?", video="gone.mp4"))
    (folder / "sft.toml").write_text(
        f"a = 1\nb = 1\nc = 1\nd = 1\n[[data]]\npath = {json.dumps(str(data))}\n"
    )
    report = check_file(folder / "sft.toml")
    text = report.describe(examples=1)
    assert text.count("is not a key of a recipe") == 4
    assert all(f"{key} is missing" in text for key in ("model", "stage", "method", "output"))
    assert "gone.mp4" in text


def test_a_result_to_start_from_may_come_later_than_the_check(folder: Path) -> None:
    data = write_data(folder, entry("a?", video="cfr30.mp4"), entry("b?", video="gone.mp4"))
    check(folder, data, validation_share=0.0)
    path = folder / "sft.toml"
    path.write_text(f'adapters = ["stage1"]\n{path.read_text()}')
    report = check_file(path)
    assert {"result_not_there", "missing_file"} <= set(kinds(report))
    assert {f.cost for f in report.faults if f.kind == "result_not_there"} == {"note"}
    assert report.lengths is not None
    with pytest.raises(DataError, match="run the recipe that writes it first"):
        load_recipe(path)


PACKAGES = {
    "peft": {},
    "accelerate": {},
    "matplotlib": {},
    "bitsandbytes": {"method": "qlora"},
    "tensorboard": {"tensorboard": True},
}


@pytest.mark.parametrize(("package", "keys"), PACKAGES.items(), ids=PACKAGES)
def test_what_a_run_would_stop_at_once_for_is_told_by_the_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, keys: dict[str, Any]
) -> None:
    data = write_data(folder, entry("a?", video="cfr30.mp4"))
    find_spec = importlib.util.find_spec
    assert check(folder, data, validation_share=0.0, **keys).lacking == ()

    def find(name: str, *rest: Any) -> Any:
        return None if name == package else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    report = check(folder, data, validation_share=0.0, **keys)
    (told,) = report.lacking
    assert package in told
    assert f"run needs first  {told}" in report.describe()
    assert report.to_dict()["run_needs_first"] == [told]


def test_a_model_that_is_to_be_fetched_and_a_disk_that_is_too_small_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_data(folder, entry("a?", video="cfr30.mp4"))
    # Three times weights and two states of 3.1 billion values, and the result.
    keys: dict[str, Any] = {"model": "apollo-3b", "method": "full", "train": ["llm"], "steps": 900}
    (pull,) = check(folder, data, validation_share=0.0, **keys).lacking[:1]
    assert pull == "apollo models pull apollo-3b"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=120e9))
    _, room = check(folder, data, validation_share=0.0, **keys).lacking
    assert "3 checkpoints and the result take 123.4 GB, free are 120.0" in room
    assert len(check(folder, data, validation_share=0.0, **keys, keep_checkpoints=1).lacking) == 1
    old = folder / "out" / "checkpoints" / "step-000100"
    old.mkdir(parents=True)
    with (old / "trained.safetensors").open("wb") as file:
        file.truncate(4_000_000_000)
    assert len(check(folder, data, validation_share=0.0, **keys).lacking) == 1


@pytest.mark.parametrize("what", ["another model", "a damaged result", "stored in 4 bit"])
def test_a_start_that_the_run_would_refuse_is_a_fault_of_the_check(folder: Path, what: str) -> None:
    model = tiny.save(folder / "tiny")
    recipe = recipe_of(model, folder / "stage1", train=("connector",))
    train_randomly(recipe)
    keys: dict[str, Any] = {"adapters": ["stage1"], "model": str(model), "stage": "custom"}
    keys |= {"train": ["llm"], "validation_share": 0.0}
    data = write_data(folder, entry("a?"))
    assert "unfit_start" not in kinds(check(folder, data, **keys))
    if what == "another model":
        keys["model"] = "apollo-nano"
    elif what == "a damaged result":
        (folder / "stage1" / "connector.safetensors").write_bytes(b"")
    else:
        stored = save_quantized(model, folder / "stored", "4bit").folder
        keys |= {"model": str(stored), "method": "full", "adapters": []}
    report = check(folder, data, **keys)
    assert "unfit_start" in kinds(report)
    assert report.error() is not None
    with pytest.raises((DataError, WeightsError)) as caught:
        load_base(load_recipe(folder / "sft.toml"))
    (told,) = [fault for fault in report.faults if fault.kind == "unfit_start"]
    assert told.received == caught.value.message
