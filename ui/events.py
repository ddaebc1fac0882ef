"""Events: which action a click starts, and which parts of the page its states change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import gradio as gr
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from apollo_cli.ui import show
from apollo_cli.ui.files import in_utf8
from apollo_cli.ui.handlers import GONE, Handlers, State
from apollo_cli.ui.settings import Settings, settings_of
from apollo_cli.ui.visit import Visit

_QUIET: dict[str, Any] = {
    "show_progress": "hidden",
    "api_visibility": "private",
    "trigger_mode": "multiple",
}

# How often the event that holds the stream of a page open looks whether the page is still there.
_BEAT_SECONDS = 5.0

_VIEWS: dict[str, Callable[[State], str]] = {
    "model": show.model_line,
    "player": show.player,
    "plan": show.plan_line,
    "told": show.told,
    "now": show.now,
    "work": show.work,
    "alert": show.alert,
}


@dataclass(frozen=True)
class Parts:
    """The components that actions read and write."""

    key: gr.Textbox
    browser_key: gr.Textbox
    page_id: gr.Textbox
    scratch: gr.Textbox
    views: dict[str, gr.HTML]
    path: gr.Textbox
    open: gr.Button
    add: gr.Button
    browse: gr.Button
    upload: gr.UploadButton
    picker: gr.HTML
    settings: list[Any]
    question: gr.Textbox
    ask: gr.Button
    stop: gr.Button
    blind: gr.Button
    fresh: gr.Button
    save: dict[str, gr.Button]
    load: gr.Button


def wire(page: gr.Blocks, parts: Parts, handlers: Handlers) -> None:
    """Tie every action to its trigger."""
    outputs = [parts.key, *(parts.views[name] for name in _VIEWS)]
    _wire_visit(page, parts, handlers, outputs)
    _wire_questions(parts, handlers, outputs)
    _wire_actions(parts, handlers, outputs)
    _wire_picker(parts, handlers, outputs)
    _wire_talks(parts, handlers, outputs)


def _wire_visit(page: gr.Blocks, parts: Parts, handlers: Handlers, outputs: list[Any]) -> None:
    everything = [*outputs, *parts.settings]

    async def arrive(browser_key: str, had_talk: str, page_id: str) -> AsyncIterator[list[Any]]:
        is_known = browser_key in handlers.desk.visits
        visit = await run_in_threadpool(handlers.arrive, browser_key or "", page_id or "")
        if had_talk and not is_known:
            visit.notice = GONE
        rows = _with_fields(visit, _fill(visit.key, handlers.follow(visit)))
        async for row in iterate_in_threadpool(rows):
            yield row
        # All events of a page share one stream, which Gradio closes after the last of them: another
        # that begins just then would never be heard of. So this one does not end.
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            yield _still(everything)

    # Neither a state of Gradio's nor its unload event: with these a page holds a second line to the
    # server all the time, of the six that a browser has for all of its tabs (see presence).
    asked = [parts.browser_key, parts.scratch, parts.page_id]
    page.load(arrive, asked, everything, js="() => apolloPage.arrive()", **_QUIET)


def _wire_questions(parts: Parts, handlers: Handlers, outputs: list[Any]) -> None:
    def ask(key: str, question: str, *values: Any) -> Iterator[list[Any]]:
        if not key:
            # The page has not arrived yet.
            yield _still([*outputs, parts.question])
            return
        visit = handlers.back(key)
        states = handlers.ask(visit, question, Settings(*values))
        for number, row in enumerate(_fill(visit.key, states)):
            # What was not taken stays where it was typed.
            yield [*row, gr.skip() if number or visit.error else ""]

    asked = [parts.key, parts.question, *parts.settings]
    for trigger in (parts.ask.click, parts.question.submit):
        trigger(ask, asked, [*outputs, parts.question], **_QUIET)

    def stop(key: str) -> None:
        if key:
            handlers.stop(handlers.back(key))

    parts.stop.click(stop, parts.key, None, **_QUIET)


def _wire_actions(parts: Parts, handlers: Handlers, outputs: list[Any]) -> None:
    def act(action: Callable[..., Iterator[State]]) -> Callable[..., Iterator[list[Any]]]:
        def run(key: str, *values: Any) -> Iterator[list[Any]]:
            if not key:
                yield _still(outputs)
                return
            visit = handlers.back(key)
            yield from _fill(visit.key, action(visit, *values))

        return run

    add = act(lambda visit, name: handlers.open(visit, name, add=True))
    take = act(lambda visit, path: handlers.open(visit, path, is_upload=True))
    change = act(lambda visit, *values: handlers.change(visit, Settings(*values)))
    named = [parts.key, parts.path]
    for trigger in (parts.open.click, parts.path.submit):
        trigger(act(handlers.open), named, outputs, **_QUIET)
    parts.add.click(add, named, outputs, **_QUIET)
    parts.upload.upload(take, [parts.key, parts.upload], outputs, **_QUIET)
    for part in parts.settings:
        is_typed = isinstance(part, gr.Textbox)
        for trigger in (part.submit, part.blur) if is_typed else (part.input,):
            trigger(change, [parts.key, *parts.settings], outputs, **_QUIET)
    parts.blind.click(act(handlers.blind), parts.key, outputs, **_QUIET)
    parts.fresh.click(act(handlers.begin_anew), parts.key, outputs, **_QUIET)


def _wire_picker(parts: Parts, handlers: Handlers, outputs: list[Any]) -> None:
    def pick(key: str, chosen: gr.EventData) -> Iterator[list[Any]]:
        listed = handlers.files.browse(str(chosen.pick))
        if not key:
            yield _still([*outputs, parts.picker, is_open])
            return
        visit = handlers.back(key)
        if listed is not None:
            yield [*_still(outputs), in_utf8(show.picker(listed)), True]
            return
        for row in _fill(visit.key, handlers.open(visit, str(chosen.pick))):
            yield [*row, "", False]

    def browse(is_open: bool) -> tuple[str, bool]:
        listed = None if is_open else handlers.files.browse("")
        if listed is None:
            return "", False
        return in_utf8(show.picker(listed)), True

    is_open = gr.Checkbox(visible=False)
    parts.browse.click(browse, is_open, [parts.picker, is_open], **_QUIET)
    parts.picker.click(pick, parts.key, [*outputs, parts.picker, is_open], **_QUIET)


def _wire_talks(parts: Parts, handlers: Handlers, outputs: list[Any]) -> None:
    """Talks are saved and loaded by the browser: no file of theirs lies on the server."""

    def saving(form: str) -> Callable[[str], tuple[str, str, Any]]:
        def save(key: str) -> tuple[str, str, Any]:
            if not key:
                return "", "", gr.skip()
            visit = handlers.back(key)
            name, text = handlers.save(visit, form)
            return name, in_utf8(text), in_utf8(show.alert(handlers.state(visit)))

        return save

    def load(key: str, text: str) -> Iterator[list[Any]]:
        if not (key and text):
            # No file was chosen.
            yield _still([*outputs, *parts.settings])
            return
        visit = handlers.back(key)
        yield from _with_fields(visit, _fill(visit.key, handlers.load(visit, text)))

    saved = [gr.Textbox(visible=False), gr.Textbox(visible=False)]
    for form, button in parts.save.items():
        button.click(saving(form), parts.key, [*saved, parts.views["alert"]], **_QUIET).then(
            None, saved, None, js="(name, text) => apolloPage.save(name, text)"
        )
    parts.load.click(
        load,
        [parts.key, parts.scratch],
        [*outputs, *parts.settings],
        js="async (key) => [key, await apolloPage.pickText()]",
        **_QUIET,
    )


def _with_fields(visit: Visit, rows: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """Rows, each with the settings of the visit where these have changed."""
    last: tuple[Any, ...] = ()
    for row in rows:
        fields = astuple(settings_of(visit.sampling, visit.reading, visit.generation))
        yield [*row, *(_still(fields) if fields == last else fields)]
        last = fields


def _still(outputs: Sequence[Any]) -> list[Any]:
    return [gr.skip() for _ in outputs]


def _fill(key: str, states: Iterator[State]) -> Iterator[list[Any]]:
    """Each state as values for the components; what did not change is left as it is."""
    last: dict[str, str] = {}
    talk: object = None
    for state in states:
        # A talk may be long, and is drawn anew only where it has changed.
        kept = {"told"} if state.talk == talk else set()
        drawn = {
            name: last[name] if name in kept else in_utf8(view(state))
            for name, view in _VIEWS.items()
        }
        yield [
            key,
            *(gr.skip() if last.get(name) == html else html for name, html in drawn.items()),
        ]
        last, talk = drawn, state.talk
