"""What the tests of actions share: a desk with apollo-nano, a folder of videos, and one visitor."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from apollo_cli.ui.desk import Desk
from apollo_cli.ui.files import AllowedFolders
from apollo_cli.ui.handlers import Handlers
from apollo_cli.ui.media import MediaLinks
from apollo_cli.ui.options import UiDefaults
from apollo_cli.ui.visit import Visit
from tests.ui.made import HOSTILE, KEY, PHOTO, SHORT, draw_videos, nano_desk
from tests.waiting import until


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with nano_desk() as opened:
        until(lambda: opened.apollo is not None)
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("allowed") / "videos"
    videos = draw_videos(folder, 2)
    shutil.copy(videos[0], folder / HOSTILE)
    shutil.copy(PHOTO, folder)
    (folder / "more").mkdir()
    shutil.copy(videos[1], folder.parent / "outside.mp4")
    return folder


@pytest.fixture(scope="module")
def handlers(desk: Desk, folder: Path) -> Iterator[Handlers]:
    files = AllowedFolders([folder], uploads=folder.parent / "uploads")
    media = MediaLinks(files)
    yield Handlers(desk, files, media, UiDefaults(generation=SHORT))
    media.close()


@pytest.fixture
def visit(handlers: Handlers) -> Visit:
    handlers.desk.visits.clear()
    handlers.defaults = UiDefaults(generation=SHORT)
    return handlers.arrive(KEY, "page")
