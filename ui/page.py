"""The page: where things stand. What happens to them is said in ``events``, and done below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes import Base

from apollo_cli.ui import show
from apollo_cli.ui.desk import Desk
from apollo_cli.ui.events import Parts, wire
from apollo_cli.ui.files import AllowedFolders
from apollo_cli.ui.handlers import Handlers
from apollo_cli.ui.media import MediaLinks
from apollo_cli.ui.options import UiDefaults

_HERE = Path(__file__).resolve().parent
_FONTS = ("system-ui", "sans-serif")
_MONO = ("ui-monospace", "monospace")

# A click on a line of the picker is told to the server with the path of that line.
_PICK = """element.addEventListener('click', (event) => {
  const row = event.target.closest('[data-pick]');
  if (row) trigger("click", {pick: row.dataset.pick});
});"""


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
    # Who waits for the model waits at the desk, which tells the place; the page's queue is open.
    page.queue(default_concurrency_limit=None, api_open=False)
    return page


def _lay_out(defaults: UiDefaults) -> Parts:
    views: dict[str, gr.HTML] = {}

    def view(name: str) -> None:
        views[name] = gr.HTML(elem_id=name, apply_default_css=False)

    key, browser_key = gr.State(""), gr.Textbox(visible=False)
    scratch = gr.Textbox(visible=False)
    with gr.Row(elem_id="top"):
        gr.HTML("<h1>apollo</h1>", elem_id="brand", apply_default_css=False)
        view("model")
        with gr.Row(elem_id="menu"):
            fresh = gr.Button("New talk", size="sm")
            save = {form: gr.Button(f"Save .{form}", size="sm") for form in ("md", "json")}
            load = gr.Button("Load .json", size="sm")
            gr.HTML(
                '<button type="button" id="shade" aria-label="Light or dark">◐</button>',
                elem_id="shade-box",
                apply_default_css=False,
            )
    with gr.Row(elem_id="body"):
        with gr.Column(elem_id="watch"):
            with gr.Row(elem_id="open-row"):
                path = gr.Textbox(
                    label="Path of a video or image",
                    show_label=False,
                    container=False,
                    placeholder="Path of a video or image",
                    elem_id="path",
                    max_lines=1,
                )
                opener = gr.Button("Open", size="sm", variant="primary", elem_id="open")
                add = gr.Button("Add", size="sm", elem_id="add")
                browse = gr.Button("Browse", size="sm", elem_id="browse")
                upload = gr.UploadButton("Upload", size="sm", elem_id="upload", type="filepath")
            picker = gr.HTML(
                elem_id="picker",
                apply_default_css=False,
                js_on_load=_PICK,
            )
            view("player")
            view("plan")
            settings = _lay_out_settings(defaults)
        with gr.Column(elem_id="side"):
            with gr.Column(elem_id="talk"):
                view("told")
                view("now")
            view("alert")
            view("work")
            with gr.Row(elem_id="ask-row"):
                question = gr.Textbox(
                    label="Question",
                    show_label=False,
                    container=False,
                    placeholder="Ask about what is in view",
                    elem_id="question",
                    lines=1,
                    max_lines=6,
                )
                ask = gr.Button("Ask", variant="primary", elem_id="ask")
                stop = gr.Button("Stop", variant="stop", elem_id="stop")
            with gr.Row(elem_id="after-row"):
                blind = gr.Button("Blind check", size="sm", elem_id="blind")
    return Parts(
        key,
        browser_key,
        scratch,
        views,
        path,
        opener,
        add,
        browse,
        upload,
        picker,
        settings,
        question,
        ask,
        stop,
        blind,
        fresh,
        save,
        load,
    )


def _lay_out_settings(defaults: UiDefaults) -> list[Any]:
    sampling, answer = defaults.sampling, defaults.generation
    end = sampling.end_seconds
    with gr.Accordion("What is looked at, and how it answers", open=False, elem_id="settings"):
        with gr.Row():
            start = gr.Textbox(show.seconds_label(sampling.start_seconds), label="From")
            stop = _optional(None if end is None else show.seconds_label(end), "To", "the end")
            clips = _optional(sampling.max_clips, "Most clips", "as many as fit")
        with gr.Row():
            mode = gr.Radio(
                [("Clips at a rate", "fps"), ("Frames spread evenly", "uniform")],
                value=sampling.mode,
                label="Sampling",
            )
            rate = _optional(
                sampling.fps or sampling.frames, "Frames a second, or in all", "as trained"
            )
        with gr.Row():
            tokens = gr.Textbox(str(answer.max_new_tokens), label="Longest answer, in tokens")
            heat = gr.Textbox(f"{answer.temperature:g}", label="Temperature (0: repeatable)")
            subtitles = gr.Checkbox(defaults.reading.subtitles != "none", label="Read subtitles")
    return [start, stop, mode, rate, clips, subtitles, tokens, heat]


def _optional(value: object, label: str, otherwise: str) -> gr.Textbox:
    return gr.Textbox("" if value is None else f"{value}", label=label, placeholder=otherwise)
