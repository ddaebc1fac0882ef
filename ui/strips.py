"""What is drawn under the players of a visit."""

from __future__ import annotations

from apollo_cli.ui.timeline import Mark, Strip, clip_edges
from apollo_cli.ui.visit import Visit


def strips_of(visit: Visit) -> tuple[Strip | None, ...]:
    """What is drawn under each player, made anew only where something changed."""
    revision, strips = visit.strips
    if revision != visit.revision or len(strips) != len(visit.infos):
        revision = visit.revision
        strips = tuple(_strip(visit, number) for number in range(len(visit.infos)))
        visit.strips = (revision, strips)
    return strips


def _strip(visit: Visit, number: int) -> Strip | None:
    info = visit.infos[number]
    if info.kind == "image":
        return None
    length, seen = info.duration_seconds, visit.seen
    if len(seen) == len(visit.infos):
        plan, times = seen[number].plan, seen[number].times
    elif visit.cost is not None and len(visit.cost.plans) == len(visit.infos):
        plan = visit.cost.plans[number]
        times = plan.times
    else:
        return None
    # Of an answer about several files, nobody knows which of them it means: it cites none.
    named = [c for told in visit.told if told.files == (str(info.path),) for c in told.citations]
    marks = {c.seconds: Mark(c.seconds, c.text, c.seen) for c in named}
    window = (plan.start_seconds, plan.end_seconds)
    edges = clip_edges(times, plan, length)
    return Strip(
        info.path.name, length, window, edges, plan.describe(), bool(seen), tuple(marks.values())
    )
