"""Files as they were looked at, and a second look at those that have changed since."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apollo_cli.config import ReadingOptions
from apollo_cli.ui.visit import Looked, Visit, facts_of
from apollo_cli.video.guard import GuardedReader


def look(opener: GuardedReader, paths: Sequence[Path], reading: ReadingOptions) -> list[Looked]:
    """What is known of files, as they are now.

    Raises:
        MediaError: one cannot be read.
        OSError: one is gone.
    """
    found = []
    for path in paths:
        facts = facts_of(path)
        info = opener.probe(path, reading)
        found.append(Looked(info, facts))
    return found


def look_again(opener: GuardedReader, visit: Visit) -> None:
    """Go on with what is known now of the files in view that have changed, and say so.

    Raises:
        MediaError: one cannot be read any more.
        OSError: one is gone.
    """
    before = visit.looked
    changed = [looked.info.path for looked in before if looked.is_changed]
    if not changed:
        return
    visit.forget_what_was_seen()
    fresh = dict(zip(changed, look(opener, changed, visit.reading), strict=True))
    visit.looked = [fresh.get(looked.info.path, looked) for looked in before]
    visit.opened += 1
    visit.notice = "; ".join(
        f"{path.name} has changed since it was opened and was looked at again" for path in changed
    )
    visit.revise()
