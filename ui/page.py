"""The page: where things stand. What happens to them is said in ``events``, and done below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes import Base

from apollo_cli.ui.desk import Desk
from apollo_cli.ui.events import Parts, wire
from apollo_cli.ui.files import AllowedFolders
from apollo_cli.ui.handlers import Handlers
from apollo_cli.ui.media import MediaLinks
from apollo_cli.ui.options import UiDefaults
from apollo_cli.ui.settings import settings_of

_HERE = Path(__file__).resolve().parent
_FONTS = ("system-ui", "sans-serif")
_MOST_EVENTS = 500
_MONO = ("ui-monospace", "monospace")

# A click on a line of the picker is told to the server with the path of that line.
_PICK = """element.addEventListener('click', (event) => {
  const row = event.target.closest('[data-pick]');
  if (row) trigger("click", {pick: row.dataset.pick});
});"""

_UNFOLD = (
    '<button type="button" id="unfold" aria-expanded="false" aria-controls="fields">'
    "What is looked at, and how it answers</button>"
)


def page_looks() -> dict[str, Any]:
    """What ``mount_gradio_app`` or ``launch`` needs besides the page: theme, style and script."""
    script, style = ((_HERE / name).read_text("utf-8") for name in ("page.js", "style.css"))
    return {
        "theme": Base(font=_FONTS, font_mono=_MONO, primary_hue="teal"),
        # Gradio rewrites the selectors of what it is given as css, but not of what stands here.
        "head": f"<style>{style}</style><script>{script}</script>",
    }


def build_page(
    desk: Desk, files: AllowedFolders, media: MediaLinks, defaults: UiDefaults
) -> gr.Blocks:
    """The page for all visitors of a desk; it is mounted with ``page_looks``."""
    handlers = Handlers(desk, files, media, defaults)
    with gr.Blocks(title="apollo", fill_width=True, analytics_enabled=False) as page:
        parts = _lay_out(defaults)
        wire(page, parts, handlers)
    # Every open page holds one event, and needs room for others beside it.
    page.max_threads = _MOST_EVENTS
    # Who waits for the model waits at the desk, which tells the place; the page's queue is open.
    page.queue(default_concurrency_limit=None, api_open=False)
    return page


def _lay_out(defaults: UiDefaults) -> Parts:
    views: dict[str, gr.HTML] = {}
    hidden = {
        "key": gr.Textbox(visible=False),
        "browser_key": gr.Textbox(visible=False),
        "page_id": gr.Textbox(visible=False),
        "scratch": gr.Textbox(visible=False),
    }
    with gr.Row(elem_id="top"):
        top = _lay_out_top(views, defaults)
    with gr.Row(elem_id="body"):
        with gr.Column(elem_id="watch"):
            watch = _lay_out_watch(views, defaults)
        with gr.Column(elem_id="side"):
            side = _lay_out_side(views)
    return Parts(views=views, **hidden, **top, **watch, **side)


def _html(name: str, value: str = "", **more: Any) -> gr.HTML:
    return gr.HTML(value, elem_id=name, apply_default_css=False, **more)


def _lay_out_top(views: dict[str, gr.HTML], defaults: UiDefaults) -> dict[str, Any]:
    _html("brand", f'<h1 data-most-bytes="{defaults.max_upload_bytes}">apollo</h1>')
    views["model"] = _html("model")
    with gr.Row(elem_id="menu"):
        fresh = gr.Button("New talk", size="sm")
        save = {form: gr.Button(f"Save .{form}", size="sm") for form in ("md", "json")}
        load = gr.Button("Load .json", size="sm")
        _html("shade-box", '<button type="button" id="shade" aria-label="Light or dark">◐</button>')
    return {"fresh": fresh, "save": save, "load": load}


def _line(name: str, label: str, hint: str, **more: Any) -> gr.Textbox:
    """A field whose label only screen readers tell."""
    return gr.Textbox(
        label=label, show_label=False, container=False, placeholder=hint, elem_id=name, **more
    )


def _lay_out_watch(views: dict[str, gr.HTML], defaults: UiDefaults) -> dict[str, Any]:
    with gr.Row(elem_id="open-row"):
        label = "Path of a video or image"
        parts: dict[str, Any] = {
            "path": _line("path", label, label, max_lines=1),
            "open": gr.Button("Open", size="sm", variant="primary", elem_id="open"),
            "add": gr.Button("Add", size="sm", elem_id="add"),
            "browse": gr.Button("Browse", size="sm", elem_id="browse"),
            "upload": gr.UploadButton("Upload", size="sm", elem_id="upload", type="filepath"),
        }
    parts["picker"] = _html("picker", js_on_load=_PICK)
    views["player"], views["plan"] = _html("player"), _html("plan")
    parts["settings"] = _lay_out_settings(defaults)
    return parts


def _lay_out_side(views: dict[str, gr.HTML]) -> dict[str, Any]:
    with gr.Column(elem_id="talk"):
        views["told"], views["now"] = _html("told"), _html("now")
    views["alert"], views["work"] = _html("alert"), _html("work")
    with gr.Row(elem_id="ask-row"):
        question = _line("question", "Question", "Ask about what is in view", lines=1, max_lines=6)
        ask = gr.Button("Ask", variant="primary", elem_id="ask")
        stop = gr.Button("Stop", variant="stop", elem_id="stop")
    with gr.Row(elem_id="after-row"):
        blind = gr.Button("Blind check", size="sm", elem_id="blind")
    return {"question": question, "ask": ask, "stop": stop, "blind": blind}


def _lay_out_settings(defaults: UiDefaults) -> list[Any]:
    value = settings_of(defaults.sampling, defaults.reading, defaults.generation)
    modes = [("Clips at a rate", "fps"), ("Frames spread evenly", "uniform")]
    # No accordion: Gradio makes its fields when it is first opened, and forgets what is typed
    # into them meanwhile.
    with gr.Column(elem_id="settings"):
        _html("unfold-box", _UNFOLD)
        with gr.Column(elem_id="fields"):
            with gr.Row():
                start = gr.Textbox(value.start, label="From")
                end = gr.Textbox(value.end, label="To", placeholder="the end")
                clips = gr.Textbox(value.clips, label="Most clips", placeholder="as many as fit")
            with gr.Row():
                mode = gr.Radio(modes, value=value.mode, label="Sampling")
                label = "Frames a second, or in all"
                rate = gr.Textbox(value.rate, label=label, placeholder="as trained")
            with gr.Row():
                tokens = gr.Textbox(value.answer_tokens, label="Longest answer, in tokens")
                heat = gr.Textbox(value.temperature, label="Temperature (0: repeatable)")
                subtitles = gr.Checkbox(value.subtitles, label="Read subtitles")
    return [start, end, mode, rate, clips, subtitles, tokens, heat]
