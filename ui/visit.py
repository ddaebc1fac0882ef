"""One visitor: a browser tab with its files, its settings and its talk, apart from all others."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from apollo_cli.answer import Answer, Citation
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions
from apollo_cli.model.prompt import Turn
from apollo_cli.ui.costs import Cost
from apollo_cli.ui.timeline import Strip
from apollo_cli.video.info import VideoInfo
from apollo_cli.video_memory import VideoMemory

if TYPE_CHECKING:
    from apollo_cli.conversation import Conversation
    from apollo_cli.engine import Apollo
from apollo_cli.errors import ApolloError

TaskKind = Literal["open", "ask", "blind"]


class Stopped(Exception):
    """Raised where work notices that it was told to stop."""


@dataclass(frozen=True)
class Stage:
    """Where a piece of work is.

    Attributes:
        name: ``open``, ``decode``, ``encode``, ``read`` or ``write``.
        done, total: clips, or tokens while reading and writing; total is 0 where none is known.
        seconds_left: of this stage, as far as its pace tells.
    """

    name: str
    done: int = 0
    total: int = 0
    seconds_left: float | None = None


@dataclass(frozen=True)
class Told:
    """One turn as it is shown.

    Attributes:
        files: absolute paths of what it is about. citations: moments that the answer names.
        notes: what a user should know, a sentence each.
        check: what the blind check said; empty before one.
        is_kept: whether the turn belongs to the talk; a stopped one does not.
        reason: why it is not kept.
    """

    question: str
    answer: str
    files: tuple[str, ...] = ()
    citations: tuple[Citation, ...] = ()
    notes: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    is_kept: bool = True
    reason: str = ""


@dataclass(frozen=True)
class Asked:
    """What the last answer was made with.

    Attributes:
        view: as ``Visit.view`` was. key: what was watched; None for text alone.
    """

    view: object
    key: object


@dataclass(frozen=True, eq=False)
class Looked:
    """One file in view.

    Attributes:
        info: what is known of it. facts: its size and time of change just before that was read.
    """

    info: VideoInfo
    facts: tuple[int, int]

    @property
    def is_changed(self) -> bool:
        """Whether another file has its name by now, or it was written to."""
        return facts_of(self.info.path) != self.facts

    @property
    def key(self) -> object:
        """What tells it from any other file, and from itself at another time."""
        return str(self.info.path), self.info.stream_index, *self.facts


@dataclass(eq=False)
class Task:
    """One piece of work for a visitor.

    Attributes:
        future: ends with the work. text: of the answer, as far as it is written.
        told: the turns that an answer is put behind. files: as those of the turn will be.
        read_tokens: prompt tokens that had to be read, without what an earlier question had read.
    """

    kind: TaskKind
    question: str = ""
    text: str = ""
    stage: Stage | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    future: Future[None] | None = None
    told: list[Told] = field(default_factory=list)
    files: tuple[str, ...] = ()
    read_tokens: int = 0
    _first: tuple[float, int] = (0.0, 0)

    def advance(self, name: str, done: int, total: int) -> None:
        """Note a step.

        Raises:
            Stopped: the work was told to stop.
        """
        self.check()
        before, now = self.stage, time.perf_counter()
        watching = ("decode", "encode")
        goes_on = before is not None and (
            before.name == name or (before.name in watching and name in watching)
        )
        if not goes_on or before is None or (done, total) < (before.done, before.total):
            self._first = (now, done)
            self.read_tokens = total - done if name == "read" else self.read_tokens
        started, first = self._first
        left = None
        if name != "write" and done > first:
            left = (now - started) / (done - first) * (total - done)
        self.stage = Stage(name, done, total, left)

    def check(self) -> None:
        """Go on only where nobody said stop.

        Raises:
            Stopped: somebody did.
        """
        if self.stopping.is_set():
            raise Stopped


@dataclass(eq=False)
class Visit:
    """What belongs to one visitor.

    Attributes:
        key: its name, which nobody can guess. sampling, reading, generation: its settings.
        looked: the files in view. chosen: which of them is shown. opened: how often they changed.
        seen: what was seen of them, without the visual tokens.
        turns: the talk as the model is told it. told: as the visitor is shown it.
        answers: the record of the last answer, where there is one. asked: what it was made with.
        cost: of the next question; None until it is known. cost_error: why there is none.
        plans_to_come: how many times the cost is still to be worked out; the last one counts.
        task: what is being done. error: what went wrong last. notice: a word that is no error.
        is_lost: it stands for one that has ended, and its page does not know yet.
        uploads: files to be deleted with the visit.
        session: of the page that shows it now. used: when it was last heard of.
        left: when its tab was closed, None while it is open. silent_after: when it would have been
            heard of again, if it were open.
        changed: wakes those that follow. follower: number of the one that follows now.
        revision: rises when something other than the running task changes.
        strips: what is drawn under the player, and the revision that it belongs to.
    """

    key: str
    sampling: SamplingOptions
    reading: ReadingOptions
    generation: GenerationOptions
    looked: Sequence[Looked] = field(default_factory=list)
    chosen: int = 0
    opened: int = 0
    seen: list[VideoMemory] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    asked: Asked | None = None
    cost: Cost | None = None
    cost_error: str = ""
    plans_to_come: int = 0
    task: Task | None = None
    error: str = ""
    notice: str = ""
    is_lost: bool = False
    uploads: set[Path] = field(default_factory=set)
    session: str = ""
    used: float = field(default_factory=time.monotonic)
    left: float | None = None
    silent_after: float = math.inf
    changed: threading.Condition = field(default_factory=threading.Condition)
    follower: int = 0
    revision: int = 0
    strips: tuple[int, tuple[Strip | None, ...]] = (-1, ())
    ticks: int = 0

    @property
    def infos(self) -> list[VideoInfo]:
        """What is known of the files in view."""
        return [looked.info for looked in self.looked]

    @property
    def view(self) -> object:
        """The files and settings of now; equal to another one where none of them differs."""
        files = tuple(looked.key for looked in self.looked)
        return files, self.sampling, self.reading, self.generation

    @property
    def files(self) -> tuple[str, ...]:
        """Absolute paths of the files of now."""
        return tuple(str(info.path) for info in self.infos)

    @property
    def worth(self) -> int:
        """How much would be lost with it: 0 nothing, 1 what a closed page left, 2 an open talk."""
        if not (self.infos or self.told or self.turns or self.uploads):
            return 0
        return 1 if self.gone_since is not None else 2

    @property
    def gone_since(self) -> float | None:
        """When its page was closed, or was not heard of any more; None while it is open."""
        if self.left is None and time.monotonic() > self.silent_after:
            return self.silent_after
        return self.left

    def is_doing(self, kind: TaskKind, *what: str) -> bool:
        """Whether this is being done already, as after a double click.

        Args:
            what: the files that are opened, or the question; empty is any.
        """
        task = self.task
        return (
            task is not None
            and task.kind == kind
            and not task.stopping.is_set()
            and {*what} <= {"", task.question, *task.files}
        )

    @property
    def can_check(self) -> bool:
        """Whether the last answer is about what is in view, as it was."""
        asked = self.asked
        return bool(self.answers and self.infos and asked and asked.view == self.view)

    def touch(self) -> None:
        """Wake those that follow."""
        with self.changed:
            self.ticks += 1
            self.changed.notify_all()

    def revise(self) -> None:
        """Wake those that follow: more than the running task has changed."""
        self.revision += 1
        self.touch()

    def forget_what_was_seen(self) -> None:
        """Other files or another sampling are in view: what was planned and seen is past."""
        self.seen, self.cost, self.cost_error = [], None, ""

    def delete_uploads(self, others: Iterable[Visit]) -> None:
        """Delete what its visitor brought, but for what another visit has taken too."""
        for path in self.uploads.difference(*(other.uploads for other in others)):
            with contextlib.suppress(OSError):
                path.unlink()
                path.parent.rmdir()

    def wait(self, ticks: int, seconds: float) -> int:
        """Wait for a change since ``ticks``, but no longer than ``seconds``."""
        with self.changed:
            self.changed.wait_for(lambda: self.ticks != ticks, seconds)
            return self.ticks

    def talk(self, apollo: Apollo) -> Conversation:
        """The talk, to be gone on with; its turns are those of the visit."""
        from apollo_cli.conversation import Conversation

        return Conversation(
            apollo,
            options=self.generation,
            sampling=self.sampling,
            reading=self.reading,
            files=list(self.files),
            memories=self.seen,
            turns=self.turns,
            answers=self.answers,
        )


def facts_of(path: Path) -> tuple[int, int]:
    """Size and time of change of a file."""
    facts = os.stat(path)
    return facts.st_size, facts.st_mtime_ns


def without_tokens(memory: VideoMemory) -> VideoMemory:
    """What was seen and when, without what fills the memory."""
    return replace(memory, tokens=memory.tokens.new_empty(0))


def sentence(error: BaseException) -> str:
    """An error as the command line tells it."""
    if isinstance(error, ApolloError):
        return error.message
    if isinstance(error, Stopped):
        return "stopped"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} is not there any more; put it back, or open another file"
    if isinstance(error, OSError):
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{place}"
    what = f"unexpected {type(error).__name__}: {' '.join(str(error).split())}"
    sys.stderr.write(f"error: {what}\n")
    return f"{what}; the talk goes on, please report it"
