"""``apollo ui``: a page on this machine that shows what the model saw."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.commands.options import FILE, complete_file, fit_flag, flags_of, read_options
from apollo_cli.commands.output import say_note
from apollo_cli.config import GenerationOptions, ModelOptions, ReadingOptions, SamplingOptions
from apollo_cli.errors import UsageError

if TYPE_CHECKING:
    from apollo_cli.ui.options import UiOptions


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE...]", shell_complete=complete_file)
@click.option(
    "--host", default="127.0.0.1", help="Where to listen; 127.0.0.1 is this machine only."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    show_default="the first free one from 7860",
    help="Number of the port to listen at.",
)
@click.option(
    "--auth",
    metavar="USER:PASSWORD",
    show_default="none",
    help="Ask for them. Better set in APOLLO_UI_AUTH, which no list of processes shows.",
)
@click.option("--no-auth", is_flag=True, help="With --host: let in anybody.")
@click.option(
    "--allow",
    multiple=True,
    type=FILE,
    metavar="FOLDER",
    show_default="the current folder",
    help="Files below it may be opened; may be repeated.",
)
@click.option(
    "--max-upload-mb",
    type=click.IntRange(1, 100_000),
    default=500,
    help="Most to drop on the page at once; files opened by path have no limit.",
)
@click.option(
    "--keep-videos", type=click.IntRange(1, 1000), default=4, help="Most videos kept in memory."
)
@click.option("--no-browser", is_flag=True, help="Open no browser, only tell the address.")
@flags_of(ModelOptions, SamplingOptions, ReadingOptions, GenerationOptions)
@fit_flag
def ui(files: tuple[str, ...], **flags: Any) -> None:
    """Open a local page to ask about videos and see what the model saw.

    The page runs on this machine and loads nothing from elsewhere. Its address goes to stdout,
    everything else to stderr; Ctrl-C ends it.
    """
    # Its name is looked up before anything heavy is imported, so that its lack is told at once.
    if importlib.util.find_spec("gradio") is None:
        raise UsageError(
            "apollo ui needs Gradio, which is not installed",
            next_step='pip install "apollo-video-cli[ui]"',
        )
    options = read_ui_options(files, flags)
    from apollo_cli.ui.server import check_open, serve
    from apollo_cli.weights.store import locate_model

    check_open(options.host, options.auth, flags["no_auth"])
    # Its weights are loaded while the page is up already; that there are some is known at once.
    adapter = options.model["adapter"]
    locate_model(options.model["model"], adapters=[] if adapter is None else [adapter])
    if options.host not in ("127.0.0.1", "localhost", "::1") and options.auth:
        say_note("the password and all answers travel unencrypted: use it in a network you trust")
    serve(options, lambda address: click.echo(f"{address}  (Ctrl-C ends it)"))


def read_ui_options(files: tuple[str, ...], flags: dict[str, Any]) -> UiOptions:
    """Put the flags of the command into their places.

    Raises:
        UsageError: a value is out of its range, or two do not go together.
        MediaError: a file is not there.
    """
    from apollo_cli.ui.options import MOST_FILES, UiOptions
    from apollo_cli.video.container import resolve_file

    reading = read_options(ReadingOptions, flags)
    if flags["fit"] and not files:
        raise UsageError("--fit auto without a video", "it decides how much of a video is seen")
    if len(files) > MOST_FILES:
        raise UsageError(f"{len(files)} files", "allowed are eight", "open the page with fewer")
    opened = [
        Path(file) if reading.image_fps is not None and Path(file).is_dir() else resolve_file(file)
        for file in files
    ]
    return UiOptions(
        model=vars(read_options(ModelOptions, flags)),
        sampling=read_options(SamplingOptions, flags),
        reading=reading,
        generation=read_options(GenerationOptions, flags),
        fit=flags["fit"] is not None,
        # As the page names them: a link may lead elsewhere by the time that a question is asked.
        files=tuple(path.resolve() for path in opened),
        allow=tuple(_read_folder(folder) for folder in flags["allow"] or [Path()]),
        host=flags["host"],
        port=flags["port"],
        auth=_read_auth(flags["auth"], flags["no_auth"]),
        keep_videos=flags["keep_videos"],
        max_upload_bytes=flags["max_upload_mb"] * 1_000_000,
        show_page=not flags["no_browser"],
    )


def _read_folder(folder: Path) -> Path:
    absolute = folder.expanduser().absolute()
    if not absolute.is_dir():
        raise UsageError(f"--allow {folder}: no such folder")
    return absolute


def _read_auth(text: str | None, no_auth: bool) -> tuple[str, str] | None:
    if text is None:
        return None
    if no_auth:
        raise UsageError("--auth (or APOLLO_UI_AUTH) and --no-auth", "allowed is one of the two")
    user, _, password = text.partition(":")
    if not user or not password:
        # The text itself may be a password, so it is not repeated.
        raise UsageError("--auth", "allowed is user:password, neither of them empty")
    return user, password
