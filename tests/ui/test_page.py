"""The page in a real browser: asked, streamed, sought, stopped, reloaded, by mouse and by keys."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from apollo_cli.config import GenerationOptions
from apollo_cli.ui.server import Site
from apollo_cli.ui.visit import Task
from lab.toybox import sample_world, write_video
from tests.ui.made import draw_videos
from tests.ui.serving import chatting
from tests.waiting import PATIENCE_SECONDS, until

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
CASES = Path(__file__).parents[1] / "cases"
HOSTILE = "<img src=x onerror=document.title='owned'>.mp4"
NO_UTF8 = os.fsdecode(b"\xff.mp4")
WAIT_MS = 1000 * PATIENCE_SECONDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "videos"
    draw_videos(folder, 1)
    write_video(sample_world(3, 20.0), folder / "long.mp4")
    shutil.copy(folder / "video0.mp4", folder / HOSTILE)
    shutil.copy(CASES / "photo.jpg", folder)
    shutil.copy(CASES / "mjpeg.avi", folder)
    shutil.copy(folder / "video0.mp4", folder / NO_UTF8)
    (folder / "broken.mp4").write_bytes(b"nothing of a video")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, Site]]:
    answers = GenerationOptions(max_new_tokens=24)
    with chatting(folder, generation=answers) as (address, site):
        yield address, site


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        if os.environ.get("APOLLO_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{CHROMIUM} was promised and is not there")
        pytest.skip(f"there is no {CHROMIUM}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS.split())
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser as of another person: nothing is kept from test to test."""
    opened = browser.new_context(viewport={"width": 1280, "height": 800})
    opened.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    yield opened
    opened.close()


@pytest.fixture
def page(context: BrowserContext, served: tuple[str, Site]) -> Page:
    return visit(context, served[0])


def visit(context: BrowserContext, address: str) -> Page:
    page = context.new_page()
    page.goto(address)
    expect(page.locator("#model .chip:not(.busy)")).to_be_visible()
    return page


def open_file(page: Page, name: str) -> None:
    page.fill("#path input", name)
    page.press("#path input", "Enter")
    expect(page.locator("#plan b")).to_have_text(name)
    expect(page.locator(".plan span").nth(3)).to_be_visible()


def ask(page: Page, question: str) -> str:
    before = page.locator("#told .turn").count()
    page.fill("#question textarea", question)
    page.press("#question textarea", "Enter")
    expect(page.locator("#told .turn")).to_have_count(before + 1)
    expect(page.locator("#ask")).to_be_visible()
    return page.locator("#told .answer").last.inner_text()


def put_answer(site: Site, page: Page, text: str) -> None:
    """Show an answer that names times, as a real model would write it."""
    from apollo_cli.answer import cited_times
    from apollo_cli.ui.visit import Told

    key = page.evaluate("sessionStorage.getItem('apollo-key')")
    visit = site.desk.visits[key]
    visit.told.append(Told("When?", text, visit.files, tuple(cited_times(text, visit.seen[0]))))
    visit.revise()


def test_a_video_is_opened_asked_about_and_answered_with_what_was_seen(page: Page):
    open_file(page, "video0.mp4")
    expect(page.locator(".strip")).to_have_attribute("data-seen", "false")
    assert page.evaluate("document.querySelector('#player video').readyState") >= 0
    answer = ask(page, "What is shown?")
    assert answer
    expect(page.locator(".strip")).to_have_attribute("data-seen", "true")
    expect(page.locator(".plan")).to_contain_text("already watched")
    assert page.locator("#question textarea").input_value() == ""
    assert ask(page, "What colour is it?")
    page.click("#blind")
    expect(page.locator("#told .check")).to_contain_text("without the video")


def test_an_answer_appears_while_it_is_written_and_can_be_stopped(
    page: Page, served: tuple[str, Site], monkeypatch: pytest.MonkeyPatch
):
    open_file(page, "video0.mp4")
    advance = Task.advance

    def slowly(task: Task, name: str, done: int, total: int) -> None:
        advance(task, name, done, total)
        if name == "write" and done > 1:
            # As of a large model: there is time to see it write, and to stop it.
            task.stopping.wait(PATIENCE_SECONDS)

    with monkeypatch.context() as patch:
        patch.setattr(Task, "advance", slowly)
        page.fill("#question textarea", "What is shown in this video?")
        page.click("#ask")
        expect(page.locator("#now .question")).to_have_text("What is shown in this video?")
        expect(page.locator("#work .steps [aria-current]")).to_have_text("Write")
        expect(page.locator("#now .answer")).to_have_text(re.compile(r"\w"))
        page.click("#stop")
        expect(page.locator("#told .stopped")).to_be_visible()
    expect(page.locator("#stop")).to_be_hidden()
    assert ask(page, "What colour is it?")


def test_a_time_in_an_answer_moves_the_player_there(page: Page, served: tuple[str, Site]):
    open_file(page, "long.mp4")
    ask(page, "What is shown?")
    page.fill("#question textarea", "still here")
    put_answer(served[1], page, "It starts at 0:07 and goes on until 12.5 seconds.")
    page.reload()
    expect(page.locator("#told .time")).to_have_count(2)
    page.locator("#told .time").first.click()
    page.wait_for_function("document.querySelector('#player video').currentTime === 7")
    expect(page.locator(".strip-bar")).to_have_attribute("aria-valuenow", "7.0")
    expect(page.locator(".strip-bar")).to_have_attribute(
        "aria-valuetext", "0:07 · seen by the model"
    )
    expect(page.locator(".strip-mark")).to_have_count(2)
    page.locator(".strip-mark").nth(1).click()
    page.wait_for_function("document.querySelector('#player video').currentTime === 12.5")
    box = page.locator(".strip-bar").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_function(
        "Math.abs(document.querySelector('#player video').currentTime - 10) < 0.2"
    )


def test_a_time_moves_the_player_of_its_own_video_and_shows_it(
    page: Page, served: tuple[str, Site]
):
    open_file(page, "long.mp4")
    ask(page, "What is shown?")
    put_answer(served[1], page, "It starts at 0:07.")
    page.fill("#path input", "video0.mp4")
    page.click("#add")
    pressed = page.locator('.tabs [aria-pressed="true"]')
    expect(pressed).to_have_text("video0.mp4")
    page.locator("#told .time").click()
    expect(pressed).to_have_text("long.mp4")
    page.wait_for_function(
        "document.querySelector('.file[aria-label=\"long.mp4\"] video').currentTime === 7"
    )
    other = "document.querySelector('.file[aria-label=\"video0.mp4\"] video').currentTime"
    assert page.evaluate(other) == 0
    open_file(page, "video0.mp4")
    expect(page.locator("#told .turn")).to_have_count(2)
    expect(page.locator("#told .time")).to_have_count(0)
    expect(page.locator(".strip-mark")).to_have_count(0)


def test_all_of_it_works_from_the_keyboard(page: Page, served: tuple[str, Site]):
    page.focus("#path input")
    page.keyboard.type("long.mp4")
    page.keyboard.press("Enter")
    expect(page.locator(".strip")).to_be_visible()
    page.focus("#question textarea")
    page.keyboard.type("What is shown?")
    page.keyboard.press("Enter")
    expect(page.locator("#told .turn")).to_have_count(1)
    expect(page.locator("#ask")).to_be_visible()
    put_answer(served[1], page, "At 0:02, at 0:04 and at 0:06.")
    page.reload()
    expect(page.locator(".strip-mark")).to_have_count(3)
    page.focus(".strip-bar")
    for key, seconds in (("ArrowRight", 5), ("PageUp", 20), ("Home", 0)):
        page.keyboard.press(key)
        page.wait_for_function(f"document.querySelector('#player video').currentTime === {seconds}")
        expect(page.locator(".strip-bar")).to_have_attribute(
            "aria-valuetext", re.compile("· seen by the model$")
        )
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#player video').currentTime === 4")
    unreachable = page.evaluate(
        "[...document.querySelectorAll('#told button, .strip button, #menu button')]"
        ".filter(button => button.tabIndex < 0).length"
    )
    assert unreachable == 0


def test_a_reload_finds_the_talk_again_and_a_second_tab_begins_its_own(
    page: Page, context: BrowserContext, served: tuple[str, Site]
):
    open_file(page, "video0.mp4")
    answer = ask(page, "What is shown?")
    page.reload()
    expect(page.locator("#told .answer")).to_have_text(answer)
    expect(page.locator("#plan b")).to_have_text("video0.mp4")
    second = visit(context, served[0])
    expect(second.locator("#player .empty")).to_be_visible()
    open_file(second, "long.mp4")
    ask(second, "What colour is it?")
    assert page.locator("#told .turn").count() == 1
    assert page.locator("#plan b").inner_text() == "video0.mp4"
    ask(page, "And then?")
    assert second.locator("#told .turn").count() == 1


def test_a_duplicated_tab_begins_its_own_talk_and_each_finds_its_own_after_a_reload(
    page: Page, context: BrowserContext, served: tuple[str, Site]
):
    open_file(page, "video0.mp4")
    ask(page, "What is shown?")
    stored = page.evaluate("JSON.stringify(sessionStorage)")
    copy = context.new_page()
    # As a browser does it: the storage comes along, once.
    copy.add_init_script(f"if (!sessionStorage.length) Object.assign(sessionStorage, {stored});")
    copy.goto(served[0])
    expect(copy.locator("#player .empty")).to_be_visible()
    open_file(copy, "long.mp4")
    ask(page, "And then?")
    assert page.locator("#told .turn").count() == 2
    copy.reload()
    expect(copy.locator("#plan b")).to_have_text("long.mp4")
    page.reload()
    expect(page.locator("#told .turn")).to_have_count(2)


def test_the_added_file_is_shown_and_tabs_say_which_one_is(page: Page):
    open_file(page, "video0.mp4")
    page.fill("#path input", "long.mp4")
    page.click("#add")
    pressed = page.locator('.tabs [aria-pressed="true"]')
    expect(pressed).to_have_text("long.mp4")
    expect(page.locator('.file[aria-label="long.mp4"]')).to_be_visible()
    page.locator(".tabs button").first.click()
    expect(pressed).to_have_text("video0.mp4")
    expect(page.locator('.file[aria-label="long.mp4"]')).to_be_hidden()
    ask(page, "What is shown?")
    expect(pressed).to_have_text("video0.mp4")


def test_a_setting_that_was_just_typed_counts_for_the_question(page: Page):
    open_file(page, "long.mp4")
    page.click("#unfold")
    page.get_by_label("Most clips").fill("3")
    page.locator("#question textarea").evaluate("field => field.focus()")
    ask(page, "What is shown?")
    expect(page.locator(".plan")).to_contain_text("3 clips")
    expect(page.locator(".strip-clips")).to_have_attribute("d", re.compile(r"^(M[^M]+){3}$"))
    expect(page.locator("#blind")).to_be_visible()
    page.get_by_label("Most clips").fill("4")
    page.get_by_label("Most clips").press("Enter")
    expect(page.locator("#blind")).to_be_hidden()


def test_a_reload_in_the_middle_of_an_answer_goes_on_with_it(
    page: Page, served: tuple[str, Site], monkeypatch: pytest.MonkeyPatch
):
    open_file(page, "video0.mp4")
    advance = Task.advance
    go_on: list[bool] = []

    def hold(task: Task, name: str, done: int, total: int) -> None:
        advance(task, name, done, total)
        if name == "write" and done == 2:
            until(lambda: go_on)

    monkeypatch.setattr(Task, "advance", hold)
    page.fill("#question textarea", "What is shown in this video?")
    page.press("#question textarea", "Enter")
    expect(page.locator("#now .answer")).to_have_text(re.compile(r"\w"))
    page.reload()
    expect(page.locator("#now .question")).to_have_text("What is shown in this video?")
    expect(page.locator("#stop")).to_be_visible()
    go_on.append(True)
    expect(page.locator("#told .turn")).to_have_count(1)
    expect(page.locator("#ask")).to_be_visible()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken.mp4", "broken.mp4"),
        ("/etc/passwd", "may not be opened here"),
        ("no", "no such file"),
    ],
)
def test_an_error_is_a_sentence_in_the_page_and_the_visit_goes_on(page: Page, name: str, said: str):
    page.fill("#path input", name)
    page.click("#open")
    expect(page.locator("#alert [role=alert]")).to_contain_text(said)
    assert page.locator(".toast-wrap *").count() == 0
    page.fill("#path input", "photo.jpg")
    page.click("#open")
    expect(page.locator("#player img")).to_have_js_property("complete", True)
    expect(page.locator("#alert [role=alert]")).to_have_count(0)


def test_a_file_that_is_dropped_is_opened(page: Page, folder: Path):
    data = (folder / "photo.jpg").read_bytes()
    page.evaluate(
        """(bytes) => {
          const files = new DataTransfer();
          files.items.add(new File([new Uint8Array(bytes)], "dropped.jpg", {type: "image/jpeg"}));
          document.body.dispatchEvent(
            new DragEvent("drop", {dataTransfer: files, bubbles: true, cancelable: true}));
        }""",
        list(data),
    )
    expect(page.locator("#plan b")).to_have_text("dropped.jpg")
    page.wait_for_function("document.querySelector('#player img')?.naturalWidth > 0")


def test_a_file_that_no_browser_plays_gets_a_preview_and_can_be_asked_about(page: Page):
    page.click("#browse")
    page.click('#picker [data-pick$="mjpeg.avi"]')
    expect(page.locator("#plan b")).to_have_text("mjpeg.avi")
    page.wait_for_function("document.querySelector('#player video')?.readyState > 0")
    assert ask(page, "What is shown?")


def test_an_upload_is_for_the_one_who_brought_it(
    page: Page, context: BrowserContext, served: tuple[str, Site], folder: Path
):
    page.set_input_files("#open-row input[type=file]", folder / "photo.jpg")
    expect(page.locator("#plan b")).to_have_text("photo.jpg")
    (path,) = served[1].desk.visits[page.evaluate("apolloPage.key()")].uploads
    other = visit(context, served[0])
    for name in (path, path.parent, path.parent.parent):
        other.fill("#path input", str(name))
        other.click("#open")
        expect(other.locator("#alert [role=alert]")).to_contain_text("may not be opened here")
        expect(other.locator("#alert [role=alert]")).not_to_contain_text(path.parent.name)


def test_an_upload_that_is_too_large_is_a_sentence_before_anything_is_sent(page: Page):
    page.evaluate("document.querySelector('[data-most-bytes]').dataset.mostBytes = '2000000'")
    file = {"name": "big.mp4", "mimeType": "video/mp4", "buffer": bytes(3_000_000)}
    page.set_input_files("#open-row input[type=file]", file)  # pyright: ignore
    expect(page.locator("#told-here")).to_contain_text("big.mp4 has 3 MB; allowed are 2 MB")
    assert page.locator(".toast-wrap *").count() == 0


def test_a_file_that_became_a_link_is_not_asked_about(page: Page, folder: Path):
    swapped = folder / "swapped.mp4"
    shutil.copy(folder / "video0.mp4", swapped)
    open_file(page, "swapped.mp4")
    outside = shutil.copy(swapped, folder.parent)
    swapped.unlink()
    swapped.symlink_to(outside)
    page.fill("#question textarea", "What is shown?")
    page.press("#question textarea", "Enter")
    expect(page.locator("#told .turn.dropped")).to_contain_text("has become a link")
    swapped.unlink()


def test_no_answer_is_lost_where_one_event_ends_as_the_next_begins(page: Page):
    open_file(page, "long.mp4")
    page.click("#unfold")
    for clips in ("4", "5", "6"):
        page.get_by_label("Most clips").fill(clips)
        # Leaving the field and asking are a few milliseconds apart.
        ask(page, "What is shown?")
        assert page.locator("#question textarea").input_value() == ""


def test_a_server_that_was_started_again_is_told_of_and_the_question_stays(
    page: Page, served: tuple[str, Site]
):
    open_file(page, "video0.mp4")
    page.fill("#question textarea", "still typed")
    del served[1].desk.visits[page.evaluate("apolloPage.key()")]
    page.route(
        "**/presence?**",
        lambda route: route.fulfill(json={"server": "another", "known": True}),
        times=1,
    )
    expect(page.locator("#alert .notice")).to_contain_text("the server was started again")
    expect(page.locator("#question textarea")).to_have_value("still typed")


def test_the_question_stays_in_view_beside_open_settings(page: Page):
    open_file(page, "long.mp4")
    page.click("#unfold")
    page.get_by_label("Temperature").scroll_into_view_if_needed()
    expect(page.locator("#question")).to_be_in_viewport(ratio=1)
    expect(page.locator(".strip-bar")).to_be_in_viewport(ratio=1)


def test_settings_change_the_plan_before_asking(page: Page):
    open_file(page, "long.mp4")
    expect(page.locator(".plan")).to_contain_text("10 clips, every moment seen")
    page.click("#unfold")
    page.get_by_label("Most clips").fill("4")
    page.get_by_label("Most clips").press("Enter")
    expect(page.locator(".plan")).to_contain_text("4 clips, 2.0 s seen of every 5.")
    expect(page.locator(".strip-clips")).to_have_attribute("d", re.compile(r"^(M[^M]+){4}$"))
    page.reload()
    expect(page.locator(".plan")).to_contain_text("4 clips")
    page.click("#unfold")
    expect(page.get_by_label("Most clips")).to_have_value("4")
    page.get_by_label("From").fill("never")
    page.get_by_label("From").press("Enter")
    expect(page.locator("#alert [role=alert]")).to_contain_text("'never' is not a time")


def test_what_is_typed_the_moment_the_settings_are_unfolded_is_kept(page: Page):
    open_file(page, "long.mp4")
    page.evaluate(
        """() => {
          document.querySelector("#unfold").click();
          const field = document.querySelector("#fields [placeholder='as many as fit']");
          field.value = "4";
          field.dispatchEvent(new Event("input", {bubbles: true}));
          field.dispatchEvent(new KeyboardEvent("keypress", {key: "Enter", bubbles: true}));
        }"""
    )
    expect(page.locator(".plan")).to_contain_text("4 clips, 2.0 s seen of every 5.")
    expect(page.get_by_label("Most clips")).to_have_value("4")


def test_a_talk_is_saved_and_loaded_into_another_tab(
    page: Page, context: BrowserContext, served: tuple[str, Site], tmp_path: Path
):
    open_file(page, "video0.mp4")
    answer = ask(page, "What is shown?")
    with page.expect_download() as markdown:
        page.get_by_role("button", name="Save .md").click()
    markdown.value.save_as(tmp_path / "talk.md")
    assert "**What is shown?**" in (tmp_path / "talk.md").read_text()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save .json").click()
    saved.value.save_as(tmp_path / "talk.json")
    assert json.loads((tmp_path / "talk.json").read_text())["turns"][0]["answer"] == answer
    second = visit(context, served[0])
    with second.expect_file_chooser() as chooser:
        second.get_by_role("button", name="Load .json").click()
    chooser.value.set_files(tmp_path / "talk.json")
    expect(second.locator("#told .answer")).to_have_text(answer)
    expect(second.locator("#plan b")).to_have_text("video0.mp4")
    page.get_by_role("button", name="New talk").click()
    expect(page.locator("#told .turn")).to_have_count(0)


def test_a_name_a_question_and_an_answer_with_markup_stay_text(
    page: Page, served: tuple[str, Site]
):
    page.click("#browse")
    page.locator("#picker button", has_text="onerror").click()
    expect(page.locator("#plan b")).to_have_text(HOSTILE)
    evil = "<img src=x onerror=document.title='owned'> $\\frac{1}{2}$ **bold** <script>1</script>"
    ask(page, evil)
    expect(page.locator("#told .question")).to_have_text(evil)
    put_answer(served[1], page, evil + " at 0:01")
    page.reload()
    expect(page.locator("#told .answer").last).to_have_text(evil + " at 0:01")
    assert (
        page.locator("#told img, #told script, #told strong, #player img, #picker img").count() == 0
    )
    assert page.title() == "apollo"


def test_a_name_that_is_not_utf8_is_shown_and_saved_and_stops_nothing(
    page: Page, served: tuple[str, Site], folder: Path, tmp_path: Path
):
    page.click("#browse")
    page.locator("#picker button", has_text="\\udcff.mp4").click()
    expect(page.locator("#picker")).to_contain_text("no such file")
    open_file(page, "video0.mp4")
    ask(page, "What is shown?")
    desk = served[1].desk
    desk.open(desk.visits[page.evaluate("apolloPage.key()")], [folder / NO_UTF8])
    page.reload()
    expect(page.locator("#plan b")).to_have_text("\\udcff.mp4")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save .json").click()
    saved.value.save_as(tmp_path / "talk.json")
    assert json.loads((tmp_path / "talk.json").read_text())["files"] == [str(folder / NO_UTF8)]


def test_no_request_leaves_the_machine(context: BrowserContext, served: tuple[str, Site]):
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = visit(context, served[0])
    open_file(page, "video0.mp4")
    ask(page, "What is shown?")
    local = (served[0], f"blob:{served[0]}", "data:")
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(local)] == []
    links = page.evaluate("[...document.querySelectorAll('a[href]')].map(link => link.href)")
    assert [link for link in links if not link.startswith(served[0])] == []
    fonts = page.evaluate("[...document.fonts].filter(f => f.status === 'loaded').length")
    assert fonts == 0


def test_light_and_dark_follow_the_system_and_a_button(browser: Browser, served: tuple[str, Site]):
    ground = "getComputedStyle(document.body).backgroundColor"
    with browser.new_context(color_scheme="dark") as context:
        page = visit(context, served[0])
        assert page.evaluate(ground) == "rgb(17, 21, 19)"
        page.click("#shade")
        assert page.evaluate(ground) == "rgb(244, 245, 243)"
        page.reload()
        page.wait_for_function(f"{ground} === 'rgb(244, 245, 243)'")


@pytest.mark.parametrize("width", [375, 768, 1280])
def test_nothing_sticks_out_at_any_width(browser: Browser, served: tuple[str, Site], width: int):
    with browser.new_context(viewport={"width": width, "height": 800}) as context:
        page = visit(context, served[0])
        open_file(page, "long.mp4")
        page.click("#unfold")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        watch, side = (page.locator(name).bounding_box() for name in ("#watch", "#side"))
        assert watch is not None
        assert side is not None
        is_stacked = side["y"] >= watch["y"] + watch["height"]
        assert is_stacked == (width < 900)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_is_needed_to_read_it(
    browser: Browser, served: tuple[str, Site], scheme: Literal["light", "dark"]
):
    with browser.new_context(color_scheme=scheme) as context:
        page = visit(context, served[0])
        colours = page.evaluate(
            "Object.fromEntries(['ground','sheet','ink','quiet','accent','on-accent','wash','bad',"
            "'bad-wash','unseen','clip','window'].map(name => [name, getComputedStyle("
            "document.querySelector('.gradio-container')).getPropertyValue('--' + name).trim()]))"
        )
    pairs = [("ink", "ground"), ("ink", "sheet"), ("quiet", "ground"), ("quiet", "sheet")]
    pairs += [("accent", "wash"), ("accent", "sheet"), ("on-accent", "accent"), ("ink", "wash")]
    pairs += [("bad", "bad-wash"), ("bad", "sheet"), ("unseen", "wash")]
    assert {pair: found for pair in pairs if (found := contrast(colours, pair)) < 4.5} == {}
    assert contrast(colours, ("clip", "window")) >= 3


def contrast(colours: dict[str, str], pair: tuple[str, str]) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(light(colours[name]) for name in pair)
    return (high + 0.05) / (low + 0.05)
