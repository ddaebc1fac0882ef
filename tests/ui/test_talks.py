"""Talks of the page: their turns, the times in them, and the files that they are saved to."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from apollo_cli.answer import Citation
from apollo_cli.config import SamplingOptions
from apollo_cli.ui import show
from apollo_cli.ui.events import _VIEWS, _fill
from apollo_cli.ui.handlers import Handlers
from apollo_cli.ui.visit import Told, Visit
from tests.ui.made import KEY, PLAIN, at_rest, last


def test_a_talk_is_saved_and_loaded_with_its_settings_and_goes_on(
    handlers: Handlers, visit: Visit, folder: Path
):
    assert handlers.save(visit, "md") == ("", "")
    assert "nothing to save" in handlers.state(visit).error
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.change(visit, replace(PLAIN, clips="2")))
    told = last(handlers.ask(visit, "What is shown?")).told
    name, text = handlers.save(visit, "md")
    assert name.endswith(".md")
    assert "**What is shown?**" in text
    assert "video0.mp4: 2 clips" in text
    _, saved = handlers.save(visit, "json")
    other = handlers.arrive("o" * 36, "another page")
    state = last(handlers.load(other, saved))
    assert [(turn.question, turn.answer) for turn in state.told] == [
        (turn.question, turn.answer) for turn in told
    ]
    assert state.files[0].name == "video0.mp4"
    assert other.sampling.max_clips == 2
    assert len(last(handlers.ask(other, "And then?")).told) == 2


def test_a_talk_is_gone_on_with_in_the_way_it_was_answered(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.ask(visit, "one?", replace(PLAIN, answer_tokens="5", temperature="0.5")))
    saved = handlers.save(visit, "json")[1]
    other = handlers.arrive("o" * 36, "another page")
    last(handlers.load(other, saved))
    assert other.generation == visit.generation


@pytest.mark.parametrize("end", [math.inf, 1e300])
def test_a_window_without_an_end_stops_no_page(handlers: Handlers, visit: Visit, end: float):
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.ask(visit, "one?"))
    saved = json.loads(handlers.save(visit, "json")[1])
    saved["sampling"]["end_seconds"] = end
    assert ("damaged" in last(handlers.load(visit, json.dumps(saved))).error) == (end == math.inf)
    typed = replace(PLAIN, end="9" * 400 if end == math.inf else f"{end:.0f}")
    assert last(handlers.change(visit, typed)).error == ""
    state = last(handlers.change(visit, PLAIN))
    assert (state.error, state.cost_error) == ("", "")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"turns": 1}', "[" * 100_000])
def test_what_is_no_talk_is_told_and_nothing_changes(handlers: Handlers, visit: Visit, text: str):
    last(handlers.open(visit, "video0.mp4"))
    state = last(handlers.load(visit, text))
    assert "is not a saved talk" in state.error
    assert state.files[0].name == "video0.mp4"


def test_a_saved_talk_opens_no_file_outside(handlers: Handlers, visit: Visit, folder: Path):
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.ask(visit, "What is shown?"))
    saved = json.loads(handlers.save(visit, "json")[1])
    saved["files"] = [str(folder.parent / "outside.mp4")]
    state = last(handlers.load(visit, json.dumps(saved)))
    assert "may not be opened" in state.error
    assert state.files[0].name == "video0.mp4"


def test_a_new_talk_forgets_the_turns_and_keeps_the_files(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.ask(visit, "What is shown?"))
    state = last(handlers.begin_anew(visit))
    assert (state.told, visit.turns) == ((), [])
    assert state.files[0].name == "video0.mp4"


def test_a_new_talk_in_the_middle_of_an_answer_stays_empty(handlers: Handlers, visit: Visit):
    asking = handlers.ask(visit, "What is shown?")
    next(asking)
    last(handlers.begin_anew(visit))
    last(handlers.ask(visit, "one?"))
    at_rest(visit)
    assert [told.question for told in visit.told if told.is_kept] == ["one?"]
    assert [turn.question for turn in visit.turns] == ["one?"]


def test_times_become_buttons_that_say_whether_the_moment_was_seen():
    citations = (
        Citation("0:05", 5.0, (4.0, 6.0), seen=True),
        Citation("90 seconds", 90.0, (60.0, 62.0), seen=False),
    )
    html = show.linked("At 0:05, at 90 seconds & at 9:00:00.", (0,), citations)
    assert html.count("<button") == 2
    assert 'data-seek="5" data-of="0" title="0:05, inside a clip that was seen"' in html
    assert 'class="time unseen" data-seek="90"' in html
    assert html.endswith("</button> &amp; at 9:00:00.")


def test_times_are_buttons_and_marks_only_where_the_file_that_they_are_of_is_in_view(
    handlers: Handlers, visit: Visit
):
    def look(name: str, add: bool = False) -> tuple[list[str], list[int]]:
        """Which players the time moves, and how many marks stand on each strip."""
        state = last(handlers.open(visit, name, add=add))
        strips = [shown.strip for shown in state.files]
        marks = [len(strip.marks) if strip else 0 for strip in strips]
        return re.findall(r'data-seek="1" data-of="([\d ]+)"', show.told(state)), marks

    look("video0.mp4")
    cited = (Citation("0:01", 1.0, (0.0, 2.0), seen=True),)
    visit.told.append(Told("When?", "At 0:01.", visit.files, cited))
    assert look("video1.mp4") == ([], [0])
    assert look("video0.mp4", add=True) == (["1"], [0, 1])
    assert look("photo.jpg", add=True) == (["1"], [0, 1, 0])
    # Of both videos: the one that is shown is meant, while both are in view.
    visit.told.append(Told("When?", "At 0:01.", visit.files))
    assert look("photo.jpg", add=True) == (["1", "0 1"], [0, 1, 0])
    assert look("video0.mp4") == (["0"], [1])
    visit.told.append(Told("What is a second?", "It is not 0:01."))
    assert look("video0.mp4") == (["0"], [1])


def test_times_of_a_loaded_talk_belong_to_the_files_of_their_turns(
    handlers: Handlers, visit: Visit
):
    for name in ("video0.mp4", "video1.mp4"):
        last(handlers.open(visit, name))
        last(handlers.ask(visit, "When?"))
    saved = json.loads(handlers.save(visit, "json")[1])
    for turn in saved["turns"]:
        turn["answer"] = "At 0:01."
    other = handlers.arrive("o" * 36, "another page")
    state = last(handlers.load(other, json.dumps(saved)))
    assert state.files[0].name == "video1.mp4"
    assert show.told(state).count("data-seek") == 1
    assert last(handlers.open(other, "photo.jpg")).files[0].is_image
    assert "data-seek" not in show.told(handlers.state(other))


def test_a_talk_is_drawn_anew_only_where_it_has_changed(
    handlers: Handlers, visit: Visit, monkeypatch: pytest.MonkeyPatch
):
    last(handlers.open(visit, "video0.mp4"))
    visit.told.append(Told("one?", "one"))
    drawn: list[str] = []
    monkeypatch.setitem(_VIEWS, "told", lambda state: drawn.append("") or show.told(state))
    states = list(handlers.ask(visit, "two?"))
    rows = list(_fill(KEY, iter(states)))
    assert len(rows) == len(states) > 3
    assert len(drawn) == 2
    # The key stands before the views.
    column = [row[1 + list(_VIEWS).index("told")] for row in rows]
    sent = [html for html in column if isinstance(html, str)]
    assert sent == [show.told(states[0]), show.told(states[-1])]


def test_a_talk_that_cannot_be_opened_whole_changes_nothing(
    handlers: Handlers, visit: Visit, folder: Path
):
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.ask(visit, "What is shown?"))
    saved = json.loads(handlers.save(visit, "json")[1])
    broken = folder / "more" / "broken.mp4"
    broken.write_bytes(b"nothing of a video")
    saved["turns"][0]["question"], saved["sampling"]["max_clips"] = "Another?", 3
    saved["files"].append(str(broken))
    state = last(handlers.load(visit, json.dumps(saved)))
    broken.unlink()
    assert "broken.mp4" in state.error
    assert [told.question for told in state.told] == ["What is shown?"]
    assert [turn.question for turn in visit.turns] == ["What is shown?"]
    assert visit.sampling == SamplingOptions()
    saved["files"] = saved["files"][:1]
    asking = handlers.ask(visit, "And then?")
    next(asking)
    assert "press Stop" in next(handlers.load(visit, json.dumps(saved))).error
    at_rest(visit)
    assert [turn.question for turn in visit.turns] == ["What is shown?", "And then?"]


def test_each_turn_is_saved_with_what_it_was_made_with(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.ask(visit, "one?", replace(PLAIN, clips="2")))
    last(handlers.ask(visit, "two?"))
    check = last(handlers.blind(visit)).told[-1].check
    last(handlers.open(visit, "video1.mp4"))
    last(handlers.ask(visit, "three?", replace(PLAIN, clips="1")))
    last(handlers.change(visit, PLAIN))
    text = handlers.save(visit, "md")[1]
    assert text.startswith("# video0.mp4, video1.mp4\n")
    bases = [line for line in text.splitlines() if line.startswith("_apollo-nano; ")]
    assert [base.split(",")[0] for base in bases] == [
        "_apollo-nano; video0.mp4: 2 clips",
        "_apollo-nano; video1.mp4: 1 clip",
    ]
    assert text.index(bases[1]) > text.index("**two?**")
    assert f"- blind check: {check[-1]}" in text
    saved = handlers.save(visit, "json")[1]
    turns = json.loads(saved)["turns"]
    assert [Path(turn["files"][0]).name[:6] for turn in turns] == ["video0", "video0", "video1"]
    assert [turn["sampling"]["max_clips"] for turn in turns] == [2, 2, 1]
    assert turns[1]["check"] == list(check)
    other = handlers.arrive("o" * 36, "another page")
    assert last(handlers.load(other, saved)).told[1].check == check
    assert json.loads(handlers.save(other, "json")[1])["turns"] == turns
