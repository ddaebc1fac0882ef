"""What a visitor can do, without any type of the page: each action gives the state to show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from apollo_cli.config import check_question
from apollo_cli.errors import ApolloError, UsageError
from apollo_cli.memory_record import SUFFIX
from apollo_cli.ui.desk import Desk
from apollo_cli.ui.files import AllowedFolders, note_refusal
from apollo_cli.ui.media import MediaLinks
from apollo_cli.ui.options import MOST_FILES, MediaState, UiDefaults
from apollo_cli.ui.settings import Settings, read_settings, settings_of
from apollo_cli.ui.strips import strips_of
from apollo_cli.ui.timeline import Strip
from apollo_cli.ui.visit import Stage, TaskKind, Told, Visit

GONE = (
    "the talk of before is not here any more: the server was started again, or the talk had ended; "
    "open the video once more"
)

# How long the page may stand still while something happens, in seconds.
_TICK_SECONDS = 0.3
_KEY = re.compile(r"[\w-]{20,80}", re.ASCII)
_MOST_TALK_BYTES = 5_000_000


@dataclass(frozen=True)
class Shown:
    """One file in view: how the player shows it, and the strip under it; images have no times."""

    path: Path
    is_image: bool
    media: MediaState
    strip: Strip | None

    @property
    def name(self) -> str:
        """What it is called in the page."""
        return self.path.name


@dataclass(frozen=True)
class State:
    """All that the page shows of a visit.

    Attributes:
        model: its name and where it runs; empty while it loads.
        model_share: how much of it is loaded. model_error: why there will be none.
        is_toy: whether the embedded toy answers.
        files: in view. chosen: which of them is shown. opened: how often they changed.
        cost: of the next question, in short phrases. cost_error: why there is none.
        is_planning: another cost is being worked out.
        told: all turns. can_check: whether the last answer is about what is in view.
        task: what is being done, if anything. stage: of it.
        question, text: of the answer that is being written.
        place: how many other visitors come first. error, notice: what to tell the visitor.
    """

    model: str
    model_share: float
    model_error: str
    is_toy: bool
    files: tuple[Shown, ...]
    chosen: int
    opened: int
    cost: tuple[str, ...]
    cost_error: str
    is_planning: bool
    told: tuple[Told, ...]
    can_check: bool
    task: TaskKind | None
    question: str
    text: str
    stage: Stage | None
    place: int
    error: str
    notice: str

    @property
    def talk(self) -> object:
        """What the turns are drawn from; equal to another one where they look the same."""
        view = tuple((shown.path, shown.is_image) for shown in self.files)
        return self.told, view, self.can_check, bool(self.text or self.question)

    @property
    def is_settled(self) -> bool:
        """Whether nothing will change by itself."""
        loading = not self.model and not self.model_error
        previews = any(shown.media.state == "making a preview" for shown in self.files)
        return not (loading or previews or self.is_planning or self.task)


class Handlers:
    """The actions of the page.

    Args:
        desk: the model. files: what may be opened. media: how the player shows it.
        defaults: what a new visit starts with.
    """

    def __init__(
        self, desk: Desk, files: AllowedFolders, media: MediaLinks, defaults: UiDefaults
    ) -> None:
        self.desk = desk
        self.files = files
        self.media = media
        self.defaults = defaults

    def arrive(self, key: str, session: str) -> Visit:
        """The visit of a tab; one that was reloaded finds its talk again.

        A tab that was duplicated names the talk of the first: it begins one of its own.
        """
        known = self.defaults
        if self.desk.is_taken(key, session):
            key = ""
        is_new = key not in self.desk.visits
        visit = self.desk.visit(
            key if _KEY.fullmatch(key) else "", known.sampling, known.reading, known.generation
        )
        visit.session = session
        if is_new and known.files:
            self.desk.open(visit, known.files)
        return visit

    def back(self, key: str) -> Visit:
        """The visit of a key that ``arrive`` gave; an empty one where that has ended since."""
        known, before = self.defaults, self.desk.visits.get(key)
        visit = self.desk.visit(key, known.sampling, known.reading, known.generation)
        visit.is_lost = visit.is_lost or visit is not before
        return visit

    def follow(self, visit: Visit) -> Iterator[State]:
        """The state now, and again whenever it changes, until nothing is left to happen.

        Whoever follows last is the one that is told.
        """
        visit.follower += 1
        number, last = visit.follower, None
        while visit.follower == number:
            ticks, state = visit.ticks, self.state(visit)
            if state != last:
                yield state
                last = state
            if state.is_settled and ticks == visit.ticks:
                return
            visit.wait(ticks, _TICK_SECONDS)

    def open(
        self, visit: Visit, name: str, *, add: bool = False, is_upload: bool = False
    ) -> Iterator[State]:
        """Look at a file, alone or beside those in view.

        Args:
            is_upload: the visitor brought it just now; a name that is typed leads to no upload.
        """

        def begin() -> None:
            path = self._find(visit, name, is_upload)
            if path.suffix == SUFFIX:
                raise UsageError(
                    f"{path.name} is a memory of a video, without pictures to show",
                    next_step="open the video itself: what was seen of it is found again",
                )
            if visit.is_doing("open", str(path)):
                return
            if add and str(path) in visit.files:
                visit.notice = f"{path.name} is in view already"
                return
            if add and len(visit.infos) >= MOST_FILES:
                raise UsageError("more than eight files", next_step="open one without the others")
            self.desk.open(visit, [path], add=add)

        yield from self._attempt(visit, begin)

    def change(self, visit: Visit, settings: Settings) -> Iterator[State]:
        """Other settings: the plan and its cost follow, nothing is watched yet."""

        yield from self._attempt(visit, lambda: self._apply(visit, settings))

    def ask(self, visit: Visit, question: str, settings: Settings | None = None) -> Iterator[State]:
        """Ask the next question.

        Args:
            settings: as they stand in the fields; None leaves those of the visit.
        """

        def begin() -> None:
            if visit.is_doing("ask", question.strip()):
                return
            self.desk.check_free(visit)
            if settings is not None:
                self._apply(visit, settings)
            self.desk.ask(visit, check_question(question))

        yield from self._attempt(visit, begin)

    def blind(self, visit: Visit) -> Iterator[State]:
        """Ask the last question again without the video."""

        yield from self._attempt(
            visit, lambda: None if visit.is_doing("blind") else self.desk.check_blind(visit)
        )

    def stop(self, visit: Visit) -> None:
        """Stop what is being done; those that follow see it end."""
        self.desk.stop(visit)

    def begin_anew(self, visit: Visit) -> Iterator[State]:
        """Forget the talk; the files stay in view."""
        self.desk.stop(visit)
        visit.task = None
        visit.turns, visit.told, visit.answers = [], [], []
        visit.error, visit.notice = _say_gone(visit), ""
        visit.revise()
        yield from self.follow(visit)

    def save(self, visit: Visit, form: str) -> tuple[str, str]:
        """The talk as a file: its name, and its text in Markdown (``md``) or JSON (``json``).

        Both are empty where there is no talk yet; ``visit.error`` then says so.
        """
        visit.error = visit.notice = ""
        if not visit.turns or self.desk.apollo is None:
            visit.error = _say_gone(visit) or "there is nothing to save yet; ask a question first"
            visit.revise()
            return "", ""
        talk = visit.talk(self.desk.apollo)
        if form == "md":
            return "apollo-talk.md", talk.to_markdown()
        return "apollo-talk.json", json.dumps(talk.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def load(self, visit: Visit, text: str) -> Iterator[State]:
        """Go on with a saved talk: its turns, its settings, its files."""

        def begin() -> None:
            from apollo_cli.conversation import read_talk

            if len(text) > _MOST_TALK_BYTES:
                raise UsageError("the file is too large for a saved talk", "allowed are 5 MB")
            saved = read_talk(text, "the file")
            if len(saved.files) > MOST_FILES:
                raise UsageError(f"a talk about {len(saved.files)} files", "allowed are eight")
            paths = [self._find(visit, name) for name in saved.files]
            names = dict(zip(saved.files, map(str, paths), strict=True))
            told = []
            for turn in saved.turns:
                files = tuple(names.get(name, name) for name in turn.files)
                told.append(Told(turn.question, turn.answer, files, check=turn.check))

            def go_on() -> None:
                visit.sampling, visit.turns, visit.answers = saved.sampling, list(saved.turns), []
                visit.told = told
                visit.generation = saved.generation or visit.generation

            self.desk.open(visit, paths, then=go_on)

        yield from self._attempt(visit, begin)

    def state(self, visit: Visit) -> State:
        """All that the page shows now."""
        desk, task, shorten = self.desk, visit.task, self.files.shorten
        apollo = desk.apollo
        model = ""
        if apollo is not None:
            precision = apollo.quant or apollo.hardware.dtype
            model = f"{apollo.located.name} on {apollo.hardware.device}, {precision}"
        strips = strips_of(visit)
        shown = tuple(
            Shown(info.path, info.kind == "image", self.media.state(info.path), strip)
            for info, strip in zip(visit.infos, strips, strict=False)
        )
        return State(
            model=model,
            model_share=desk.loading.share,
            model_error=desk.loading.error,
            is_toy=apollo is not None and apollo.located.is_toy,
            files=shown,
            chosen=visit.chosen,
            opened=visit.opened,
            cost=tuple(visit.cost.describe()) if visit.cost else (),
            cost_error=shorten(visit.cost_error),
            is_planning=visit.plans_to_come > 0,
            told=tuple(
                replace(turn, reason=shorten(turn.reason)) if turn.reason else turn
                for turn in visit.told
            ),
            can_check=visit.can_check,
            task=task.kind if task else None,
            question=task.question if task else "",
            text=task.text if task else "",
            stage=task.stage if task else None,
            place=desk.place(task) if task else 0,
            error=shorten(visit.error),
            notice=visit.notice,
        )

    def _apply(self, visit: Visit, settings: Settings) -> None:
        """Take the settings that can be used.

        Raises:
            UsageError: one or more cannot; those keep their value.
        """
        before = visit.sampling, visit.reading, visit.generation
        if settings == settings_of(*before):
            return
        first = self.defaults.reading.subtitles
        named = "auto" if first == "none" else first
        sampling, reading, generation, faults = read_settings(*before, settings, subtitles=named)
        if (sampling, reading) != before[:2]:
            visit.forget_what_was_seen()
        if (sampling, reading, generation) != before:
            visit.sampling, visit.reading, visit.generation = sampling, reading, generation
            self.desk.plan_later(visit)
        if faults:
            raise UsageError("; ".join(faults))

    def _find(self, visit: Visit, name: str, is_upload: bool = False) -> Path:
        if is_upload or Path(name) in visit.uploads:
            path = self.files.resolve_upload(name)
            visit.uploads.add(path)
            self.files.opened.add(path)
        else:
            path = self.files.resolve(name)
        self.media.previews.forget_failure(path)
        return path

    def _attempt(self, visit: Visit, begin: Callable[[], None]) -> Iterator[State]:
        """Begin something and follow it; what stands against it is told, and the visit goes on."""
        visit.error, visit.notice = _say_gone(visit), ""
        try:
            if not visit.error:
                begin()
        except ApolloError as error:
            visit.error = error.message
            note_refusal(error)
        yield from self.follow(visit)


def _say_gone(visit: Visit) -> str:
    """What to say before anything is done for a page whose talk has ended without its knowing."""
    is_lost, visit.is_lost = visit.is_lost, False
    return GONE if is_lost else ""
