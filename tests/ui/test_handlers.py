"""What a visitor can do, without a server: each action gives the states that the page shows."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from apollo_cli.answer import Citation
from apollo_cli.config import ReadingOptions, SamplingOptions
from apollo_cli.ui import desk as desk_module
from apollo_cli.ui import previews, show
from apollo_cli.ui.files import AllowedFolders
from apollo_cli.ui.handlers import GONE, Handlers, State
from apollo_cli.ui.options import UiDefaults
from apollo_cli.ui.settings import Settings, read_settings, settings_of
from apollo_cli.ui.visit import Stage, Told, Visit
from tests.ui.made import HOSTILE, KEY, PHOTO, PLAIN, SHORT, at_rest, last
from tests.waiting import PATIENCE_SECONDS


def test_a_file_is_opened_by_path_and_its_plan_and_strip_follow(handlers: Handlers, visit: Visit):
    states = list(handlers.open(visit, "video0.mp4"))
    assert states[0].task == "open"
    state = states[-1]
    (shown,) = state.files
    assert (shown.name, shown.media.state) == ("video0.mp4", "plays")
    assert shown.strip is not None
    assert not shown.strip.is_seen
    assert "every moment seen" in state.cost[0]
    assert state.is_settled


@pytest.mark.parametrize("name", ["../outside.mp4", "/etc/passwd\n" + "x" * 5000])
def test_a_path_that_is_refused_is_one_short_line_in_the_log(
    handlers: Handlers, visit: Visit, name: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, logger="apollo_cli.ui"):
        last(handlers.open(visit, name))
        handlers.files.browse(name)
        last(handlers.open(visit, "missing.mp4"))
    lines = [row.getMessage() for row in caplog.records if row.name == "apollo_cli.ui"]
    assert len(lines) == 2
    for line in lines:
        assert (
            line.startswith("refused: a visitor of the page: ")
            and name.split("\n", maxsplit=1)[0] in line
        )
        assert "\n" not in line and len(line) < 400


def test_an_upload_is_named_without_the_place_where_it_lies(
    handlers: Handlers, visit: Visit, folder: Path
):
    upload = folder.parent / "uploads" / "1f2e" / "u.mp4"
    upload.parent.mkdir(parents=True)
    upload.write_text("no video")
    state = last(handlers.open(visit, str(upload), is_upload=True))
    assert state.error.startswith("u.mp4 ") and "1f2e" not in state.error
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.ask(visit, "one?"))
    saved = json.loads(handlers.save(visit, "json")[1])
    for place in (str(upload.with_name("v.mp4")), "/tmp/apollo-ui-x1_y/files/1f2e/v.mp4"):
        saved["files"] = [place]
        assert last(handlers.load(visit, json.dumps(saved))).error.startswith("v.mp4 may not be")
    upload.unlink()


@pytest.mark.parametrize("name", ["../outside.mp4", "/etc/passwd", "missing.mp4", "", "more"])
def test_what_may_not_or_cannot_be_opened_is_one_sentence_and_the_visit_goes_on(
    handlers: Handlers, visit: Visit, name: str
):
    state = last(handlers.open(visit, name))
    assert state.error
    assert state.files == ()
    assert last(handlers.open(visit, "video0.mp4")).error == ""


def test_the_picker_leads_to_every_allowed_folder_and_back(folder: Path):
    second = folder.parent / "second"
    second.mkdir()
    files = AllowedFolders([folder, second, folder / "more"])
    first = files.browse("")
    assert first is not None and first.above == ""
    assert [row.name for row in first.entries][:2] == [str(second), str(folder / "more")]
    for place in (second, folder / "more"):
        below = files.browse(str(place))
        assert below is not None and below.above == str(folder)


def test_a_file_is_added_to_those_in_view_and_they_share_one_question(
    handlers: Handlers, visit: Visit
):
    last(handlers.open(visit, "video0.mp4"))
    state = last(handlers.open(visit, "photo.jpg", add=True))
    assert [shown.name for shown in state.files] == ["video0.mp4", "photo.jpg"]
    assert state.files[1].strip is None
    assert "clips in all" in state.cost[0]
    state = last(handlers.ask(visit, "What is shown?"))
    assert state.told[-1].is_kept
    for number in range(7):
        copy = Path(shutil.copy(PHOTO, handlers.files.folders[0] / "more" / f"{number}.jpg"))
        state = last(handlers.open(visit, str(copy), add=True))
        copy.unlink()
    assert (len(state.files), "eight files" in state.error) == (8, True)


def test_an_answer_is_streamed_and_kept_with_what_was_seen(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, "video0.mp4"))
    states = list(handlers.ask(visit, "  What is shown first? "))
    texts = [state.text for state in states if state.task]
    assert texts == sorted(texts, key=len)
    assert states[0].question == "What is shown first?"
    state = states[-1]
    assert state.told[-1].question == "What is shown first?"
    assert state.told[-1].answer.startswith(texts[-1].strip()[:4])
    assert state.files[0].strip is not None
    assert state.files[0].strip.is_seen
    assert "already watched" in state.cost


def test_text_alone_is_answered_without_a_file(handlers: Handlers, visit: Visit):
    assert last(handlers.ask(visit, "What is shown?")).told[-1].is_kept


def test_a_file_that_is_in_view_is_not_added_again(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, "video0.mp4"))
    state = last(handlers.open(visit, "video0.mp4", add=True))
    assert (len(state.files), state.error) == (1, "")
    assert state.notice == "video0.mp4 is in view already"


def test_what_is_pressed_twice_is_done_once_and_leaves_no_error(handlers: Handlers, visit: Visit):
    def twice(first: Iterator[State], *again: Callable[[], Iterator[State]]) -> State:
        done = threading.Event()
        for pool in (handlers.desk._worker, handlers.desk._looker):
            pool.submit(done.wait, PATIENCE_SECONDS)
        next(first)
        states = [next(press()) for press in again]
        assert {(state.error, state.task is None) for state in states} == {("", False)}
        done.set()
        at_rest(visit)
        return last(handlers.follow(visit))

    opening = partial(handlers.open, visit, "video0.mp4")
    assert twice(opening(), opening).opened == 1
    asking = partial(handlers.ask, visit)
    state = twice(asking("one?"), partial(asking, " one? "), partial(asking, ""))
    assert [(turn.question, turn.is_kept) for turn in state.told] == [("one?", True)]
    assert state.error == ""
    checking = partial(handlers.blind, visit)
    assert twice(checking(), checking).told[-1].check
    first = asking("two?")
    next(first)
    assert "press Stop" in next(asking("three?")).error
    at_rest(visit)


def test_an_empty_question_is_an_error_and_changes_nothing(handlers: Handlers, visit: Visit):
    state = last(handlers.ask(visit, "   "))
    assert state.error == "the question is empty; ask something"
    assert state.told == ()


def test_other_settings_change_the_plan_before_anything_is_watched(
    handlers: Handlers, visit: Visit
):
    before = last(handlers.open(visit, "video0.mp4"))
    state = last(handlers.change(visit, replace(PLAIN, clips="1", start="0:01")))
    assert before.cost != state.cost
    assert state.cost[0].startswith("1 clip,")
    assert state.files[0].strip is not None
    assert state.files[0].strip.window[0] == 1
    state = last(handlers.change(visit, replace(PLAIN, mode="uniform", rate="8")))
    assert state.cost[0].startswith("8 frames")


def test_of_settings_that_change_quickly_the_last_are_told(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, "video0.mp4"))
    for _ in range(10):
        first = handlers.change(visit, replace(PLAIN, clips="2"))
        next(first)
        state = last(handlers.change(visit, replace(PLAIN, clips="1")))
        assert not list(first)
        assert state.cost[0].startswith("1 clip,")


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        Settings("1:05", "70.5", "fps", "2.5", "7", True, "99", "0.5"),
        Settings("0:00", "", "uniform", "64", "", False, "1", "0"),
    ],
)
def test_the_fields_show_the_settings_as_they_were_typed(settings: Settings):
    before = SamplingOptions(), ReadingOptions(), SHORT
    sampling, reading, generation, faults = read_settings(*before, settings)
    again = settings_of(sampling, reading, generation)
    assert faults == []
    assert again == replace(settings, start="0:00" if settings.start == "0" else settings.start)


@pytest.mark.parametrize(
    ("first", "again"), [("a.srt", "a.srt"), ("auto", "auto"), ("none", "auto")]
)
def test_subtitles_that_are_left_out_and_taken_again_are_those_of_the_start(
    handlers: Handlers, first: str, again: str
):
    handlers.defaults = UiDefaults(reading=ReadingOptions(subtitles=first), generation=SHORT)
    visit = handlers.arrive("s" * 36, "page")
    last(handlers.change(visit, PLAIN))
    assert visit.reading.subtitles == "none"
    last(handlers.change(visit, replace(PLAIN, subtitles=True)))
    assert visit.reading.subtitles == again


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (replace(PLAIN, start="soon"), "'soon' is not a time"),
        (replace(PLAIN, clips="many"), "'many'; allowed is a whole number"),
        (replace(PLAIN, rate="-1"), "--fps -1"),
        (replace(PLAIN, start="0:30", end="0:10"), "--to must be later"),
        (replace(PLAIN, answer_tokens="0"), "--max-new-tokens 0"),
    ],
)
def test_a_setting_out_of_range_is_told_in_the_words_of_the_command_line(
    handlers: Handlers, visit: Visit, settings: Settings, said: str
):
    before = last(handlers.open(visit, "video0.mp4"))
    state = last(handlers.change(visit, settings))
    assert said in state.error
    assert state.cost == before.cost


def test_a_very_long_value_is_cut_where_it_is_shown_and_the_remedy_stays(
    handlers: Handlers, visit: Visit
):
    state = last(handlers.change(visit, replace(PLAIN, clips="9" * 5000)))
    html = show.alert(state)
    assert len(html) < 1000 and html.startswith('<p class="alert" role="alert">Most clips: ')
    assert "leave it empty" in html


def test_the_plan_waits_for_a_model_only_while_it_loads(handlers: Handlers, visit: Visit):
    state = replace(last(handlers.open(visit, "video0.mp4")), cost=())
    assert "when the model is loaded" not in show.plan_line(state)
    assert "when the model is loaded" in show.plan_line(replace(state, model=""))
    failed = show.plan_line(replace(state, model="", model_error="it is broken"))
    assert "no plan without a model" in failed


def test_a_window_behind_the_end_is_told_where_the_plan_stands(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, "video0.mp4"))
    state = last(handlers.change(visit, replace(PLAIN, start="99:00")))
    assert "the video ends at" in state.cost_error
    assert "the video ends at" in last(handlers.ask(visit, "What is shown?")).error


def test_a_reload_finds_the_talk_again_and_another_tab_has_its_own(
    handlers: Handlers, visit: Visit
):
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.ask(visit, "What is shown?"))
    handlers.desk.hear("page", 0)
    assert handlers.arrive(KEY, "the page, reloaded") is visit
    other = handlers.arrive("x" * 36, "another page")
    assert handlers.state(other).told == ()
    assert handlers.arrive("too short", "page").key != "too short"


def test_a_tab_that_was_duplicated_has_its_own_talk_and_both_are_told(
    handlers: Handlers, visit: Visit, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(desk_module, "_RELOAD_SECONDS", 0.05)
    last(handlers.open(visit, "video0.mp4"))
    asking = handlers.ask(visit, "What is shown?")
    next(asking)
    copy = handlers.arrive(KEY, "the page, duplicated")
    assert copy is not visit
    assert handlers.arrive(copy.key, "the page, duplicated") is copy
    assert last(handlers.follow(copy)).told == ()
    assert last(asking).told[-1].is_kept
    assert handlers.arrive(KEY, "page") is visit


def test_a_reload_that_is_told_before_its_old_page_is_gone_waits_for_it(
    handlers: Handlers, visit: Visit, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(desk_module, "_RELOAD_SECONDS", PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(handlers.arrive, KEY, "the page, reloaded")
        time.sleep(0.05)
        handlers.desk.hear("page", 0)
        assert arriving.result() is visit


@pytest.mark.parametrize("what", ["ask", "open", "save", "new"])
def test_a_page_whose_talk_has_ended_is_told_before_anything_is_done(
    handlers: Handlers, visit: Visit, what: str
):
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.ask(visit, "one?"))
    del handlers.desk.visits[KEY]
    if what == "save":
        handlers.save(handlers.back(KEY), "md")
    else:
        # A press of Stop may come first.
        handlers.stop(handlers.back(KEY))
        back = handlers.back(KEY)
        last(
            {
                "ask": lambda: handlers.ask(back, "two?"),
                "open": lambda: handlers.open(back, "video0.mp4"),
                "new": lambda: handlers.begin_anew(back),
            }[what]()
        )
    state = handlers.state(handlers.back(KEY))
    assert state.error == GONE
    assert (state.told, state.files, state.task) == ((), (), None)
    assert last(handlers.open(handlers.back(KEY), "video0.mp4")).error == ""
    assert last(handlers.ask(handlers.back(KEY), "two?")).told[-1].is_kept


def test_who_follows_last_is_the_one_that_is_told(handlers: Handlers, visit: Visit):
    first = handlers.ask(visit, "What is shown?")
    next(first)
    states = list(handlers.follow(visit))
    assert states[-1].told
    assert list(first) == []


def test_files_named_at_the_start_are_open_when_a_visitor_arrives(handlers: Handlers, folder: Path):
    handlers.defaults = UiDefaults(files=(folder / "video1.mp4",))
    visit = handlers.arrive("s" * 36, "page")
    assert last(handlers.follow(visit)).files[0].name == "video1.mp4"
    handlers.desk.hear("page", 0)
    again = handlers.arrive("s" * 36, "page, reloaded")
    assert again is visit
    assert handlers.state(again).task is None


def test_a_folder_is_browsed_only_where_files_may_be_opened(handlers: Handlers, folder: Path):
    listing = handlers.files.browse("")
    assert listing is not None
    assert [entry.name for entry in listing.entries] == [
        "more",
        HOSTILE,
        "photo.jpg",
        "video0.mp4",
        "video1.mp4",
    ]
    assert listing.above == ""
    inside = handlers.files.browse(str(folder / "more"))
    assert inside is not None
    assert inside.above == str(folder)
    assert handlers.files.browse("video0.mp4") is None
    outside = handlers.files.browse("..")
    assert outside is not None
    assert "may not be opened" in outside.note


def test_hostile_text_stays_text_wherever_it_is_shown(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, HOSTILE))
    evil = "<img src=x onerror=alert(1)>"
    state = last(handlers.ask(visit, evil))
    cited = (Citation("0:01", 1.0, (0.0, 2.0), seen=True),)
    told = Told(evil, f"{evil} at 0:01", visit.files, cited, (evil,))
    state = replace(state, told=(*state.told, told), error=evil, notice=evil, cost=(evil,))
    state = replace(state, model=evil, model_error="", question=evil, text=evil, task="ask")
    views = (show.model_line, show.player, show.plan_line, show.told, show.now, show.work)
    listing = handlers.files.browse("")
    assert listing is not None
    html = "".join([*(view(state) for view in views), show.alert(state), show.picker(listing)])
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") >= 8


def test_a_file_that_could_not_be_shown_is_tried_again_when_it_is_opened_again(
    handlers: Handlers, visit: Visit, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    film = shutil.copy(PHOTO.parent / "cfr30.mp4", folder / "more")
    with monkeypatch.context() as patch:
        patch.setattr(previews, "_LOOK_SECONDS", 0.0)
        assert last(handlers.open(visit, str(film))).files[0].media.state == "cannot be shown"
    assert handlers.state(visit).files[0].media.state == "cannot be shown"
    assert last(handlers.open(visit, str(film))).files[0].media.state == "plays"


def test_the_stage_is_told_with_clips_and_the_time_that_is_left(handlers: Handlers, visit: Visit):
    state = replace(handlers.state(visit), task="ask", stage=Stage("encode", 12, 48, 21.4))
    html = show.work(state)
    assert "Encoding: 12 of 48 clips" in html
    assert "about 21 s left" in html
    assert 'value="0.250"' in html
    assert '<li aria-current="step">Encode</li>' in html
    assert "Writing: 1 token<" in show.work(replace(state, stage=Stage("write", 1, 256)))
    assert "Waiting: 3 questions come first" in show.work(replace(state, place=3))
    assert "Waiting for the model" in show.work(replace(state, model="", model_share=0.4))


def test_a_check_is_offered_only_for_what_the_answer_was_made_with(
    handlers: Handlers, visit: Visit
):
    last(handlers.open(visit, "video0.mp4"))
    state = last(handlers.ask(visit, "What is shown?"))
    assert state.can_check
    assert "checkable" in show.told(state)
    others = [
        lambda: handlers.open(visit, "video1.mp4"),
        lambda: handlers.open(visit, "video1.mp4", add=True),
        lambda: handlers.change(visit, replace(PLAIN, clips="1")),
        lambda: handlers.change(visit, replace(PLAIN, subtitles=True)),
    ]
    for other in others:
        state = last(other())
        assert not state.can_check
        assert "checkable" not in show.told(state)
        assert "other files or settings" in last(handlers.blind(visit)).error
        last(handlers.change(visit, PLAIN))
        assert last(handlers.open(visit, "video0.mp4")).can_check
    assert last(handlers.blind(visit)).told[-1].check


def test_a_check_is_refused_when_the_file_is_another_one_by_now(
    handlers: Handlers, visit: Visit, folder: Path
):
    changing = folder / "more" / "changing.mp4"
    shutil.copy(folder / "video0.mp4", changing)
    last(handlers.open(visit, str(changing)))
    last(handlers.ask(visit, "What is shown?"))
    shutil.copy(folder / "video1.mp4", changing)
    assert "has changed since" in last(handlers.blind(visit)).error
    changing.unlink()
    state = last(handlers.ask(visit, "And now?"))
    assert state.error.endswith("is not there any more; put it back, or open another file")
    assert str(changing) in state.error


def test_a_question_is_asked_with_the_fields_as_they_stand(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, "video0.mp4"))
    state = last(handlers.ask(visit, "What is shown?", replace(PLAIN, clips="1")))
    assert state.told[-1].is_kept
    assert len(visit.seen[0].plan) == 1
    state = last(handlers.ask(visit, "What is shown?", replace(PLAIN, clips="none")))
    assert "Most clips: 'none'; allowed is a whole number" in state.error
    assert len(state.told) == 1


def test_each_wrong_field_is_named_and_the_others_count(handlers: Handlers, visit: Visit):
    last(handlers.open(visit, "video0.mp4"))
    wrong = replace(PLAIN, rate="0", start="soon", clips="2", temperature="0.5")
    state = last(handlers.change(visit, wrong))
    assert "Frames a second, or in all: --fps 0" in state.error
    assert "From, To: 'soon' is not a time" in state.error
    assert state.cost[0].startswith("2 clips")
    assert visit.generation.temperature == 0.5


def test_a_question_that_fails_or_is_stopped_early_stays_in_view(
    handlers: Handlers, visit: Visit, monkeypatch: pytest.MonkeyPatch
):
    last(handlers.open(visit, "video0.mp4"))
    last(handlers.change(visit, replace(PLAIN, start="99:00")))
    state = last(handlers.ask(visit, "Why <b>?"))
    assert (state.told[-1].question, state.told[-1].is_kept) == ("Why <b>?", False)
    html = show.told(state)
    assert "Not answered: " in html
    assert 'data-ask="Why &lt;b&gt;?"' in html
    last(handlers.change(visit, PLAIN))
    asking = handlers.ask(visit, "Stopped?")
    next(asking)
    handlers.stop(visit)
    last(asking)
    assert "Stopped; this turn is not kept" in show.told(handlers.state(visit))
    assert visit.turns == []


def test_subtitles_count_in_the_cost_and_are_told(handlers: Handlers, visit: Visit, folder: Path):
    spoken = folder / "more" / "spoken.mp4"
    shutil.copy(folder / "video0.mp4", spoken)
    spoken.with_suffix(".srt").write_text(
        "1\n00:00:00,000 --> 00:00:02,000\na red ball rolls in from the left\n"
    )
    silent = last(handlers.open(visit, str(spoken)))
    told = last(handlers.change(visit, replace(PLAIN, subtitles=True)))
    assert "1 line of subtitles" in told.cost
    tokens = [int(state.cost[1].split()[0].replace(",", "")) for state in (silent, told)]
    assert tokens[1] > tokens[0]
    last(handlers.ask(visit, "What is said?"))
    assert visit.answers[0].tokens.visual + visit.answers[0].tokens.text >= tokens[1]
    assert ", 1 line of subtitles" in handlers.save(visit, "md")[1]
    assert "no subtitles found" in last(handlers.open(visit, "video0.mp4")).cost


def test_of_several_files_the_added_one_is_shown_and_its_tab_is_marked(
    handlers: Handlers, visit: Visit
):
    first = last(handlers.open(visit, "video0.mp4"))
    state = last(handlers.open(visit, "video1.mp4", add=True))
    assert (state.chosen, state.opened) == (1, first.opened + 1)
    html = show.player(state)
    assert html.count('aria-pressed="true"') == 1
    assert 'data-show="1" title="video1.mp4" aria-pressed="true"' in html
    assert 'data-chosen="1"' in html
    assert last(handlers.open(visit, "video0.mp4")).chosen == 0
