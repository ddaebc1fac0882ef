"""What the tests of the chat share: short drawn videos, and a desk with apollo-nano."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions
from apollo_cli.engine import load
from apollo_cli.ui.desk import Desk
from apollo_cli.ui.handlers import State
from apollo_cli.ui.settings import Settings
from apollo_cli.ui.visit import Visit
from lab.toybox import sample_world, write_video
from tests.waiting import until

SHORT = GenerationOptions(max_new_tokens=8)
PHOTO = Path(__file__).parents[1] / "cases" / "photo.jpg"
HOSTILE = "<img src=x onerror=alert(1)>.mp4"
PLAIN = Settings("0", "", "fps", "", "", subtitles=False, answer_tokens="8", temperature="0")
KEY = "k" * 36


def draw_videos(folder: Path, count: int) -> list[Path]:
    """Write that many short videos, each another one."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"video{number}.mp4" for number in range(count)]
    for number, path in enumerate(paths):
        write_video(sample_world(number), path)
    return paths


@contextmanager
def nano_desk(keep_videos: int = 4) -> Iterator[Desk]:
    """A desk whose model is loading, closed at the end."""
    desk = Desk(
        lambda report: load("apollo-nano", device="cpu", use_cache=False, on_progress=report),
        keep_videos=keep_videos,
    )
    desk.start()
    try:
        yield desk
    finally:
        desk.close()


def new_visit(desk: Desk, generation: GenerationOptions = SHORT) -> Visit:
    """A visitor with a talk of its own."""
    return desk.visit(None, SamplingOptions(), ReadingOptions(), generation)


def at_rest(visit: Visit) -> Visit:
    """Wait until nothing is done for a visitor."""
    until(lambda: visit.task is None)
    return visit


def last(states: Iterator[State]) -> State:
    """The state that an action ends in."""
    return list(states)[-1]
