"""Writes docs/screenshots: ``python -m tests.ui.pictures``. What they show was really answered."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from apollo_cli.config import SamplingOptions
from apollo_cli.ui.visit import Task
from lab.toybox import sample_world, write_video
from tests.ui.serving import chatting
from tests.ui.test_page import ARGUMENTS, CHROMIUM, ask, open_file, visit

TARGET = Path(__file__).parents[2] / "docs" / "screenshots"
SEED, SECONDS, CLIPS = 310, 24.0, 10
COLOURS = 256


def main() -> None:
    """Draw a video, talk about it, and take the pictures."""
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        place = Path(folder) / "videos"
        place.mkdir()
        world = sample_world(SEED, SECONDS, crowded=True)
        write_video(world, place / "shapes.mp4", scale=6)
        sampling = SamplingOptions(max_clips=CLIPS)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS.split())
        with chatting(place, sampling=sampling) as (address, _):
            _take_running(browser, address)
            page = _take_talk(browser, address)
            page.click("#shade")
            page.wait_for_timeout(600)
            _shoot(page, "dark.png")
            page.click("#shade")
            page.wait_for_timeout(600)
            page.set_viewport_size({"width": 375, "height": 812})
            page.evaluate("scrollTo(0, 0)")
            _shoot(page, "phone.png")
        browser.close()


def _take_running(browser: Browser, address: str) -> None:
    """While the video is watched: a small model is too quick to be seen, so it is held there."""
    advance = Task.advance

    def hold(task: Task, name: str, done: int, total: int) -> None:
        advance(task, name, done, total)
        if name == "encode":
            task.stopping.wait(20)

    context = browser.new_context(viewport={"width": 1280, "height": 760})
    page = visit(context, address)
    open_file(page, "shapes.mp4")
    setattr(Task, "advance", hold)  # noqa: B010 - its type says that methods stay
    page.fill("#question textarea", "Describe the video.")
    page.click("#ask")
    expect(page.locator("#work")).to_contain_text(re.compile("4 of 10 clips"), timeout=30_000)
    _shoot(page, "running.png")
    page.click("#stop")
    expect(page.locator("#stop")).to_be_hidden()
    setattr(Task, "advance", advance)  # noqa: B010
    context.close()


def _take_talk(browser: Browser, address: str) -> Page:
    context = browser.new_context(viewport={"width": 1280, "height": 760}, color_scheme="light")
    page = visit(context, address)
    open_file(page, "shapes.mp4")
    ask(page, "When does the white square appear?")
    ask(page, "Describe the video.")
    page.click("#blind")
    expect(page.locator("#told .check")).to_be_visible()
    expect(page.locator("#ask")).to_be_visible()
    page.locator("#told .time").last.click()
    page.focus(".strip-bar")
    page.keyboard.press("ArrowRight")
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(640, 740)
    page.wait_for_timeout(600)
    _shoot(page, "talk.png")
    return page


def _shoot(page: Page, name: str) -> None:
    """A picture of few colours: a page has no more, and the file stays small."""
    page.screenshot(path=TARGET / name)
    with Image.open(TARGET / name) as picture:
        picture.convert("RGB").quantize(COLOURS).save(TARGET / name, optimize=True)


if __name__ == "__main__":
    main()
