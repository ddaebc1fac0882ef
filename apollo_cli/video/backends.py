"""Who decodes: PyAV by default, decord on request. What is in a file, and when, is never theirs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import av
import numpy as np

from apollo_cli.errors import MediaError, UsageError
from apollo_cli.video import progress
from apollo_cli.video.images import walk_image
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.limits import Limits
from apollo_cli.video.opening import shown
from apollo_cli.video.picture import to_rgb
from apollo_cli.video.walk import Walk

Decoder = Literal["pyav", "decord"]

# The name of the package that each decoder needs.
_PACKAGES: dict[Decoder, tuple[str, str]] = {"pyav": ("av", "av"), "decord": ("decord", "decord")}

# The probe has checked the size, under the limits that the user gave.
_UNLIMITED = Limits(max_pixels=1 << 62)

# Two readers may round a time differently, by less than this.
_TIME_SLACK_SECONDS = 2e-3


@dataclass(frozen=True)
class ReadPicture:
    """An upright picture in display proportions.

    Attributes:
        picture: index of the wanted picture.
        shown: index of the picture that it is; another one stands in for a damaged one.
        rgb: (H, W, 3) uint8.
    """

    picture: int
    shown: int
    rgb: np.ndarray


def installed_decoders() -> dict[str, str | None]:
    """Name and version of each decoder, None where it is not installed; nothing is imported."""
    return {
        name: importlib.metadata.version(package) if importlib.util.find_spec(module) else None
        for name, (module, package) in _PACKAGES.items()
    }


def read_pictures(
    info: VideoInfo, pictures: list[int], decoder: Decoder = "pyav"
) -> Iterator[ReadPicture]:
    """Yield ascending, distinct pictures. Images are always read by Pillow.

    decord is known to hang on some files: use it through ``guard`` only.

    Raises:
        MediaError: nothing can be decoded, or decord would not give these pictures right.
        UsageError: the decoder is not installed.
    """
    if info.files:
        for picture in pictures:
            for _, rgb in walk_image(info.files[picture], [0], _UNLIMITED):
                yield ReadPicture(picture, picture, rgb)
    elif info.timeline is None:
        for picture, rgb in walk_image(info.path, pictures, _UNLIMITED):
            yield ReadPicture(picture, picture, rgb)
    elif decoder == "decord":
        yield from _read_with_decord(info, pictures)
    else:
        yield from _read_with_pyav(info, pictures)


def _read_with_pyav(info: VideoInfo, pictures: list[int]) -> Iterator[ReadPicture]:
    assert info.timeline is not None
    walk = Walk(info.path, info.stream_index, info.timeline)
    try:
        for walked in walk.fetch(pictures):
            rgb = to_rgb(walked.frame, info.sample_aspect, info.turn)
            yield ReadPicture(walked.picture, walked.shown, rgb)
    finally:
        walk.close()


def _read_with_decord(info: VideoInfo, pictures: list[int]) -> Iterator[ReadPicture]:
    """Damaged pictures are not noticed: decord hands them out like sound ones."""
    reader = _open_with_decord(info)
    for picture in pictures:
        progress.advance()
        rgb = reader[picture].asnumpy()
        if (rgb.shape[1], rgb.shape[0]) != info.display_size:
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            rgb = frame.reformat(*info.display_size).to_ndarray()
        yield ReadPicture(picture, picture, rgb)


def _open_with_decord(info: VideoInfo) -> Any:
    if importlib.util.find_spec("decord") is None:
        raise UsageError(
            "--decoder decord, which is not installed",
            next_step="pip install 'apollo-video-cli[decord]', or leave it out",
        )
    decord: Any = importlib.import_module("decord")
    if fault := _unfit_for_decord(info):
        raise _refusal(info, fault)
    try:
        reader = decord.VideoReader(str(info.path), num_threads=1)
        starts = np.asarray(reader.get_frame_timestamp(range(len(reader))))[:, 0]
    except (decord.DECORDError, RuntimeError):
        raise _refusal(info, "it cannot open the file") from None
    if len(starts) != info.frame_count:
        raise _refusal(info, f"it counts {len(starts)} pictures of {info.frame_count}")
    if np.ptp(starts - info.times) > _TIME_SLACK_SECONDS:
        raise _refusal(info, "its times are wrong")
    return reader


def _refusal(info: VideoInfo, fault: str) -> MediaError:
    return MediaError(
        f"{shown(info.path)} can't be read right by decord: {fault}",
        next_step="leave out --decoder decord",
    )


def _unfit_for_decord(info: VideoInfo) -> str:
    """Why decord gives wrong pictures without an error, as measured; empty when it does not."""
    line = info.timeline
    assert line is not None
    if line.walk != "seek":
        return "it seeks wrongly in this container"
    if info.mirrored:
        return "it does not mirror"
    if len(line.packet) != len(line.pts):
        return "it shows pictures outside of the edit list"
    nearest = np.searchsorted(line.keys, line.packet, side="right") - 1
    if (nearest != line.key_of).any():
        return "it gives wrong pictures in open groups"
    return ""
