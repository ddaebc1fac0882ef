"""How large a file may be before it is refused, so that none takes all memory or time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from apollo_cli.errors import MediaError
from apollo_cli.video.opening import shown
from apollo_cli.words import apart


@dataclass(frozen=True)
class Limits:
    """Bounds on what is decoded.

    Attributes:
        max_pixels: of one picture; the default is 8192 x 8192, which is 200 MB as RGB. Reading
            such an image takes 140 MB where it is gray, and 500 MB in colour (measured), since
            Pillow holds a copy of its own.
        max_seconds: of a video; the default is a day.
        max_pictures: of a video; the default is a day at 60 a second, with room.
    """

    max_pixels: int = 1 << 26
    max_seconds: float = 86_400.0
    max_pictures: int = 6_000_000

    def check_size(self, path: Path, width: int, height: int) -> None:
        """Refuse a picture with too many pixels.

        Raises:
            MediaError: with both numbers and the flag that raises the limit.
        """
        if width * height > self.max_pixels:
            raise MediaError(
                f"{shown(path)} has pictures of {width}x{height}",
                f"allowed are {self.max_pixels:,} pixels",
                "raise it with --max-pixels, or make the video smaller",
            )

    def check_duration(self, path: Path, seconds: float) -> None:
        """Refuse a video that lasts too long.

        Raises:
            MediaError: with both numbers and the flag that raises the limit.
        """
        if seconds > self.max_seconds:
            lasts, allowed = apart(seconds / 3600, self.max_seconds / 3600)
            raise MediaError(
                f"{shown(path)} lasts {lasts} hours",
                f"allowed are {allowed}",
                "raise it with --max-hours, or cut the video",
            )

    def refuse_pictures(self, path: Path) -> NoReturn:
        """Say that a file has too many pictures.

        Raises:
            MediaError: always.
        """
        raise MediaError(
            f"{shown(path)} has too many pictures",
            f"allowed are {self.max_pictures:,}",
            "raise it with --max-pictures, or cut the video",
        )


DEFAULT_LIMITS = Limits()
