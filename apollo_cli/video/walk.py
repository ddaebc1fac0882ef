"""One forward walk through a stream, decoding only what the wanted pictures need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.video.frame import PictureType

from apollo_cli.video.feed import Feed
from apollo_cli.video.timeline import Timeline

# Codecs whose decoder leaves out non-reference pictures without any effect on the others.
_SKIPS_NONREF = ("h264", "hevc", "mpeg2video", "mpeg1video")

# A jump costs about as much as reading on over this many packets.
_JUMP_PACKETS = 100

# A picture is lost when this many later ones have come out without it.
_LATE_PICTURES = 3

# Streams without clean key packets need a longer run-up; in others a second try is wasted.
_RUN_UP_KEYS = 2
_MOST_RETRIES = 8


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
    """

    def __init__(self, path: Path, stream_index: int, timeline: Timeline) -> None:
        self._line = timeline
        self._feed = Feed(path, stream_index)
        # Which packets hold pictures that can't be trusted.
        self._damaged = np.zeros(len(timeline.pts), dtype=bool)
        for first, end in timeline.damaged:
            self._damaged[first:end] = True
        self._is_running = False
        may_skip = timeline.walk in ("seek", "skip")
        self._may_skip_nonref = may_skip and self._feed.stream.codec_context.name in _SKIPS_NONREF
        self._may_seek = timeline.walk == "seek"
        self._retries = 0
        self._run_up = 0
        self._counted = 0
        self._ready: dict[int, av.VideoFrame] = {}
        self._last_good: tuple[int, av.VideoFrame] | None = None

    def close(self) -> None:
        """Close the file."""
        self._feed.close()

    def fetch(self, pictures: Sequence[int]) -> Iterator[WalkedFrame]:
        """Yield ascending, distinct pictures."""
        wanted = set(pictures)
        following: list[int | None] = [*pictures[1:], None]
        for picture, after in zip(pictures, following, strict=True):
            frame = self._bring(picture, after, wanted)
            if frame is not None:
                yield WalkedFrame(picture, picture, frame)
            else:
                stand_in = self._neighbour(picture)
                if stand_in is not None:
                    yield WalkedFrame(picture, *stand_in)

    def _bring(self, picture: int, after: int | None, wanted: set[int]) -> av.VideoFrame | None:
        frame = self._advance(picture, after, wanted)
        may_retry = self._line.walk in ("seek", "skip") and self._retries < _MOST_RETRIES
        is_broken = self._damaged[self._line.packet[picture]]
        if frame is None and may_retry and not is_broken and self._run_up == 0:
            self._retries += 1
            self._run_up = _RUN_UP_KEYS
            self._restart()
            frame = self._advance(picture, after, wanted)
            if frame is None:
                self._run_up = 0
        return frame

    def _advance(self, picture: int, after: int | None, wanted: set[int]) -> av.VideoFrame | None:
        line, feed = self._line, self._feed
        # Where pictures are known by their count only, nothing says when one has been sent.
        number = len(line.pts) if line.walk == "count" else int(line.packet[picture])
        if picture not in self._ready:
            self._move_to(self._key_before(picture))
        late = 0
        while picture not in self._ready and late < _LATE_PICTURES:
            is_sent = feed.number > number
            if is_sent and (after is None or self._key_before(after) >= feed.number):
                self._take(feed.drain(), wanted)
                self._is_running = False
                break
            packet = feed.read()
            if packet is None:
                self._take(feed.drain(), wanted)
                self._is_running = False
                break
            if self._may_skip_nonref:
                shown = int(line.picture[feed.number - 1]) if feed.number <= len(line.pts) else -1
                self._set_skipping(shown not in wanted)
            came = self._take(feed.decode(packet), wanted)
            late += sum(shown > picture for shown in came) if is_sent else 0
        return self._ready.pop(picture, None)

    def _set_skipping(self, skips: bool) -> None:
        context = self._feed.stream.codec_context
        # In a stream that needs a run-up every picture may matter.
        level = "NONREF" if skips and not self._run_up else "DEFAULT"
        if context.skip_frame != level:
            context.skip_frame = level

    def _key_before(self, picture: int) -> int:
        position = max(0, int(self._line.key_of[picture]) - self._run_up)
        return int(self._line.keys[position])

    def _move_to(self, key: int) -> None:
        """Be ready to decode from packet ``key``, or to go on if that is behind us."""
        feed = self._feed
        if self._is_running and feed.number >= key:
            return
        if self._line.walk in ("straight", "count"):
            if not self._is_running and feed.number:
                self._restart()
            self._is_running = True
            return
        if feed.number > key:
            self._restart()
        if self._may_seek and key - feed.number > _JUMP_PACKETS:
            self._jump(key)
        feed.skip_to(key)
        feed.restart_decoder()
        self._is_running = True

    def _jump(self, key: int) -> None:
        line, feed = self._line, self._feed
        before = feed.number
        landed = feed.seek(key, int(line.pts[key]), line.pts)
        if not landed or feed.number < before:
            self._may_seek = False
        if not landed:
            feed.rewind()

    def _restart(self) -> None:
        self._feed.rewind()
        self._is_running = False
        self._counted = 0
        self._ready.clear()

    def _take(self, frames: list[tuple[int, av.VideoFrame]], wanted: set[int]) -> list[int]:
        """Keep the wanted ones of the pictures that came out; returns all their indices."""
        came = []
        while self._feed.broken:
            broken = self._feed.broken.pop()
            self._damaged[broken : self._next_key(broken)] = True
        for number, frame in frames:
            picture = self._index_of(number)
            # A file may have changed since it was probed.
            if picture < 0 or not 0 <= number < len(self._damaged):
                continue
            came.append(picture)
            if frame.is_corrupt:
                # Other pictures are seldom built on a B picture.
                is_leaf = frame.pict_type == PictureType.B
                end = number + 1 if is_leaf else self._next_key(number)
                self._damaged[number:end] = True
            if self._damaged[number]:
                continue
            self._last_good = (picture, frame)
            if picture in wanted:
                self._ready[picture] = frame
        return came

    def _index_of(self, number: int) -> int:
        if self._line.walk == "count":
            self._counted += 1
            return self._counted - 1 if self._counted <= len(self._line.packet) else -1
        return int(self._line.picture[number]) if 0 <= number < len(self._line.picture) else -1

    def _next_key(self, number: int) -> int:
        keys = self._line.keys
        place = int(np.searchsorted(keys, number, side="right"))
        return int(keys[place]) if place < len(keys) else len(self._line.pts)

    def _neighbour(self, picture: int) -> tuple[int, av.VideoFrame] | None:
        """The last sound picture before a damaged one; the next one where there is none near."""
        line = self._line
        number = int(line.packet[picture])
        start = int(line.keys[max(0, int(line.key_of[picture]) - 1)])
        known = self._last_good
        if known is not None and int(line.packet[known[0]]) >= start:
            return known
        self._last_good = None
        self._restart()
        self._move_to(start)
        self._set_skipping(False)
        while self._feed.number <= number or self._last_good is None:
            packet = self._feed.read()
            self._take(self._feed.drain() if packet is None else self._feed.decode(packet), set())
            if packet is None:
                break
        self._restart()
        self._last_good = self._last_good or known
        return self._last_good
