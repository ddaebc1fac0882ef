"""Keys of data files: what would change what is learned is read, or is a fault that is named."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from apollo_cli.finetune.data.formats import load_samples
from apollo_cli.finetune.data.samples import Fault, Sample, Visual
from apollo_cli.finetune.recipe import DataSource
from tests.cases import FOLDER as MEDIA

USER = {"role": "user", "content": "What is shown?"}
ANSWER = {"role": "assistant", "content": "A grid."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy(MEDIA / "cfr30.mp4", tmp_path)
    return tmp_path.resolve()


def load(folder: Path, content: object, name: str = "d.jsonl") -> tuple[list[Sample], list[Fault]]:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_samples(DataSource(path))


def row(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages or (USER, ANSWER)), **fields}


LLAVA = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A grid.", "loss": False}]
PART = {"type": "video", "video": "cfr30.mp4"}
ROWS: list[tuple[object, str, str]] = [
    (row(USER, {**ANSWER, "loss": False}), 'message 2 has the key "loss"', "role, content"),
    (row(USER, ANSWER | {"Content": "x"}), '"Content"', "did you mean content"),
    ([{"conversations": LLAVA, "video": "cfr30.mp4"}], '"loss"', "from, value"),
    (row({"role": "user", "content": [{**PART, "video_start": 1}]}, ANSWER), '"video_start"',
     "did you mean from"),
    (row({"role": "user", "content": [{**PART, "fps": 2}]}, ANSWER), '"fps"', "known are"),
    (row({"role": "user", "content": [{"type": "text", "text": "a", "bold": 1}]}, ANSWER),
     '"bold"', "text"),
    (row(video={"video": "cfr30.mp4", "end": 3}), '"end"', "did you mean to"),
    (row(videos=[{"path": "cfr30.mp4", "start": 3}]), '"start"', "did you mean from"),
    (row(image={"path": "cfr30.mp4", "from": 3}), '"from"', "path"),
    (row(video="cfr30.mp4", video_start=3), '"video_start"', "did you mean from"),
    (row(video="cfr30.mp4", loss=False), '"loss"', "known are"),
    (row(vdeo="cfr30.mp4"), '"vdeo"', "did you mean video"),
    (row(video_path="cfr30.mp4"), '"video_path"', "did you mean video"),
    (row(options=["a", "b"]), '"options"', "did you mean choices"),
    (row(conversations=LLAVA), "both messages and conversations", "one of them"),
    (row(USER | {"value": "x"}, ANSWER), "both content and value", "one of them"),
    (row(video={"video": "cfr30.mp4", "path": "b.mp4"}), "both video and path", "one of them"),
    ("video,question,answer,end\ncfr30.mp4,a,b,7\n", '"end"', "did you mean to"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "received", "remedy"), ROWS, ids=[r[1] for r in ROWS])
def test_a_key_that_would_change_what_is_learned_is_a_fault_with_its_place(
    folder: Path, content: object, received: str, remedy: str
) -> None:
    samples, faults = load(folder, content)
    assert not samples
    assert faults[0].cost == "sample"
    assert faults[0].where in ("d.jsonl:1", "d.jsonl:2", "d.jsonl entry 1")
    assert received in faults[0].received
    assert remedy in faults[0].remedy


def test_a_key_of_every_message_is_told_once_of_a_row(folder: Path) -> None:
    _, faults = load(folder, row(USER | {"mask": 1}, ANSWER | {"mask": 1, "weight": 0}))
    assert [fault.kind for fault in faults] == ["unknown_key", "unknown_key", "no_samples"]


def test_harmless_keys_and_keys_without_a_value_pass_and_others_are_a_note_once(
    folder: Path,
) -> None:
    fine = row(
        USER | {"name": None}, ANSWER | {"tool_calls": None}, video="cfr30.mp4", start=None,
        id="a", video_id="b", source="c", split="train", data_source="d", duration=3,
    )  # fmt: skip
    samples, faults = load(folder, fine)
    assert (len(samples), faults) == (1, [])
    lines = [json.dumps(row(id=n, colour=n, choices=[str(n), "A grid."])) for n in range(3)]
    samples, faults = load(folder, "\n".join(lines))
    assert len(samples) == 3
    assert [(f.kind, f.cost, f.where) for f in faults] == [("unknown_field", "note", "d.jsonl:1")]
    assert '"colour" in 3 entries' in faults[0].received


TIMES: list[tuple[object, float]] = [
    (83.5, 83.5), ("83.5", 83.5), ("1:23.5", 83.5), ("0:01:23.5", 83.5), (" 00:01:23 ", 83.0)
]  # fmt: skip


@pytest.mark.parametrize(("written", "seconds"), TIMES, ids=str)
def test_times_are_read_as_everywhere(folder: Path, written: object, seconds: float) -> None:
    window = {"from": 1, "to": written}
    seen = Visual(folder / "cfr30.mp4", "video", 1.0, seconds)
    for content in (
        row(video="cfr30.mp4", **window),
        row(video={"video": "cfr30.mp4", **window}),
        f"video,question,answer,from,to\ncfr30.mp4,a,b,0:00:01,{written}\n",
    ):
        samples, faults = load(folder, content)
        assert not faults
        assert samples[0].visuals == (seen,)


@pytest.mark.parametrize("written", ["", "soon", "1:2:3:4", "-1", True, [1]], ids=str)
def test_what_is_no_time_is_a_fault(folder: Path, written: object) -> None:
    samples, faults = load(folder, row(video="cfr30.mp4", **{"from": written}))
    assert not samples
    assert faults[0].kind == "wrong_type"
    assert "from" in faults[0].message


NEXT_QA = "video,question,answer,qid,type,a0,a1,a2\ncfr30.mp4,Who?,{},7,CW,{},bird,cat\n"
HEAD = "question,answer,"
ANSWERS: list[tuple[object, str, str]] = [
    (NEXT_QA.format(2, "dog"), "cat", "option_spelled_out"),
    (NEXT_QA.format(0, "dog"), "dog", "option_spelled_out"),
    (NEXT_QA.format("bird", "dog"), "bird", ""),
    (NEXT_QA.format(3, "dog"), "", "option_number"),
    (NEXT_QA.format(1, 1), "", "option_number"),
    (HEAD + "option_a,option_b\nWho?,B,dog,cat\n", "cat", "option_spelled_out"),
    (HEAD + "option1,option2\nWho?,1,dog,cat\n", "dog", "option_spelled_out"),
    (HEAD + "A,B\nWho?,b.,dog,cat\n", "cat", "option_spelled_out"),
    (HEAD + "choices\nWho?,(a),dog|cat\n", "dog", "option_spelled_out"),
    (HEAD + "choices\nWho?,1,dog|cat\n", "", "option_number"),
    (HEAD + "choices\nWho?,C,dog|cat\n", "", "option_number"),
    (HEAD + "choices\nHow many?,2,1|2|3\n", "2", ""),
    (HEAD + "choices\nA. dog or B. cat?,B,dog|cat\n", "B", ""),
    (HEAD + "choices\nA dog or a cat?,1,dog|cat\n", "", "option_number"),
]


@pytest.mark.parametrize(("content", "learned", "kind"), ANSWERS)
def test_the_number_of_an_option_is_never_learned_as_the_answer(
    folder: Path, content: str, learned: str, kind: str
) -> None:
    for text in (content, _as_messages(content)):
        samples, faults = load(folder, text)
        kinds = [fault.kind for fault in faults if fault.kind != "no_samples"]
        assert kinds == ([kind] if kind else [])
        assert [sample.turns[-1].answer for sample in samples] == ([learned] if learned else [])
        if kind == "option_spelled_out":
            assert learned in samples[0].choices


def _as_messages(content: str) -> str:
    """The same row with choices, in JSON lines; as it is where its options have columns."""
    head, cells = (line.split(",") for line in content.splitlines())
    if head[-1] != "choices":
        return content
    question, answer, choices = cells
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps(row(*talk, choices=choices.split("|")))
