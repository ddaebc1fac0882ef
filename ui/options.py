"""What the local chat is started with, and the small types that its parts share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions

# In view at once; style.css has a line for each.
MOST_FILES = 8

MediaName = Literal["plays", "making a preview", "preview ready", "cannot be shown"]


@dataclass(frozen=True)
class UiOptions:
    """What ``apollo ui`` is started with.

    Attributes:
        model: arguments of ``engine.load``, without reader, progress and settings.
        sampling, reading, generation: what a new talk starts with.
        fit: what of each request fits the free memory is chosen before the model is loaded.
        files: absolute paths of what is in view when the page opens.
        allow: absolute folders whose files may be opened.
        host, port: where to listen; port 0 takes any free one, None the first from 7860 on.
        auth: user and password, or None for no question.
        keep_videos: most videos whose memory is kept in RAM.
        max_upload_bytes: of what is dropped at once.
        show_page: a browser is opened once the server runs.
    """

    model: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    fit: bool = False
    files: tuple[Path, ...] = ()
    allow: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    port: int | None = None
    auth: tuple[str, str] | None = field(default=None, repr=False)
    keep_videos: int = 4
    max_upload_bytes: int = 500_000_000
    show_page: bool = True


@dataclass(frozen=True)
class UiDefaults:
    """What each new visitor of the page starts with; fields as in ``UiOptions``."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    files: tuple[Path, ...] = ()
    max_upload_bytes: int = 500_000_000


@dataclass(frozen=True)
class MediaState:
    """How a file can be shown in a browser.

    Attributes:
        state: in words. share: of a preview that is being made, 0 to 1.
        address: of what the player should load, relative to the page; empty when there is nothing.
        kind: which element shows it.
        reason: why the file itself does not play, in one short sentence; may be empty.
    """

    state: MediaName
    share: float = 1.0
    address: str = ""
    kind: Literal["video", "image", "none"] = "video"
    reason: str = ""
