"""The desk: visitors apart, one model, a fair line, a stop at any moment, bounded memory."""

from __future__ import annotations

import gc
import resource
import shutil
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apollo_cli.config import GenerationOptions, SamplingOptions
from apollo_cli.conversation import Conversation
from apollo_cli.errors import UsageError, WeightsError
from apollo_cli.ui import answering
from apollo_cli.ui import desk as desk_module
from apollo_cli.ui.desk import Desk
from apollo_cli.ui.shelf import Shelf
from apollo_cli.ui.strips import strips_of
from apollo_cli.ui.visit import Task, Told, Visit
from apollo_cli.watcher import Progress
from tests.ui.made import SHORT, at_rest, draw_videos, nano_desk, new_visit
from tests.video.made import make_film
from tests.waiting import PATIENCE_SECONDS, until

QUESTIONS = (
    "What is shown first?",
    "How many things are there?",
    "What colour is it?",
    "When does it appear?",
    "What happens at the end?",
)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return draw_videos(tmp_path_factory.mktemp("videos"), 3)


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with nano_desk(keep_videos=2) as opened:
        until(lambda: opened.apollo is not None)
        yield opened


def visitor(desk: Desk, *paths: Path) -> Visit:
    visit = new_visit(desk)
    if paths:
        desk.open(visit, paths)
        at_rest(visit)
        assert visit.error == ""
    return visit


def block(desk: Desk) -> tuple[Visit, threading.Event]:
    """A visitor that keeps the model busy until the event is set."""
    visit, done = new_visit(desk), threading.Event()
    desk.submit(visit, Task("ask"), lambda visit, task: assert_set(done))
    until(lambda: desk.place(visit.task or Task("ask")) == 0)
    return visit, done


def assert_set(event: threading.Event) -> None:
    assert event.wait(PATIENCE_SECONDS)


def talk_alone(desk: Desk, video: Path, questions: Sequence[str]) -> list[str]:
    assert desk.apollo is not None
    talk = Conversation(desk.apollo, SHORT)
    talk.watch([str(video)])
    return ["".join(talk.ask(question)).strip() for question in questions]


def test_twenty_visitors_with_five_questions_each_get_their_own_answers_in_flat_memory(
    desk: Desk, videos: list[Path]
):
    orders = [list(QUESTIONS), list(reversed(QUESTIONS))]
    expected = {
        (video, order): talk_alone(desk, video, orders[order])
        for video in videos[:2]
        for order in (0, 1)
    }
    peaks: list[int] = []

    def talk(number: int) -> None:
        video, order = videos[number % 2], number // 2 % 2
        visit = visitor(desk, video)
        for question in orders[order]:
            desk.ask(visit, question)
            at_rest(visit)
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            assert visit.error == ""
        assert [told.answer for told in visit.told] == expected[video, order]
        assert len(visit.turns) == 5

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(talk, range(20)))
    assert len(peaks) == 100
    # In kilobytes: what a first round of all visitors needed is enough for the other four.
    assert peaks[-1] - peaks[24] < 60_000
    assert len(desk.answering.shelf) <= 2


def test_what_is_kept_of_videos_is_bounded_and_the_rest_is_watched_again(
    desk: Desk, videos: list[Path]
):
    first = visitor(desk, videos[0])
    for path in videos:
        visit = visitor(desk, path)
        desk.ask(visit, QUESTIONS[0])
        at_rest(visit)
        assert visit.error == ""
    assert len(desk.answering.shelf) == 2
    desk.ask(first, QUESTIONS[0])
    at_rest(first)
    assert [told.answer for told in first.told] == talk_alone(desk, videos[0], [QUESTIONS[0]])


def test_a_visit_keeps_times_but_no_tokens_of_what_was_seen(desk: Desk, videos: list[Path]):
    visit = visitor(desk, videos[0])
    desk.ask(visit, QUESTIONS[0])
    at_rest(visit)
    assert visit.seen[0].tokens.nbytes == 0
    assert len(visit.seen[0].times) == len(visit.seen[0].plan)


def test_everybody_has_one_piece_of_work_in_line_and_knows_the_place(desk: Desk):
    busy, done = block(desk)
    waiting = [new_visit(desk) for _ in range(3)]
    for visit in waiting:
        desk.ask(visit, "one?")
    assert [desk.place(visit.task) for visit in waiting if visit.task] == [1, 2, 3]
    with pytest.raises(UsageError, match="press Stop"):
        desk.ask(waiting[0], "two?")
    done.set()
    for visit in (busy, *waiting):
        at_rest(visit)
    assert [len(visit.told) for visit in waiting] == [1, 1, 1]


def test_who_waits_and_stops_leaves_the_line_at_once(desk: Desk):
    _, done = block(desk)
    first, second = new_visit(desk), new_visit(desk)
    desk.ask(first, "one?")
    desk.ask(second, "two?")
    desk.stop(first)
    at_rest(first)
    assert first.notice == "stopped"
    assert desk.place(second.task or Task("ask")) == 1
    done.set()
    assert len(at_rest(second).told) == 1


@pytest.mark.parametrize("stage", ["decode", "encode", "read", "write"])
def test_work_stops_at_every_stage_and_the_next_question_is_answered(
    desk: Desk, videos: list[Path], stage: str, monkeypatch: pytest.MonkeyPatch
):
    visit = visitor(desk, videos[0])
    desk.answering.shelf = Shelf(2)
    advance = Task.advance

    def stop_there(task: Task, name: str, done: int, total: int) -> None:
        if name == stage and (name != "write" or task.text):
            desk.stop(visit)
        advance(task, name, done, total)

    with monkeypatch.context() as patch:
        patch.setattr(Task, "advance", stop_there)
        desk.ask(visit, QUESTIONS[0])
        at_rest(visit)
    assert (visit.error, visit.notice) == ("", "stopped")
    assert visit.turns == []
    assert [told.is_kept for told in visit.told] == [False]
    desk.ask(visit, QUESTIONS[0])
    at_rest(visit)
    assert visit.told[-1].answer == talk_alone(desk, videos[0], [QUESTIONS[0]])[0]


@pytest.mark.parametrize("begin_anew", [False, True])
def test_a_stop_while_an_answer_ends_leaves_one_talk_for_page_model_and_file(
    desk: Desk, videos: list[Path], begin_anew: bool, monkeypatch: pytest.MonkeyPatch
):
    visit = visitor(desk, videos[0])
    write = desk._model().session.write

    def stop_at_the_end(logits: torch.Tensor, options: GenerationOptions) -> Iterator[int]:
        yield from write(logits, options)
        desk.stop(visit)
        if begin_anew:
            visit.task, visit.turns, visit.told, visit.answers = None, [], [], []

    with monkeypatch.context() as patch:
        patch.setattr(desk._model().session, "write", stop_at_the_end)
        desk.ask(visit, QUESTIONS[0])
        task = visit.task
        assert task is not None and task.future is not None
        task.future.result()
        at_rest(visit)
    told = [(told.question, told.answer) for told in visit.told if told.is_kept]
    assert told == [(turn.question, turn.answer) for turn in visit.turns]
    assert [told.is_kept for told in visit.told] == [True] * len(visit.turns)
    assert len(visit.turns) == (0 if begin_anew else 1)
    assert visit.can_check == bool(visit.turns)


def test_opening_can_be_stopped_and_the_next_file_opens(desk: Desk, videos: list[Path]):
    visit = new_visit(desk)
    desk.open(visit, [videos[0]] * 40)
    until(lambda: visit.task is None or visit.task.stage is not None)
    desk.stop(visit)
    at_rest(visit)
    assert (visit.infos, visit.error, visit.notice) == ([], "", "stopped")
    desk.open(visit, [videos[1]])
    at_rest(visit)
    assert [info.path for info in visit.infos] == [videos[1]]


def test_a_stop_ends_no_file_that_somebody_else_opens(desk: Desk, videos: list[Path]):
    visit, other = new_visit(desk), new_visit(desk)
    desk.open(visit, [videos[0]] * 20)
    until(lambda: desk._opener.process_id is not None)
    # Not in line yet, and just done.
    for future in (None, Future[None]()):
        if future is not None:
            future.set_result(None)
        other.task = Task("open", future=future)
        desk.stop(other)
    at_rest(visit)
    assert (visit.error, len(visit.infos)) == ("", 20)


def test_a_file_that_cannot_be_read_is_told_and_the_others_stay_in_view(
    desk: Desk, videos: list[Path], tmp_path: Path
):
    visit = visitor(desk, videos[0])
    (tmp_path / "broken.mp4").write_bytes(b"nothing of a video")
    desk.open(visit, [tmp_path / "broken.mp4"])
    at_rest(visit)
    assert "broken.mp4" in visit.error
    assert [info.path for info in visit.infos] == [videos[0]]


@pytest.mark.parametrize("first", ["ask", "plan", "check"])
def test_a_file_that_is_replaced_in_view_is_looked_at_again_before_anything_is_made_of_it(
    desk: Desk, videos: list[Path], tmp_path: Path, first: str
):
    film = Path(shutil.copy(videos[0], tmp_path / "film.mp4"))
    visit = visitor(desk, film)
    desk.ask(visit, QUESTIONS[0])
    before = at_rest(visit).opened
    seen = visit.told[-1]
    make_film(film, size=(64, 64), count=30)
    if first == "plan":
        desk.plan_later(visit)
        until(lambda: visit.plans_to_come == 0)
    elif first == "check":
        desk.check_blind(visit)
        at_rest(visit)
        assert visit.error == "a file has changed since it was asked about; ask again"
    else:
        desk.ask(visit, QUESTIONS[0])
        at_rest(visit)
    notice = "film.mp4 has changed since it was opened and was looked at again"
    assert (visit.notice, visit.opened) == (notice, before + 1)
    assert visit.infos[0].frame_count == 30
    until(lambda: visit.plans_to_come == 0)
    strips = strips_of(visit)
    if first != "check":
        assert strips[0] is not None
        assert strips[0].duration_seconds == visit.infos[0].duration_seconds
    assert not visit.can_check or first == "ask"
    visit.turns, visit.told, visit.answers = [], [], []
    desk.ask(visit, QUESTIONS[0])
    assert [told.answer for told in at_rest(visit).told] == talk_alone(desk, film, QUESTIONS[:1])
    # What was seen of the old one is found for the old one only.
    shutil.copy2(videos[0], film)
    fresh = visitor(desk, film)
    desk.ask(fresh, QUESTIONS[0])
    assert at_rest(fresh).told[-1].answer == seen.answer


def test_a_file_that_grows_is_asked_about_as_it_is_now(
    desk: Desk, videos: list[Path], tmp_path: Path
):
    whole = make_film(tmp_path / "whole.mkv", size=(64, 64), count=300, codec="mpeg4").read_bytes()
    film = tmp_path / "grows.mkv"
    film.write_bytes(whole[: len(whole) // 3])
    visit = visitor(desk, film)
    lengths = [visit.infos[0].duration_seconds]
    for share in (2, 3):
        film.write_bytes(whole[: len(whole) * share // 3])
        desk.ask(visit, QUESTIONS[0])
        assert at_rest(visit).error == ""
        lengths.append(visit.infos[0].duration_seconds)
    assert lengths == sorted(set(lengths)) and len(lengths) == 3
    until(lambda: visit.cost)
    assert visit.cost is not None
    assert visit.cost.plans[0].end_seconds == lengths[-1]


def test_a_file_in_view_that_is_broken_by_now_is_told_and_nothing_is_answered(
    desk: Desk, videos: list[Path], tmp_path: Path
):
    film = Path(shutil.copy(videos[0], tmp_path / "film.mp4"))
    visit = visitor(desk, film)
    film.write_text("no video")
    desk.ask(visit, QUESTIONS[0])
    assert "film.mp4" in at_rest(visit).error
    assert visit.turns == []
    desk.plan_later(visit)
    until(lambda: visit.cost_error)
    assert "film.mp4" in visit.cost_error
    assert strips_of(visit) == (None,)


def test_a_file_is_shown_as_long_as_a_page_that_is_open_has_it_in_view(
    desk: Desk, videos: list[Path]
):
    desk.visits.clear()
    visit = visitor(desk, videos[0])
    visit.session = "a page"
    assert [desk.shows(path) for path in videos[:2]] == [True, False]
    desk.hear("a page", 0)
    assert not desk.shows(videos[0])
    desk.visit(visit.key, visit.sampling, visit.reading, visit.generation)
    assert desk.shows(videos[0])


def test_whatever_stops_a_plan_is_one_sentence_and_later_plans_are_made(
    desk: Desk, videos: list[Path], monkeypatch: pytest.MonkeyPatch
):
    visit = visitor(desk, videos[0])
    until(lambda: visit.cost)
    for what in (OverflowError("too large"), ValueError("no"), KeyError("x"), MemoryError()):

        def fail(*_: object, what: Exception = what, **__: object) -> None:
            raise what

        with monkeypatch.context() as patch:
            patch.setattr(desk_module, "estimate_cost", fail)
            desk.plan_later(visit)
            until(lambda: visit.plans_to_come == 0)
        assert visit.cost_error.startswith(f"unexpected {type(what).__name__}")
    desk.plan_later(visit)
    until(lambda: visit.plans_to_come == 0)
    assert visit.cost_error == ""


def test_the_plan_follows_the_settings_and_says_what_is_remembered(desk: Desk, videos: list[Path]):
    visit = visitor(desk, videos[0])
    until(lambda: visit.cost)
    assert visit.cost is not None
    all_clips = len(visit.cost.plans[0])
    visit.sampling = SamplingOptions(max_clips=1)
    visit.forget_what_was_seen()
    desk.plan_later(visit)
    until(lambda: visit.cost)
    assert len(visit.cost.plans[0]) == 1 < all_clips
    desk.ask(visit, QUESTIONS[0])
    at_rest(visit)
    until(lambda: visit.cost and visit.cost.is_remembered)
    assert "already watched" in visit.cost.describe()
    visit.sampling = replace(visit.sampling, start_seconds=1e6)
    desk.plan_later(visit)
    until(lambda: visit.cost_error)
    assert "the video ends at" in visit.cost_error


def test_the_last_answer_is_checked_blindly(desk: Desk, videos: list[Path]):
    visit = visitor(desk, videos[0])
    with pytest.raises(UsageError, match="no answer about a video"):
        desk.check_blind(visit)
    talk = Conversation(desk._model(), SHORT)
    talk.watch([str(videos[0])])
    for question in QUESTIONS[:2]:
        desk.ask(visit, question)
        at_rest(visit)
        list(talk.ask(question))
    desk.check_blind(visit)
    at_rest(visit)
    assert visit.error == ""
    assert visit.told[-1].check[0].startswith("without the video: ")
    assert list(visit.told[-1].check) == talk.check_blind().describe()
    assert len(visit.turns) == 2


def test_a_visit_is_dropped_with_its_uploads_some_time_after_its_tab_was_closed(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    visit, other = new_visit(desk), new_visit(desk)
    visit.session, shared, own = "a page", tmp_path / "x" / "shared.mp4", tmp_path / "y" / "own.mp4"
    for path in (shared, own):
        path.parent.mkdir()
        path.write_bytes(b"")
    visit.uploads, other.uploads = {shared, own}, {shared}
    desk.hear("another page", 0)
    desk.hear("a page", 0)
    assert desk.visit(visit.key, visit.sampling, visit.reading, visit.generation) is visit
    desk.hear("a page", 0)
    monkeypatch.setattr(desk_module, "_AWAY_SECONDS", -1.0)
    assert new_visit(desk) is not visit
    assert visit.key not in desk.visits
    assert other.key in desk.visits
    assert shared.exists()
    assert not own.parent.exists()


def test_work_for_a_tab_that_was_closed_ends(
    desk: Desk, videos: list[Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(answering, "_WORK_SECONDS", -1.0)
    visit = visitor(desk, videos[0])
    visit.session = "a page"
    desk.hear("a page", 0)
    desk.ask(visit, QUESTIONS[0])
    assert at_rest(visit).notice == "stopped"


def test_too_many_visits_drop_those_with_nothing_first_and_open_talks_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(desk_module, "_MOST_VISITS", 4)
    with nano_desk() as small:
        talk, closed, upload = (new_visit(small) for _ in range(3))
        talk.told.append(Told("one?", "one"))
        closed.told.append(Told("one?", "one"))
        upload.uploads.add(tmp_path / "own.mp4")
        closed.session = "a page"
        small.hear("a page", 0)
        newest = [new_visit(small) for _ in range(10)][-1]
        assert list(small.visits.values()) == [talk, closed, upload, newest]
        newest.told.append(Told("one?", "one"))
        for dropped in (closed, talk, upload):
            newest = new_visit(small)
            newest.told.append(Told("one?", "one"))
            assert dropped not in small.visits.values()
            assert newest in small.visits.values()


def test_who_comes_back_is_never_the_one_that_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk_module, "_MOST_VISITS", 3)
    with nano_desk() as small:
        first, *others = (new_visit(small) for _ in range(3))
        for _ in range(2):
            # The one that is missed least, as it was idle for longest and for too long.
            first.used = -1e6
            assert small.visit(first.key, first.sampling, first.reading, SHORT) is first
        assert list(small.visits.values()) == [first, *others]


def test_too_many_visits_drop_the_one_that_was_idle_for_longest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk_module, "_MOST_VISITS", 3)
    with nano_desk() as small:
        visits = [new_visit(small) for _ in range(5)]
        assert list(small.visits) == [visit.key for visit in visits[2:]]


def test_a_model_that_cannot_be_loaded_is_told_instead_of_an_answer(
    capsys: pytest.CaptureFixture[str],
):
    def fail(report: Progress) -> None:
        raise WeightsError("it is broken", next_step="fetch it again")

    broken = Desk(fail)  # pyright: ignore[reportArgumentType]
    broken.start()
    visit = new_visit(broken)
    broken.ask(visit, "one?")
    assert at_rest(visit).error == "it is broken; fetch it again"
    assert broken.loading.error == "it is broken; fetch it again"
    assert capsys.readouterr().err == "error: it is broken; fetch it again\n"
    broken.close()


def test_a_desk_that_closes_does_not_wait_for_a_model_that_is_loading():
    begun = threading.Event()

    def load_for_ever(report: Progress) -> None:
        begun.set()
        while True:
            report("load", 1, 2)

    desk = Desk(load_for_ever)  # pyright: ignore[reportArgumentType]
    desk.start()
    assert_set(begun)
    desk.close()
    assert desk.apollo is None


def test_a_fault_of_ours_is_one_sentence_and_the_desk_goes_on(
    desk: Desk, capsys: pytest.CaptureFixture[str]
):
    visit = new_visit(desk)
    desk.submit(visit, Task("ask"), lambda visit, task: visit.infos.__delitem__(0))
    assert at_rest(visit).error.startswith(
        "unexpected IndexError: list assignment index out of range"
    )
    assert capsys.readouterr().err.startswith("error: unexpected IndexError: ")
    desk.ask(visit, "one?")
    assert len(at_rest(visit).told) == 1


def test_visits_are_let_go(desk: Desk, videos: list[Path]):
    def come_and_go() -> weakref.ref[Visit]:
        visit = visitor(desk, videos[0])
        desk.ask(visit, QUESTIONS[0])
        at_rest(visit)
        del desk.visits[visit.key]
        return weakref.ref(visit)

    gone = come_and_go()
    until(lambda: gc.collect() >= 0 and gone() is None)
