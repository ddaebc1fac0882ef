"""A folder of numbered pictures as a video."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from apollo_cli.errors import MediaError
from apollo_cli.video.images import read_image_facts
from apollo_cli.video.info import VideoInfo
from apollo_cli.video.limits import Limits
from apollo_cli.video.opening import resolve_file, shown, sniff

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif")


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
    names = sorted((name for name in os.listdir(path) if _is_image(name)), key=_by_number)
    if not names:
        raise MediaError(
            f"{shown(path)} is a folder without images", f"read are {', '.join(_IMAGE_SUFFIXES)}"
        )
    if len(names) > limits.max_pictures:
        limits.refuse_pictures(path)
    files = tuple(resolve_file(path / name) for name in names)
    sizes = []
    for file in files:
        if sniff(file) != "image":
            raise MediaError(f"{shown(file)} is not an image")
        sizes.append(read_image_facts(file, limits))
    count = len(files)
    limits.check_duration(path, count / image_fps)
    mixed = len({facts.display_size for facts in sizes}) > 1
    return VideoInfo(
        path=path,
        kind="video",
        times=np.arange(count) / image_fps,
        duration_seconds=count / image_fps,
        stored_size=sizes[0].stored_size,
        display_size=sizes[0].display_size,
        codec=sizes[0].codec,
        container="folder",
        source_fps=image_fps,
        warnings=("the images differ in size",) if mixed else (),
        files=files,
    )


def _is_image(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(_IMAGE_SUFFIXES)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort picture2 before picture10."""
    parts = re.split(r"(\d+)", name.lower())
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
