"""Many pages of one browser, which has six lines to a server for all of them together."""

from __future__ import annotations

import time
from pathlib import Path

from playwright.sync_api import BrowserContext, Page, expect

from apollo_cli.ui.server import Site
from tests.ui.serving import request
from tests.ui.test_page import (  # noqa: F401 - fixtures
    ask,
    browser,
    context,
    folder,
    open_file,
    page,
    served,
    visit,
)
from tests.waiting import until


def test_five_tabs_of_one_browser_each_have_a_player_and_answers(
    context: BrowserContext,  # noqa: F811
    served: tuple[str, Site],  # noqa: F811
):
    tabs = [visit(context, served[0]) for _ in range(5)]
    for number, tab in enumerate(tabs):
        tab.bring_to_front()
        open_file(tab, "video0.mp4" if number % 2 else "long.mp4")
        expect(tab.locator("#player video")).to_be_visible()
        tab.wait_for_function("document.querySelector('#player video').readyState >= 1")
    for tab in reversed(tabs):
        tab.bring_to_front()
        assert ask(tab, "What is shown?")


def test_a_page_that_is_closed_is_told_at_once_and_one_that_is_silent_after_a_while(
    context: BrowserContext,  # noqa: F811
    served: tuple[str, Site],  # noqa: F811
):
    address, site = served
    tab = visit(context, address)
    key = tab.evaluate("apolloPage.key()")
    shown = site.desk.visits[key]
    until(lambda: shown.silent_after < time.monotonic() + 60)
    assert shown.gone_since is None
    tab.close(run_before_unload=True)
    until(lambda: shown.gone_since is not None)
    shown.left, shown.silent_after = None, time.monotonic() - 1
    assert shown.gone_since == shown.silent_after


def test_a_talk_that_ended_while_its_page_was_open_is_told_of(
    page: Page,  # noqa: F811
    served: tuple[str, Site],  # noqa: F811
):
    open_file(page, "video0.mp4")
    page.fill("#question textarea", "still typed")
    del served[1].desk.visits[page.evaluate("apolloPage.key()")]
    expect(page.locator("#alert .notice")).to_contain_text("the talk of before is not here")
    expect(page.locator("#question textarea")).to_have_value("still typed")


def test_choosing_no_talk_to_load_changes_nothing(page: Page, tmp_path: Path):  # noqa: F811
    open_file(page, "video0.mp4")
    (tmp_path / "empty.json").write_text("")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Load .json").click()
    chooser.value.set_files(tmp_path / "empty.json")
    page.wait_for_timeout(500)
    expect(page.locator("#plan b")).to_have_text("video0.mp4")
    expect(page.locator("#player video")).to_be_visible()


def test_nothing_is_learned_from_a_page_that_is_not_known(served: tuple[str, Site]):  # noqa: F811
    for page_id in ("", "x", "%00"):
        reply = request(served[0], f"/presence?page={page_id}&state=shown", "POST", b"")
        assert reply.status == 200
        assert b'"known":false' in reply.body
