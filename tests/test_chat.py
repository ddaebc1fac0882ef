"""``apollo chat``: turns are kept, commands do what they say, mistakes do not end the talk."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from apollo_cli import engine
from apollo_cli.cli import main
from apollo_cli.config import GenerationOptions, SamplingOptions
from apollo_cli.conversation import Conversation, KeptTurn, last_talk, read_talk
from apollo_cli.errors import UsageError
from apollo_cli.model.prompt import Turn
from tests import tiny
from tests.tiny import Tiny

CASES = Path(__file__).parent / "cases"
CLIP, OTHER = str(CASES / "cfr30.mp4"), str(CASES / "one_key_60s.mp4")

Say = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("chat") / "checkpoint"))


@pytest.fixture
def say(
    checkpoint: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Say:
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))

    def talk(*lines: str, arguments: tuple[str, ...] = (CLIP,)) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        fixed = ("--model", checkpoint, "--max-new-tokens", "4")
        assert main(["chat", *arguments, *fixed]) == 0
        written = capfd.readouterr()
        return written.out, written.err

    return talk


def test_each_question_is_a_turn_and_the_talk_can_be_gone_on_with(say: Say):
    say("one?", "two?")
    saved = json.loads(last_talk().read_text())
    assert [turn["question"] for turn in saved["turns"]] == ["one?", "two?"]
    assert saved["files"] == [CLIP]
    _, told = say("three?", arguments=("--continue",))
    assert "> one?" in told
    saved = json.loads(last_talk().read_text())
    assert [turn["question"] for turn in saved["turns"]] == ["one?", "two?", "three?"]


def test_a_talk_is_answered_as_its_turns_would_be_one_by_one(checkpoint: str):
    apollo = engine.load(checkpoint, use_cache=False)
    talk = Conversation(apollo, GenerationOptions(max_new_tokens=6))
    talk.watch([CLIP])
    told = ["".join(talk.ask(question)) for question in ("one?", "two?")]
    fresh = engine.load(checkpoint, use_cache=False)
    again = fresh.ask(fresh.watch(CLIP), "two?", talk.options, talk.turns[:1])
    assert told[1].rstrip() == again.text


def test_commands_change_what_is_looked_at(say: Say):
    _, told = say(f"/video {OTHER}", "/from 0:10 0:20", "/frames", "one?", "/exit", "two?")
    assert "one_key_60s.mp4: 30 clips" in told
    assert "clip 1: 10.00, 10.50, 11.00, 11.50 s" in told
    saved = json.loads(last_talk().read_text())
    assert saved["files"] == [OTHER]
    assert len(saved["turns"]) == 1
    assert saved["sampling"]["start_seconds"] == 10


def test_mistakes_are_told_and_the_talk_goes_on(say: Say):
    out, told = say(
        "/nonsense", "/video nowhere.mp4", "/from 99:00", "/from soon", "/blind", "one?"
    )
    assert told.count("error: ") == 5
    assert len(out.splitlines()) == 1
    assert json.loads(last_talk().read_text())["files"] == [CLIP]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("t.csv", "video,question"),
        ("t.srt", "1\n"),
        ("t.jsonl", '{"question"'),
        ("t.txt", "Q: one?\nA: "),
        ("t", "Q: one?\nA: "),
        ("T.MD", "# "),
        ("T.JSON", "{\n"),
    ],
)
def test_a_talk_is_saved_as_its_ending_says(say: Say, tmp_path: Path, name: str, start: str):
    say("one?", "two?", f"/save {tmp_path / name}")
    text = (tmp_path / name).read_text()
    assert text.startswith(start)
    assert "two?" in text
    assert (CLIP in text) == (name.endswith("csv") or ".json" in name.lower())


def test_subtitles_of_a_talk_stand_over_what_was_looked_at(say: Say, tmp_path: Path):
    say(f"/video {OTHER}", "/from 0:10 0:20", "two?", f"/save {tmp_path / 'talk.srt'}")
    assert "00:00:10,000 --> 00:00:20,000" in (tmp_path / "talk.srt").read_text()


def test_a_talk_is_never_saved_over_its_video(say: Say, tmp_path: Path):
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(Path(CLIP).read_bytes())
    _, told = say(f"/video {clip}", "one?", f"/save {clip}")
    assert f"error: {clip} is" in told
    assert clip.read_bytes() == Path(CLIP).read_bytes()


def test_a_talk_is_saved_as_markdown_or_json(say: Say, tmp_path: Path):
    say("one?", f"/save {tmp_path / 'a talk.md'}", f"/save {tmp_path / 'talk.json'}", "/clear")
    assert "**one?**" in (tmp_path / "a talk.md").read_text()
    assert len(json.loads((tmp_path / "talk.json").read_text())["turns"]) == 1
    assert json.loads(last_talk().read_text())["turns"] == []


def test_each_turn_is_kept_with_what_its_answer_rests_on(say: Say, tmp_path: Path):
    say("one?", f"/video {OTHER}", "/from 0:10 0:20", "two?", f"/save {tmp_path / 'talk.md'}")
    turns = json.loads(last_talk().read_text())["turns"]
    assert [turn["files"] for turn in turns] == [[CLIP], [OTHER]]
    assert [turn["sampling"]["start_seconds"] for turn in turns] == [0, 10]
    text = (tmp_path / "talk.md").read_text()
    assert text.index("cfr30.mp4: ") < text.index("**one?**") < text.index("one_key_60s.mp4: 5 ")


def test_a_talk_that_was_saved_without_its_basis_is_gone_on_with():
    turn = {"question": "one?", "answer": "Red."}
    saved: dict[str, Any] = {"files": [], "sampling": {}, "turns": [turn]}
    (kept,) = read_talk(json.dumps(saved), "it").turns
    assert (kept.question, kept.answer, kept.files, kept.basis) == ("one?", "Red.", (), "")
    for broken in (["x"], [[]], [{**turn, "sampling": 3}], [{**turn, "files": None}], 5):
        with pytest.raises(UsageError, match="not a saved talk"):
            read_talk(json.dumps({**saved, "turns": broken}), "it")
    for wrong in (
        {"sampling": {"max_clips": 1.5}},
        {"sampling": {"start_seconds": 10**400}},
        {"sampling": {"end_seconds": float("inf")}},
        {"sampling": {"mode": 3}},
        {"sampling": {"unknown": 3}},
        {"options": {"seed": 0.5}},
        {"options": {"max_new_tokens": "many"}},
        {"format": float("inf")},
        {"turns": [{"question": "\ud800", "answer": "Red."}]},
    ):
        with pytest.raises(UsageError, match="not a saved talk"):
            read_talk(json.dumps({**saved, **wrong}), "it")
    for text in ("[]", "5", '"talk"', json.dumps({**saved, "format": "one"})):
        with pytest.raises(UsageError, match="not a saved talk"):
            read_talk(text, "it")


def test_the_last_question_is_checked_blindly(say: Say):
    _, told = say("one?", "/blind")
    assert "without the video: " in told


@pytest.mark.parametrize("change", [f"/video {OTHER}", "/from 0:01", "/clear"])
def test_no_answer_is_checked_against_what_it_was_not_about(say: Say, change: str):
    _, told = say("one?", change, "/blind")
    assert "without the video: " not in told
    assert "ask again" in told or "ask a question about a video first" in told


def test_a_blind_check_is_given_the_same_turns_and_is_kept(checkpoint: str):
    apollo = engine.load(checkpoint, use_cache=False)
    talk = Conversation(apollo, GenerationOptions(max_new_tokens=6))
    talk.watch([CLIP])
    for question in ("one?", "two?"):
        "".join(talk.ask(question))
    check = talk.check_blind()
    assert check.blind.text == apollo.ask(None, "two?", talk.options, talk.turns[:1]).text
    assert check.blind.text != apollo.ask(None, "two?", talk.options).text
    kept = [turn.check for turn in talk.turns if isinstance(turn, KeptTurn)]
    assert kept == [(), tuple(check.describe())]
    assert check.verdict in talk.to_markdown()


def test_a_talk_that_cannot_be_kept_is_told_and_goes_on(say: Say, tmp_path: Path):
    (tmp_path / "home").write_text("no folder")
    out, told = say("one?", "two?")
    assert len(out.splitlines()) == 2
    assert told.count("last.json cannot be written") == 2


def test_a_talk_in_which_nothing_is_said_does_not_replace_the_last(say: Say):
    say("one?")
    say("/help", "/frames", "/nonsense", arguments=(OTHER,))
    assert json.loads(last_talk().read_text())["turns"][0]["question"] == "one?"


def test_a_command_that_is_stopped_does_not_end_the_talk(say: Say, monkeypatch: pytest.MonkeyPatch):
    watch = Conversation.watch

    def stopped(talk: Conversation, files: Any, report: Any = None) -> None:
        if files == [OTHER]:
            raise KeyboardInterrupt
        watch(talk, files)

    monkeypatch.setattr(Conversation, "watch", stopped)
    out, told = say(f"/video {OTHER}", "one?")
    assert "stopped; the talk is as it was before" in told
    assert len(out.splitlines()) == 1
    assert json.loads(last_talk().read_text())["files"] == [CLIP]


def test_going_on_takes_the_options_of_the_talk_where_none_are_given(
    checkpoint: str, tmp_path: Path
):
    apollo = engine.load(checkpoint, use_cache=False)
    hot = GenerationOptions(max_new_tokens=3, temperature=0.5, seed=7)
    Conversation(apollo, hot, SamplingOptions(end_seconds=2)).save(tmp_path / "talk.json")
    plain, wished = Conversation(apollo), Conversation(apollo, GenerationOptions(seed=1))
    for talk in (plain, wished):
        talk.restore(tmp_path / "talk.json")
        assert talk.sampling.end_seconds == 2
    assert (plain.options, wished.options) == (hot, GenerationOptions(seed=1))


def test_a_talk_of_far_too_many_turns_is_refused_by_their_number():
    turn = {"question": "one?", "answer": "Red."}
    saved: dict[str, Any] = {"files": [], "sampling": {}, "turns": [turn] * 2000}
    assert len(read_talk(json.dumps(saved), "it").turns) == 2000
    with pytest.raises(UsageError, match="it is a talk of 2,001 turns; allowed are 2,000"):
        read_talk(json.dumps({**saved, "turns": [turn] * 2001}), "it")


@pytest.mark.parametrize("part", ["question", "answer"])
def test_a_talk_whose_turns_are_not_valid_utf_8_is_refused(part: str):
    turn = {"question": "one?", "answer": "Red.", part: "a\udc80b"}
    with pytest.raises(UsageError, match="not a saved talk"):
        read_talk(json.dumps({"files": [], "sampling": {}, "turns": [turn]}), "it")


@pytest.mark.parametrize(
    "said",
    [
        "![i](http://evil.example/x.png)",
        "[a](http://evil.example)",
        "<script>alert(1)</script><img src=x>",
        "a_b.mp4 _and_ *so* **on** `x` ~~y~~ $z$ & &lt; a|b \\[",
        "1. one\n2) two\n- three\n+ four\n# five\n---\n===\n> six\n1.5 s, 0:05 - 0:07",
        "a\n\n<div>\n\n```\ncode\n```",
    ],
)
def test_what_was_said_is_text_in_a_saved_talk(checkpoint: str, said: str):
    kept = KeptTurn(said, said, (f"/x/{said}",), (said,), check=(said,))
    talk = Conversation(engine.load(checkpoint), turns=[kept])
    html = MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(talk.to_markdown())
    assert set(re.findall(r"<(\w+)", html)) == {"h1", "p", "em", "strong", "ul", "li"}
    assert "evil" not in "".join(re.findall(r"<[^>]*>", html))
    shown = " ".join(unescape(re.sub(r"<[^>]*>", "", html)).split())
    # As what was seen, as question, as answer and as what a check said.
    assert shown.count(" ".join(said.split())) >= 4


@pytest.mark.parametrize("number", [2, 99])
def test_a_talk_of_a_later_version_is_refused(number: int):
    saved = {"format": number, "files": [], "sampling": {}, "turns": []}
    with pytest.raises(UsageError, match="later version"):
        read_talk(json.dumps(saved), "it")


def test_old_turns_are_left_out_whole_when_the_context_is_full(tmp_path: Path):
    small = engine.load(tiny.save(tmp_path / "small", Tiny(context=600)), use_cache=False)
    talk = Conversation(small, GenerationOptions(max_new_tokens=8))
    talk.watch([OTHER])
    clips = len(talk.memories[0])
    notes = []
    for number in range(8):
        "".join(talk.ask(f"question number {number}?"))
        notes += talk.answers[-1].notes
        assert talk.answers[-1].tokens.total <= 600
        assert talk.answers[-1].videos[0]["clips"] == clips
    assert any("did not fit any more" in note for note in notes)
    assert len(talk.turns) == 8


def test_a_long_talk_is_spelled_a_few_times_to_find_what_fits(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
):
    apollo = engine.load(checkpoint, use_cache=False)
    turns = [Turn(f"question number {number}?", "red " * 40) for number in range(200)]
    spelled = []
    spell = type(apollo).suffix_ids

    def counted(self: engine.Apollo, *arguments: Any) -> list[int]:
        spelled.append(len(arguments[2]))
        return spell(self, *arguments)

    monkeypatch.setattr(type(apollo), "suffix_ids", counted)
    options = GenerationOptions(max_new_tokens=4)
    kept = apollo._fitting_turns([], "now?", options, turns)
    assert 0 < len(kept) < 200
    assert len(spelled) < 12
    # As many as fit: one more would not.
    free = apollo.network.config.context - 4
    assert len(spell(apollo, [], "now?", kept)) <= free
    assert len(spell(apollo, [], "now?", turns[-len(kept) - 1 :])) > free
    assert kept == turns[-len(kept) :]


def test_going_on_without_a_saved_talk_is_a_usage_error(
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))
    assert main(["chat", "--continue", "--model", checkpoint]) == 2
    assert "no saved talk" in capfd.readouterr().err
