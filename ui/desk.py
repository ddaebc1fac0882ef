"""The desk: one model for many visitors, one piece of work at a time, and nothing that only grows.

The model is not safe for several threads: only the desk's one working thread touches it. Files are
opened in a second thread with a decoder of its own, so that nobody waits for somebody else's answer
to see their video.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions
from apollo_cli.errors import ApolloError, UsageError
from apollo_cli.ui.answering import Answering
from apollo_cli.ui.costs import Pace, estimate_cost
from apollo_cli.ui.looking import look, look_again
from apollo_cli.ui.shelf import Shelf, identity
from apollo_cli.ui.visit import Stage, Stopped, Task, Told, Visit, sentence
from apollo_cli.video.guard import GuardedReader

if TYPE_CHECKING:
    from apollo_cli.engine import Apollo
    from apollo_cli.watcher import Progress

# A tab that was closed may be a reload: its talk is kept for a while, and another page that names
# it waits so long for it to be closed.
_AWAY_SECONDS, _IDLE_SECONDS, _RELOAD_SECONDS = 600.0, 12 * 3600.0, 1.5
_MOST_VISITS, _TICK_SECONDS = 200, 0.2

Work = Callable[[Visit, Task], None]


@dataclass(frozen=True)
class Loading:
    """How far the model is: ``share`` of its weights; ``error`` when there will be none."""

    share: float = 0.0
    error: str = ""


class Desk:
    """One model and its visitors.

    Args:
        load: loads the model; it is called once, in the working thread, by ``start``.
        opener: looks at files; a decoder apart from the model's.
        keep_videos: most videos that are kept in memory.
        check_file: refuses a file in view that may not be watched any more.
    """

    def __init__(
        self,
        load: Callable[[Progress], Apollo],
        opener: GuardedReader | None = None,
        keep_videos: int = 4,
        check_file: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.apollo: Apollo | None = None
        self.loading = Loading()
        self.visits: dict[str, Visit] = {}
        self._load = load
        self._check_file = check_file
        self._opener = opener or GuardedReader()
        self._worker = ThreadPoolExecutor(1, "apollo-work")
        self._looker = ThreadPoolExecutor(1, "apollo-open")
        self.answering = Answering(Shelf(keep_videos), Pace())
        self._line: list[Task] = []
        self._lock = threading.Lock()
        self._loaded: Future[Apollo] | None = None
        self._is_closing = False

    def start(self) -> None:
        """Begin to load the model; the desk serves at once, and work waits for the model."""
        if self._loaded is None:
            self._loaded = self._worker.submit(self._load, self._note_loading)
            self._loaded.add_done_callback(self._note_loaded)

    def close(self) -> None:
        """Stop all work and end the decoders."""
        self._is_closing = True
        for visit in list(self.visits.values()):
            self.stop(visit)
        for pool in (self._worker, self._looker):
            pool.shutdown(wait=True, cancel_futures=True)
        self._opener.close()
        if self.apollo is not None:
            self.apollo.watcher.reader.close()

    def visit(
        self,
        key: str | None,
        sampling: SamplingOptions,
        reading: ReadingOptions,
        generation: GenerationOptions,
    ) -> Visit:
        """The visit of a key, or a new one; those that are over are dropped.

        Args:
            key: nobody else can guess it; None makes one up.
        """
        with self._lock:
            found = self.visits.get(key or "")
            self._sweep(found)
            if found is None:
                found = Visit(key or secrets.token_urlsafe(18), sampling, reading, generation)
                self.visits[found.key] = found
            found.used, found.left = time.monotonic(), None
            return found

    def hear(self, session: str, patience: float) -> bool:
        """Note that a page is there, and for how many seconds it may be silent; 0 closes it.

        Its visit may come back under another session. Returns whether there is one.
        """
        now = time.monotonic()
        found = [v for v in list(self.visits.values()) if session and v.session == session]
        for visit in found:
            if not patience:
                visit.left = now
                visit.touch()
            elif visit.left is None:
                # What a page said before it was closed may come behind that.
                visit.used, visit.silent_after = now, now + patience
        return bool(found)

    def is_taken(self, key: str, session: str) -> bool:
        """Whether a visit is shown by another page, which is not about to be closed."""
        found = self.visits.get(key)
        if found is None or found.session in ("", session):
            return False
        with found.changed:
            return not found.changed.wait_for(lambda: found.gone_since is not None, _RELOAD_SECONDS)

    def shows(self, path: Path) -> bool:
        """Whether a page that is open has a file in view."""
        open_ = [visit for visit in list(self.visits.values()) if visit.gone_since is None]
        return any(info.path == path for visit in open_ for info in visit.infos)

    def place(self, task: Task) -> int:
        """How many pieces of work come before this one; 0 when it is being done."""
        with self._lock:
            return self._line.index(task) if task in self._line else 0

    def submit(self, visit: Visit, task: Task, work: Work) -> None:
        """Put work in line: every visitor has one piece there at most, so the line is fair.

        Raises:
            UsageError: the last one is not done.
        """
        with visit.changed:
            self.check_free(visit)
            visit.task, visit.error, visit.notice = task, "", ""
        is_open = task.kind == "open"
        if not is_open:
            with self._lock:
                self._line.append(task)
        pool = self._looker if is_open else self._worker
        task.future = pool.submit(self._do, visit, task, work)
        task.future.add_done_callback(partial(self._finish, visit, task))
        visit.touch()

    def check_free(self, visit: Visit) -> None:
        """Take further work only when the last one is done, or told to stop.

        Raises:
            UsageError: it is not.
        """
        if visit.task is not None and not visit.task.stopping.is_set():
            raise UsageError("the last request is still being worked on", next_step="press Stop")

    def stop(self, visit: Visit) -> None:
        """Stop what is done for a visitor, at whatever stage it is."""
        task = visit.task
        if task is None:
            return
        task.stopping.set()
        future = task.future
        if future is not None and not future.cancel() and future.running() and task.kind == "open":
            # A file that hangs while it is opened notices nothing else.
            self._opener.interrupt()
        visit.touch()

    def open(
        self,
        visit: Visit,
        paths: Sequence[Path],
        *,
        add: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Look at files, in the background; ``visit.infos`` is then what is known of them.

        Args:
            add: beside those in view. then: what else changes once all of them are open.
        """

        def begin(visit: Visit, task: Task) -> None:
            before = visit.looked if add else []
            fresh = look(self._opener, paths, visit.reading)
            task.check()
            if then is not None:
                then()
            visit.looked, visit.chosen = [*before, *fresh], len(before)
            visit.opened += 1
            visit.forget_what_was_seen()
            self.plan_later(visit)

        task = Task("open", files=tuple(map(str, paths)))
        task.stage = Stage("open")
        self.submit(visit, task, begin)

    def ask(self, visit: Visit, question: str) -> None:
        """Answer a question, in the background; ``visit.told`` gets the turn."""
        task = Task("ask", question, told=visit.told, files=visit.files)
        self.submit(visit, task, self._ask)

    def check_blind(self, visit: Visit) -> None:
        """Ask the last question again without the video, in the background."""
        if not visit.answers or visit.asked is None or visit.asked.key is None:
            raise UsageError(
                "there is no answer about a video yet",
                next_step="ask a question about a video first",
            )
        if not visit.can_check:
            raise UsageError(
                "the last answer was made with other files or settings than those in view",
                next_step="ask again, or go back to what it was made with",
            )
        self.submit(visit, Task("blind", visit.answers[-1].question), self._blind)

    def plan_later(self, visit: Visit) -> None:
        """Work out what a question would cost, once the model is there."""
        with visit.changed:
            visit.plans_to_come += 1
        visit.revise()
        if self._loaded is not None:
            self._loaded.add_done_callback(lambda _: self._looker_submit(visit))

    def _looker_submit(self, visit: Visit) -> None:
        # The desk may be closing.
        with contextlib.suppress(RuntimeError):
            planning = self._looker.submit(self._plan, visit)
            planning.add_done_callback(partial(self._note_plan, visit))

    def _plan(self, visit: Visit) -> None:
        apollo = self.apollo
        if apollo is None or not visit.looked or visit.plans_to_come > 1:
            return
        look_again(self._opener, visit)
        talk, pace = visit.talk(apollo), self.answering.pace
        watched = self.answering.shelf.find(identity(talk, visit.looked)) is not None
        visit.cost = estimate_cost(apollo, talk, visit.infos, pace, is_watched=watched)
        visit.cost_error = ""

    def _note_plan(self, visit: Visit, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            visit.cost_error = sentence(error)
        with visit.changed:
            visit.plans_to_come -= 1
        visit.revise()

    def _ask(self, visit: Visit, task: Task) -> None:
        self.answering.ask(self._model(), visit, task)
        self.plan_later(visit)

    def _blind(self, visit: Visit, task: Task) -> None:
        self.answering.check(self._model(), visit, task)

    def _model(self) -> Apollo:
        """The model; an error where it could not be loaded."""
        assert self._loaded is not None
        return self._loaded.result()

    def _do(self, visit: Visit, task: Task, work: Work) -> None:
        task.check()
        if task.kind != "open":
            for info in visit.infos:
                self._check_file(info.path)
            if any(looked.is_changed for looked in visit.looked):
                looking = self._looker.submit(look_again, self._opener, visit)
                while not wait([looking], _TICK_SECONDS).done:
                    task.check()
                looking.result()
        work(visit, task)

    def _finish(self, visit: Visit, task: Task, future: Future[None]) -> None:
        with self._lock:
            if task in self._line:
                self._line.remove(task)
        error = None if future.cancelled() else future.exception()
        stopped = future.cancelled() or task.stopping.is_set()
        if task.kind == "open" and stopped and not future.cancelled():
            # Its child may have been ended by the stop.
            self._opener.close()
        ended = future.cancelled() or (stopped and error is not None)
        reason = "stopped" if ended else sentence(error) if error is not None else ""
        if reason and task.kind == "ask":
            # Where another talk was begun meanwhile, this one is shown no more.
            told = Told(task.question, task.text, task.files, is_kept=False, reason=reason)
            task.told.append(told)
        if visit.task is not task:
            visit.revise()
            return
        if ended:
            visit.notice = reason
        elif error is not None:
            visit.error = reason
        visit.task = None
        visit.revise()

    def _note_loading(self, stage: str, done: int, total: int) -> None:
        if self._is_closing:
            raise Stopped
        self.loading = Loading(done / total if total else 0.0)

    def _note_loaded(self, future: Future[Apollo]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self.loading = Loading(error=sentence(error))
            if isinstance(error, ApolloError):
                sys.stderr.write(f"error: {self.loading.error}\n")
        elif not future.cancelled():
            self.apollo = future.result()
            self.loading = Loading(1.0)
        for visit in list(self.visits.values()):
            visit.revise()

    def _sweep(self, coming: Visit | None) -> None:
        """Drop the visits that are over, and for a new one the one that is missed least."""
        now, most = time.monotonic(), _MOST_VISITS if coming is None else _MOST_VISITS + 1
        visits = [visit for visit in self.visits.values() if visit is not coming]
        idle = [visit for visit in visits if visit.task is None]
        idle.sort(key=lambda visit: (visit.worth, visit.used))
        for number, visit in enumerate(idle):
            gone = visit.gone_since is not None and now - visit.gone_since > _AWAY_SECONDS
            crowded = len(self.visits) >= most and number == 0
            if gone or crowded or now - visit.used > _IDLE_SECONDS:
                del self.visits[visit.key]
                visit.delete_uploads(self.visits.values())
