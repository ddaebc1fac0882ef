"""Data files: four formats become the same samples, and every fault is named with its place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from apollo_cli.finetune.data.formats import load_samples
from apollo_cli.finetune.data.samples import FAULT_KINDS, Fault, Sample, Visual
from apollo_cli.finetune.recipe import DataSource
from apollo_cli.model.prompt import Turn
from tests.cases import FOLDER as MEDIA

DATA = Path(__file__).parents[1] / "cases_data"
TALK = [("user", "What is shown?"), ("assistant", "A grid.")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cfr30.mp4", "photo.jpg", "moov_missing.mp4"):
        copy(MEDIA / name, tmp_path)
    return tmp_path.resolve()


def messages(*talk: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in talk]


def conversation(*talk: tuple[str, str]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[role], "value": value} for role, value in talk]


def load(folder: Path, *entries: object, name: str = "d.jsonl") -> tuple[list[Sample], list[Fault]]:
    path = folder / name
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries))
    return load_samples(DataSource(path))


def load_one(folder: Path, **entry: Any) -> tuple[Sample, list[str]]:
    samples, faults = load(folder, {"messages": messages(*TALK), **entry})
    return samples[0], [fault.kind for fault in faults]


def refused(folder: Path, **entry: Any) -> Fault:
    samples, faults = load(folder, {"messages": messages(*TALK), **entry})
    assert not samples
    assert faults[-1].kind == "no_samples"
    assert faults[0].where == "d.jsonl:1"
    assert faults[0].cost == "sample"
    return faults[0]


SHIPPED = {
    "llava": (2, []),
    "bom": (1, []),
    "truncated": (1, ["cut_file"]),
    "text_only": (1, []),
    "mixed_image_video": (2, []),
    "missing_video": (1, ["missing_file"]),
    "broken_video": (2, []),
    "hanging_video": (0, ["not_a_file", "no_samples"]),
    "path_escape": (0, ["outside_folder", "no_samples"]),
    "no_tag": (1, []),
    "tag_in_answer": (0, ["special_token", "tag_in_answer", "no_samples"]),
    "empty_answer": (0, ["empty_answer", "no_samples"]),
    "only_human": (0, ["nothing_to_train", "no_samples"]),
    "many_turns": (1, []),
    "too_long": (1, []),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_case_loads_or_gets_its_named_fault(folder: Path, name: str) -> None:
    os.mkfifo(folder / "fifo.mp4")
    samples, faults = load_samples(DataSource(DATA / f"{name}.json", media=folder))
    assert (len(samples), [fault.kind for fault in faults]) == SHIPPED[name]
    assert all(fault.where.startswith(f"{name}.json") for fault in faults)


def test_every_case_file_is_looked_at() -> None:
    assert {path.stem for path in DATA.iterdir()} == set(SHIPPED)


def test_four_formats_become_the_same_sample(folder: Path) -> None:
    tagged = [("user", "<video>\nWhat is shown?"), ("assistant", "A grid.")]
    inline = [{"type": "video", "video": "cfr30.mp4"}, {"type": "text", "text": "What is shown?"}]
    texts = {
        "a.jsonl": json.dumps({"messages": messages(*TALK), "video": "cfr30.mp4"}),
        "b.jsonl": json.dumps({"messages": messages(("user", inline), TALK[1])}),
        "c.json": json.dumps([{"conversations": conversation(*tagged), "video": "cfr30.mp4"}]),
        "d.json": json.dumps([{"messages": messages(*tagged), "videos": ["cfr30.mp4"]}]),
        "e.jsonl": json.dumps({"messages": messages(*tagged), "videos": ["cfr30.mp4"]}),
        "f.csv": "video,question,answer\ncfr30.mp4,What is shown?,A grid.\n",
        "g.csv": "question;answer;video\nWhat is shown?;A grid.;cfr30.mp4\n",
        # The name does not decide what a file is.
        "h.txt": "\ufeff" + json.dumps({"messages": messages(*TALK), "video": "cfr30.mp4"}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
        samples, faults = load_samples(DataSource(folder / name))
        assert not faults, name
        assert samples[0].turns == (Turn("What is shown?", "A grid."),)
        assert samples[0].visuals == (Visual(folder / "cfr30.mp4", "video"),)
        assert samples[0].kind == "video"


def test_all_turns_stay_in_order() -> None:
    samples, _ = load_samples(DataSource(DATA / "many_turns.json", media=MEDIA))
    assert samples[0].turns == tuple(Turn(f"Q{n}", f"A{n}") for n in range(6))


def test_names_tell_file_place_and_id(folder: Path) -> None:
    samples, _ = load(folder, {"messages": messages(*TALK), "id": 7}, "", {"messages": "no"})
    assert samples[0].name == "d.jsonl:1 (7)"
    samples, _ = load_samples(DataSource(DATA / "llava.json", media=MEDIA), "other/llava.json")
    assert [sample.name for sample in samples] == [
        "other/llava.json entry 1 (s)",
        "other/llava.json entry 2 (s)",
    ]


def test_visuals_follow_the_order_of_their_tags(folder: Path) -> None:
    text = "Compare <image> with\n<video>\nand <image>!"
    sample, kinds = load_one(
        folder,
        messages=messages(("user", text), TALK[1]),
        images=["photo.jpg", "./photo.jpg"],
        videos=["cfr30.mp4"],
    )
    assert [visual.kind for visual in sample.visuals] == ["image", "video", "image"]
    assert sample.turns[0].question == "Compare with\nand !"
    assert not kinds


def test_a_tag_of_the_other_kind_stands_for_the_only_files(folder: Path) -> None:
    talk = messages(("user", "<image>\nWhat?"), TALK[1])
    sample, kinds = load_one(folder, messages=talk, video="cfr30.mp4")
    assert [visual.kind for visual in sample.visuals] == ["video"]
    assert kinds == ["tag_of_other_kind"]


def test_a_tag_in_a_later_turn_moves_to_the_front(folder: Path) -> None:
    talk = messages(*TALK, ("user", "And <video>?"), ("assistant", "Yes."))
    sample, kinds = load_one(folder, messages=talk, videos=["cfr30.mp4"])
    assert (len(sample.visuals), kinds) == (1, [])
    assert sample.turns[1].question == "And ?"


def test_a_system_message_goes_before_the_first_question(folder: Path) -> None:
    sample, kinds = load_one(folder, messages=messages(("system", "Be short."), *TALK))
    assert sample.turns[0].question == "Be short.\n\nWhat is shown?"
    assert kinds == ["system_moved"]


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ({"video": "https://example.org/a.mp4"}, "web_address"),
        ({"video": "/etc/hostname"}, "outside_folder"),
        ({"video": "link.mp4"}, "outside_folder"),
        ({"video": "inside"}, "not_a_file"),
        ({"video": "pipe.mp4"}, "not_a_file"),
        ({"video": "gone.mp4"}, "missing_file"),
        ({"video": "x" * 5000}, "missing_file"),
        ({"video": "empty.mp4"}, "broken_video"),
        ({"image": "empty.mp4"}, "broken_image"),
        ({"video": ""}, "wrong_type"),
        ({"video": 7}, "wrong_type"),
        ({"video": "a\0b"}, "wrong_type"),
        ({"video": "cfr30.mp4", "from": "soon"}, "wrong_type"),
        ({"video": "cfr30.mp4", "from": True}, "wrong_type"),
        ({"video": "cfr30.mp4", "from": 2, "to": 1}, "wrong_window"),
        ({"video": "cfr30.mp4", "from": -1}, "wrong_window"),
        ({"video": "cfr30.mp4", "to": float("nan")}, "wrong_window"),
        ({"video": "cfr30.mp4", "to": 10**400}, "wrong_window"),
        ({"from": 1}, "wrong_window"),
        ({"choices": ["half \ud800"]}, "wrong_type"),
        ({"video": "half \ud800"}, "missing_file"),
        ({"videos": ["cfr30.mp4", "cfr30.mp4"], "from": 1}, "wrong_window"),
        ({"audio": "a.wav"}, "unknown_key"),
        ({"choices": "a|b"}, "wrong_type"),
        ({"choices": [1]}, "wrong_type"),
        ({"messages": {}}, "wrong_type"),
        ({"messages": ["hello"]}, "wrong_type"),
        ({"messages": []}, "nothing_to_train"),
        ({"messages": messages(("user", 7))}, "wrong_type"),
        ({"messages": messages(("user", [{"type": "audio"}]))}, "wrong_type"),
        ({"messages": messages(("tool", "x"))}, "wrong_role"),
        ({"messages": messages(("assistant", "x"))}, "wrong_role"),
        ({"messages": messages(("user", "x"), ("user", "y"))}, "wrong_role"),
        ({"messages": messages(*TALK, ("system", "x"))}, "wrong_role"),
        ({"messages": messages(("user", "<video> x"), TALK[1])}, "tag_without_file"),
        ({"messages": messages(("user", "<video> <video>"), TALK[1]), "video": "cfr30.mp4"},
         "tag_without_file"),
        ({"messages": messages(("user", "<video>"), TALK[1]), "videos": ["cfr30.mp4"] * 2},
         "file_without_tag"),
        ({"messages": messages(("user", "q"), ("assistant", " \n"))}, "empty_answer"),
        ({"messages": messages(("user", "q"), ("assistant", "x <image>"))}, "tag_in_answer"),
        ({"messages": messages(("user", "q"), ("assistant", "x<|im_end|>"))}, "special_token"),
        ({"messages": messages(("user", "<|endoftext|>"), TALK[1])}, "special_token"),
        ({"messages": messages(("user", "half \ud800"), TALK[1])}, "wrong_type"),
    ],
)  # fmt: skip
def test_a_fault_of_a_sample_has_a_name(folder: Path, entry: dict[str, Any], kind: str) -> None:
    (folder / "link.mp4").symlink_to("/etc/hostname")
    (folder / "inside").mkdir()
    (folder / "empty.mp4").touch()
    os.mkfifo(folder / "pipe.mp4")
    assert refused(folder, **entry).kind == kind


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ({"messages": messages(*TALK, ("user", "And?"))}, "unanswered_question"),
        ({"choices": ["red", "green"]}, "answer_not_a_choice"),
        ({"colour": "red"}, "unknown_field"),
    ],
)  # fmt: skip
def test_what_is_odd_but_usable_is_a_note(folder: Path, entry: dict[str, Any], kind: str) -> None:
    _, kinds = load_one(folder, **entry)
    assert kinds == [kind]
    assert FAULT_KINDS[kind].cost == "note"


def test_a_link_inside_the_folder_is_followed(folder: Path) -> None:
    (folder / "also.mp4").symlink_to("cfr30.mp4")
    sample, kinds = load_one(folder, video="also.mp4")
    assert (sample.visuals[0].path, kinds) == (folder / "cfr30.mp4", [])


def test_a_broken_line_costs_itself_only(folder: Path) -> None:
    good = {"messages": messages(*TALK)}
    deep = "[" * 100_000
    samples, faults = load(folder, good, '{"messages": [', "[1]", deep, "", {"messages": 1}, good)
    assert [sample.name for sample in samples] == ["d.jsonl:1", "d.jsonl:7"]
    assert [(fault.kind, fault.where) for fault in faults] == [
        ("broken_line", "d.jsonl:2"),
        ("wrong_type", "d.jsonl:3"),
        ("broken_line", "d.jsonl:4"),
        ("wrong_type", "d.jsonl:6"),
        ("duplicate", "d.jsonl:7"),
    ]
    (folder / "d.jsonl").write_bytes(json.dumps(good).encode() + b'\n{"messages": "\xff"}\n')
    samples, faults = load_samples(DataSource(folder / "d.jsonl"))
    assert (len(samples), faults[0].kind) == (1, "broken_line")
    assert "UTF-8" in faults[0].message


@pytest.mark.parametrize(
    ("content", "kind", "where"),
    [
        (b"", "no_samples", "d"),
        (b"[]", "no_samples", "d"),
        (b"hello world", "unknown_format", "d"),
        (b'{\n "messages": []\n}', "unknown_format", "d"),
        (b"\xff\xfe[\0]\0", "wrong_encoding", "d"),
        (b'[{"id": "\xff"}]', "wrong_encoding", "d"),
        (b"question,answer\ncaf\xe9,x\n", "wrong_encoding", "d"),
        (b'[{"messages": []}, {"messages"', "cut_file", "d entry 2"),
        (b'[{"messages": []}', "cut_file", "d entry 1"),
        (b'[{"messages": []}] tail', "cut_file", "d entry 1"),
        (b'[{"messages": []},\n ]', "cut_file", "d entry 1"),
        (b"question,video\nx,y\n", "missing_column", "d:1"),
        (b'question,answer\n"a,b\n', "cut_file", "d:2"),
        (b"question,answer,Answer\na,b,c\n", "double_column", "d:1"),
        (b"question,answer\na,b,c\n", "wrong_type", "d:2"),
        (b"question,answer,from\na,b,soon\n", "wrong_window", "d:2"),
        (b"question,answer,colour\na,b,c\n", "unknown_field", "d:2"),
    ],
)
def test_a_fault_of_a_file_has_a_name_and_a_place(
    tmp_path: Path, content: bytes, kind: str, where: str
) -> None:
    (tmp_path / "d").write_bytes(content)
    _, faults = load_samples(DataSource(tmp_path / "d"))
    assert (kind, where) in [(fault.kind, fault.where) for fault in faults]


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "[" * 100_000])
def test_brackets_without_end_are_a_fault(tmp_path: Path, content: str) -> None:
    (tmp_path / "d").write_text(content)
    _, faults = load_samples(DataSource(tmp_path / "d"))
    assert faults[0].kind in ("cut_file", "broken_line")
    assert "recursion" not in faults[0].message


def test_samples_with_other_choices_are_not_the_same(folder: Path) -> None:
    asked = {"messages": messages(("user", "Which?"), ("assistant", "red"))}
    choices = [["red", "green"], ["red", "blue"], ["red", "blue"]]
    _, faults = load(folder, *({**asked, "choices": each} for each in choices))
    assert [(fault.kind, fault.where) for fault in faults] == [("duplicate", "d.jsonl:3")]


def test_a_data_file_that_cannot_be_read_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "gone", "."):
        _, faults = load_samples(DataSource(tmp_path / name))
        assert [fault.kind for fault in faults] == ["unreadable_file"]


def test_a_named_format_is_held_to(folder: Path) -> None:
    samples, faults = load_samples(DataSource(DATA / "llava.json", None, "messages", folder))
    assert (samples, faults[0].kind) == ([], "wrong_type")
    samples, _ = load_samples(DataSource(DATA / "llava.json", None, "llava", folder))
    assert len(samples) == 2


def test_a_row_of_csv_is_named_by_its_first_line(folder: Path) -> None:
    (folder / "d.csv").write_text('question,answer\n"two\nlines",a\n\nx,\n')
    samples, faults = load_samples(DataSource(folder / "d.csv"))
    assert samples[0].turns[0].question == "two\nlines"
    assert [(fault.kind, fault.where) for fault in faults] == [("empty_answer", "d.csv:5")]


def test_white_space_around_tags_is_dropped_however_long_it_is(folder: Path) -> None:
    wide = " " * 200_000
    talk = messages(("user", f"a{wide}<video> <image>\n<video>{wide}b{wide}"), TALK[1])
    sample, _ = load_one(folder, messages=talk, videos=["cfr30.mp4"] * 2, image="photo.jpg")
    assert [visual.kind for visual in sample.visuals] == ["video", "image", "video"]
    assert "".join(sample.turns[0].question.split()) == "ab"
    assert len(sample.turns[0].question) < 10
