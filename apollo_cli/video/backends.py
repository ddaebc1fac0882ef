"""Who decodes: PyAV by default, others on request, who never judge what is in a file, or when."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np

from apollo_cli.errors import MediaError, UsageError
from apollo_cli.video import progress
from apollo_cli.video.container import Limits, check_unchanged, shown, unchanged
from apollo_cli.video.findings import FORMAT_CHANGES
from apollo_cli.video.images import walk_image
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.picture import to_rgb
from apollo_cli.video.walk import Walk

Decoder = Literal["pyav", "decord", "torchcodec"]

# The module and the package of each decoder.
_PACKAGES: dict[Decoder, tuple[str, str]] = {
    "pyav": ("av", "av"),
    "decord": ("decord", "decord"),
    "torchcodec": ("torchcodec", "torchcodec"),
}

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
        damaged: it is the wanted one, and a decoder reports damage in it.
    """

    picture: int
    shown: int
    rgb: np.ndarray
    damaged: bool = False


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

    decord is known to hang on some files, and torchcodec brings torch with it: use both through
    ``guard`` only.

    Raises:
        MediaError: nothing can be decoded, or the decoder would not give these pictures right.
        UsageError: the decoder is not installed, or cannot be loaded.
    """
    with unchanged(info.path, info.identity):
        for read in _pictures(info, pictures, decoder):
            check_unchanged(info.path, info.identity)
            yield read


def _pictures(info: VideoInfo, pictures: list[int], decoder: Decoder) -> Iterator[ReadPicture]:
    if info.files:
        yield from _read_files(info.files, pictures)
    elif info.timeline is None:
        for picture, read in walk_image(info.path, pictures, _UNLIMITED):
            yield ReadPicture(picture, picture, read.rgb, read.damaged)
    elif decoder == "decord":
        yield from _read_with_decord(info, pictures)
    elif decoder == "torchcodec":
        yield from _read_with_torchcodec(info, pictures)
    else:
        yield from _read_with_pyav(info, pictures)


def _read_files(files: tuple[Path, ...], pictures: list[int]) -> Iterator[ReadPicture]:
    """One image a picture; the nearest sound image stands in for a damaged one."""
    damaged: set[int] = set()
    for picture in pictures:
        steps = (side for step in range(1, len(files)) for side in (picture - step, picture + step))
        for near in itertools.chain([picture], steps):
            if near in damaged or not 0 <= near < len(files):
                continue
            with suppress(MediaError):
                ((_, read),) = walk_image(files[near], [0], _UNLIMITED)
                if not read.damaged:
                    yield ReadPicture(picture, near, read.rgb)
                    break
            damaged.add(near)


def _read_with_pyav(info: VideoInfo, pictures: list[int]) -> Iterator[ReadPicture]:
    assert info.timeline is not None
    walk = Walk(info.path, info.stream_index, info.timeline, info.times)
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
        yield ReadPicture(picture, picture, _in_proportion(rgb, info))


def _open_with_decord(info: VideoInfo) -> Any:
    decord = _load("decord", "decord")
    if fault := _unfit_for_decord(info):
        raise _refusal(info, "decord", fault)
    try:
        reader = decord.VideoReader(str(info.path), num_threads=1)
        starts = np.asarray(reader.get_frame_timestamp(range(len(reader))))[:, 0]
    except (decord.DECORDError, RuntimeError):
        raise _refusal(info, "decord", "it cannot open the file") from None
    if len(starts) != info.frame_count:
        fault = f"it counts {len(starts)} pictures of {info.frame_count}"
        raise _refusal(info, "decord", fault)
    if np.ptp(starts - info.times) > _TIME_SLACK_SECONDS:
        raise _refusal(info, "decord", "its times are wrong")
    return reader


def _unfit_for_decord(info: VideoInfo) -> str:
    """Why decord gives wrong pictures without an error, as measured; empty when it does not."""
    line = info.timeline
    assert line is not None
    if line.walk != "seek":
        return "it seeks wrongly in this container"
    if info.mirrored:
        return "it does not mirror"
    if FORMAT_CHANGES in info.warnings:
        return "it keeps to the first format of a file"
    if len(line.packet) != len(line.pts):
        return "it shows pictures outside of the edit list"
    nearest = np.searchsorted(line.keys, line.packet, side="right") - 1
    if (nearest != line.key_of).any():
        return "it gives wrong pictures in open groups"
    return ""


def _read_with_torchcodec(info: VideoInfo, pictures: list[int]) -> Iterator[ReadPicture]:
    """Each picture has to have its own time, since the numbers of two readers may differ.

    Damaged pictures are not noticed.
    """
    codec = _load("torchcodec", "torchcodec.decoders")
    if fault := _unfit_for_torchcodec(info):
        raise _refusal(info, "torchcodec", fault)
    try:
        reader = codec.VideoDecoder(
            str(info.path),
            stream_index=info.stream_index,
            dimension_order="NHWC",
            num_ffmpeg_threads=1,
            seek_mode="exact",
        )
        for picture in pictures:
            progress.advance()
            frame = reader.get_frame_at(picture)
            gap = frame.pts_seconds - info.clock_offset_seconds - info.times[picture]
            if abs(gap) > _TIME_SLACK_SECONDS:
                raise _refusal(info, "torchcodec", f"it gives a picture {gap:+.3f} s away")
            yield ReadPicture(picture, picture, _in_proportion(frame.data.numpy(), info))
    except (RuntimeError, ValueError, IndexError, TypeError):
        # What it raises for a file that it can't read is any of these.
        raise _refusal(info, "torchcodec", "it cannot decode the file") from None


def _unfit_for_torchcodec(info: VideoInfo) -> str:
    """Why torchcodec gives wrong pictures without an error, as measured."""
    line = info.timeline
    assert line is not None
    if line.walk in ("straight", "count"):
        return "it seeks wrongly in this kind of file"
    if info.container == "mpeg":
        return "it seeks wrongly in program streams"
    if info.mirrored:
        return "it does not mirror"
    if (np.diff(line.pts[line.packet]) <= 0).any():
        return "the time line of the file repeats"
    return ""


def _load(decoder: Decoder, module: str) -> Any:
    if importlib.util.find_spec(decoder) is None:
        raise UsageError(
            f"--decoder {decoder}, which is not installed",
            next_step=f"pip install 'apollo-video-cli[{decoder}]', or leave it out",
        )
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        raise UsageError(
            f"--decoder {decoder}, which is installed and cannot be loaded",
            next_step="see that its libraries fit (torchcodec needs those of FFmpeg, and a release "
            "made for this torch), or leave it out",
        ) from None


def _refusal(info: VideoInfo, decoder: Decoder, fault: str) -> MediaError:
    return MediaError(
        f"{shown(info.path)} can't be read right by {decoder}: {fault}",
        next_step=f"leave out --decoder {decoder}",
    )


def _in_proportion(rgb: np.ndarray, info: VideoInfo) -> np.ndarray:
    if (rgb.shape[1], rgb.shape[0]) == info.display_size:
        return rgb
    frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
    return frame.reformat(*info.display_size).to_ndarray()
