"""What the working thread does with the model: answer a question, and check an answer blindly."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from apollo_cli.errors import UsageError
from apollo_cli.ui.costs import Pace
from apollo_cli.ui.shelf import Shelf, identity
from apollo_cli.ui.visit import Asked, Looked, Task, Told, Visit, without_tokens
from apollo_cli.video_memory import VideoMemory

if TYPE_CHECKING:
    from apollo_cli.conversation import Conversation
    from apollo_cli.engine import Apollo
    from apollo_cli.watcher import Progress

# A tab that was closed may be a reload: its work goes on for a while.
_WORK_SECONDS = 20.0


class Answering:
    """Works for one visitor after the other.

    Args:
        shelf: what was watched last. pace: learns from every answer.
    """

    def __init__(self, shelf: Shelf, pace: Pace) -> None:
        self.shelf = shelf
        self.pace = pace

    def ask(self, apollo: Apollo, visit: Visit, task: Task) -> None:
        """Answer the question of a task; ``visit.told`` gets the turn."""
        view, looked, key = visit.view, visit.looked, None
        with _working(apollo, visit, task) as (talk, report):
            task.check()
            if looked:
                key = identity(talk, looked)
                talk.memories = self._watch(looked, talk, report, key)
            with contextlib.closing(talk.ask(task.question)) as pieces:
                for piece in pieces:
                    task.text += piece
                    visit.touch()
            # From here on the talk has the turn, and a stop comes too late.
            answer = talk.answers[-1]
            self.pace.learn(answer, talk.memories, task.read_tokens)
            said = {note for told in visit.told for note in told.notes}
            remarks = [text for text in apollo.remarks(answer.question) if text not in said]
            notes = (*answer.notes, *remarks)
            task.told.append(
                Told(answer.question, answer.text, task.files, answer.citations, notes)
            )
            if task.told is not visit.told:
                # Another talk was begun meanwhile.
                return
            visit.answers, visit.asked = [answer], Asked(view, key)
            if view == visit.view:
                visit.seen = [without_tokens(memory) for memory in talk.memories]

    def check(self, apollo: Apollo, visit: Visit, task: Task) -> None:
        """Ask the last question again without the video; its turn is told what came of it.

        Raises:
            UsageError: a file has changed since it was answered.
        """
        from apollo_cli.scoring import blind_check

        told, answer, asked = visit.told, visit.answers[-1], visit.asked
        looked = visit.looked
        with _working(apollo, visit, task) as (talk, report):
            key = identity(talk, looked)
            if asked is None or key != asked.key:
                raise UsageError(
                    "a file has changed since it was asked about", next_step="ask again"
                )
            memories = self._watch(looked, talk, report, key)
            check = blind_check(apollo, memories, answer, talk.options, talk.turns[:-1])
            task.check()
            said = tuple(check.describe())
            last = max(number for number, turn in enumerate(told) if turn.is_kept)
            told[last] = replace(told[last], check=said)
            talk.note_check(said)

    def _watch(
        self, looked: Sequence[Looked], talk: Conversation, report: Progress, key: object
    ) -> list[VideoMemory]:
        report("open", 0, 0)
        found = self.shelf.find(key)
        if found is None:
            talk.watch([one.info for one in looked], report)
            found = talk.memories
            self.shelf.put(key, found)
        return found


@contextlib.contextmanager
def _working(apollo: Apollo, visit: Visit, task: Task) -> Iterator[tuple[Conversation, Progress]]:
    """The talk and the report of progress, which is also where a stop is noticed."""
    from apollo_cli.watcher import no_progress

    def report(stage: str, done: int, total: int) -> None:
        left = visit.gone_since
        if left is not None and time.monotonic() - left > _WORK_SECONDS:
            task.stopping.set()
        task.advance(stage, done, total)
        visit.touch()

    apollo.session.on_progress = report
    try:
        yield visit.talk(apollo), report
    finally:
        apollo.session.on_progress = no_progress
