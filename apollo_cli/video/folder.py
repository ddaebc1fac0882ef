"""A folder of numbered pictures as a video."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from apollo_cli.errors import MediaError
from apollo_cli.video.container import Limits, resolve_file, shown, sniff
from apollo_cli.video.images import ImageFacts, read_image_facts
from apollo_cli.video.info import VideoInfo

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif")
_LEFT_OUT = (".heic", ".heif", ".gif", ".jxl", ".jp2", ".dng")


def probe_folder(path: Path, image_fps: float, limits: Limits) -> VideoInfo:
    """Take the images of a folder, in the order of their numbers, as pictures of a video.

    Every image is opened, so that a wrong one is found before anything is read. Files with
    other suffixes and hidden ones are left out.

    Args:
        path: of the folder.
        image_fps: how many images make a second.

    Raises:
        MediaError: no images, one that can't be read, or more than the limits allow.
    """
    everything = sorted(os.listdir(path), key=_by_number)
    names = [name for name in everything if _has_suffix(name, _IMAGE_SUFFIXES)]
    others = [name for name in everything if _has_suffix(name, _LEFT_OUT)]
    if not names:
        raise MediaError(
            f"{shown(path)} is a folder without images", f"read are {', '.join(_IMAGE_SUFFIXES)}"
        )
    if len(names) > limits.max_pictures:
        limits.refuse_pictures(path)
    files = tuple(resolve_file(path / name) for name in names)
    found: list[ImageFacts] = []
    for file in files:
        if sniff(file) != "image":
            raise MediaError(f"{shown(file)} is not an image")
        found.append(read_image_facts(file, limits))
    count = len(files)
    limits.check_duration(path, count / image_fps)
    return VideoInfo(
        path=path,
        kind="video",
        times=np.arange(count) / image_fps,
        duration_seconds=count / image_fps,
        stored_size=found[0].stored_size,
        display_size=found[0].display_size,
        codec=found[0].codec,
        container="folder",
        source_fps=image_fps,
        warnings=(
            *_odd_names(names),
            *_odd_images(names, found),
            *_share("left out, of a kind that is not read", others),
        ),
        files=files,
    )


def _has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    return not name.startswith(".") and name.lower().endswith(suffixes)


def _odd_names(names: list[str]) -> Iterator[str]:
    """A number that is missing means a moment that is missing, and all later times are early."""
    found = [re.fullmatch(r"(.*?)(\d+)\D*", name) for name in names]
    if not all(found) or len({match[1] for match in found if match}) > 1:
        return
    numbers = [int(match[2]) for match in found if match]
    missing = numbers[-1] - numbers[0] + 1 - len(set(numbers))
    if missing:
        yield f"{missing} numbers are missing: the images follow each other without a gap"
    if len(set(numbers)) < len(numbers):
        yield "numbers occur twice: each image is a picture of its own"


def _odd_images(names: list[str], found: list[ImageFacts]) -> Iterator[str]:
    if len({facts.display_size for facts in found}) > 1:
        yield "the images differ in size"
    faults: dict[str, list[str]] = {}
    for name, facts in zip(names, found, strict=True):
        animated = ("animated: only its first picture is taken",) if facts.frames > 1 else ()
        for fault in (*facts.warnings, *animated):
            faults.setdefault(fault, []).append(name)
    for fault, affected in faults.items():
        yield from _share(fault, affected)


def _share(fault: str, names: list[str]) -> Iterator[str]:
    """A fault with the first file that has it, and the number of the others."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{shown(names[0])}{more}: {fault}"


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort picture2 before picture10."""
    parts = re.split(r"(\d+)", name.lower())
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
