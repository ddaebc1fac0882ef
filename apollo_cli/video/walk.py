"""One forward walk through a stream, decoding only what the wanted pictures need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from apollo_cli.video.run import Came, Run
from apollo_cli.video.scout import RUN_UP_KEYS, Scout
from apollo_cli.video.timeline import Timeline

# Codecs whose decoder leaves out non-reference pictures without any effect on the others.
_SKIPS_NONREF = ("h264", "hevc", "mpeg2video", "mpeg1video")

# A picture is lost when this many later ones have come out without it.
_LATE_PICTURES = 3


@dataclass(frozen=True)
class WalkedFrame:
    """A decoded picture.

    Attributes:
        picture: index of the wanted picture.
        shown: index of the picture that ``frame`` is; another one stands in for a damaged one.
        frame: as decoded.
    """

    picture: int
    shown: int
    frame: av.VideoFrame


class Walk:
    """Fetches pictures of one stream in ascending order.

    It jumps or skips only to the key packet that a wanted picture needs, leaves out
    non-reference pictures that nobody wants, and takes a picture out of the decoder at once when
    nothing else of its group is wanted. Holds at most the decoder's own pictures and one more.
    What does not come, or is damaged, is left to a ``Scout``.

    Args:
        times: (pictures,) when each picture is shown.
    """

    def __init__(
        self, path: Path, stream_index: int, timeline: Timeline, times: np.ndarray
    ) -> None:
        self._line = timeline
        self._source = (path, stream_index, timeline)
        self._times = times
        self._run = Run(*self._source)
        self._scout: Scout | None = None
        may_skip = timeline.walk in ("seek", "skip")
        codec = self._run.feed.stream.codec_context.name
        self._may_skip_nonref = may_skip and codec in _SKIPS_NONREF
        self._run_up = 0
        self._ready: dict[int, av.VideoFrame] = {}

    def close(self) -> None:
        """Close the file."""
        self._run.feed.close()
        if self._scout is not None:
            self._scout.close()

    def fetch(self, pictures: Sequence[int]) -> Iterator[WalkedFrame]:
        """Yield ascending, distinct pictures; none where no picture of the file is sound."""
        wanted = set(pictures)
        skips = None
        if self._may_skip_nonref:
            skips = np.ones(len(self._line.pts), dtype=bool)
            skips[self._line.packet[np.fromiter(pictures, np.int64, len(pictures))]] = False
        following: list[int | None] = [*pictures[1:], None]
        for picture, after in zip(pictures, following, strict=True):
            frame = None
            if self._scout is None or not self._scout.knows_damaged(picture):
                frame = self._advance(picture, after, wanted, skips)
            if frame is not None:
                yield WalkedFrame(picture, picture, frame)
                continue
            self._scout = self._scout or Scout(*self._source, self._times)
            found = self._scout.bring(picture)
            if found is not None:
                if found[0] == picture and self._line.walk in ("seek", "skip"):
                    # In a stream without clean key packets each picture may need a run-up.
                    self._run_up = RUN_UP_KEYS
                yield WalkedFrame(picture, *found)

    def _advance(
        self, picture: int, after: int | None, wanted: set[int], skips: np.ndarray | None
    ) -> av.VideoFrame | None:
        line, run = self._line, self._run
        # Where pictures are known by their count only, nothing says when one has been sent.
        number = len(line.pts) if line.walk == "count" else int(line.packet[picture])
        if picture not in self._ready:
            run.enter(self._key_before(picture))
        late = 0
        while picture not in self._ready and late < _LATE_PICTURES:
            is_sent = run.feed.number > number
            if is_sent and (after is None or self._key_before(after) >= run.feed.number):
                self._keep(run.finish(), wanted)
                break
            came = self._keep(run.step(None if self._run_up else skips), wanted)
            late += sum(shown > picture for shown in came) if is_sent else 0
            if not run.is_running:
                break
        return self._ready.pop(picture, None)

    def _key_before(self, picture: int) -> int:
        position = max(0, int(self._line.key_of[picture]) - self._run_up)
        return int(self._line.keys[position])

    def _keep(self, came: list[Came], wanted: set[int]) -> list[int]:
        """Keep the wanted ones of the sound pictures; returns the indices of all that came."""
        for one in came:
            if one.picture in wanted and self._run.is_sound(one.number):
                self._ready[one.picture] = one.frame
        return [one.picture for one in came]
