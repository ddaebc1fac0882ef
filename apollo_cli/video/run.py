"""One pass of the decoder through a stream, which tells sound pictures from damaged ones."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from apollo_cli.video.coding import is_leaf
from apollo_cli.video.feed import Feed
from apollo_cli.video.timeline import Timeline, leading_packets, next_reset

# A jump costs about as much as reading on over this many packets.
_JUMP_PACKETS = 100

# No picture comes out later than this many packets after its own.
REORDER_PACKETS = 32


@dataclass(frozen=True)
class Came:
    """A picture that the decoder gave.

    Attributes:
        picture: its index. number: of its packet. frame: as decoded.
    """

    picture: int
    number: int
    frame: av.VideoFrame


class Run:
    """Enters a stream at a key packet and decodes from there on.

    What a damaged packet spoils follows from the file alone: every picture decoded after it up to
    the next key packet, and those behind the key packet that are shown before it; only itself,
    when nothing is built on it.

    Attributes:
        feed: the open stream.
        is_running: the decoder holds what the next packet needs.
        refused: numbers of the packets out of which no picture comes.
    """

    def __init__(self, path: Path, stream_index: int, line: Timeline) -> None:
        self.feed = Feed(path, stream_index)
        self.is_running = False
        self.refused: set[int] = set()
        self._line = line
        self._known = np.zeros(len(line.pts), dtype=bool)
        for first, end in line.damaged:
            self._known[first:end] = True
            self._known[leading_packets(line.pts, line.resets, end)] = True
        self._may_seek = line.walk == "seek"
        self._counts = line.walk == "count"
        self._forget()

    def _forget(self) -> None:
        self.refused.clear()
        # Ascending spans of packets, and single packets.
        self._spoiled: list[tuple[int, int]] = []
        self._spoiled_alone: set[int] = set()
        # Those whose picture may still be inside of the decoder.
        self._recent: deque[tuple[int, av.Packet]] = deque(maxlen=REORDER_PACKETS)
        self._tail = -1
        self._counted = 0
        self._uncounted: list[int] = []

    def rewind(self) -> None:
        """Go back to the start of the file."""
        self.feed.rewind()
        self.is_running = False
        self._forget()

    def enter(self, key: int) -> None:
        """Be ready to decode from packet ``key``, or to go on if that is behind us."""
        feed, walk = self.feed, self._line.walk
        if self.is_running and feed.number >= key:
            return
        if walk in ("straight", "count"):
            if not self.is_running and feed.number:
                self.rewind()
            self.is_running = True
            return
        if feed.number > key:
            self.rewind()
        if self._may_seek and key - feed.number > _JUMP_PACKETS:
            self._jump(key)
        feed.skip_to(key)
        feed.restart_decoder()
        self._forget()
        self.is_running = True

    def _jump(self, key: int) -> None:
        line, feed = self._line, self.feed
        before = feed.number
        landed = feed.seek(key, int(line.pts[key]), line.pts)
        if not landed or feed.number < before:
            self._may_seek = False
        if not landed:
            feed.rewind()

    def step(self, skips: np.ndarray | None = None) -> list[Came]:
        """Decode the next packet; at the end of the file give what is left and stop running.

        Args:
            skips: (packets,) bool: may be left out when nothing is built on them.
        """
        feed = self.feed
        packet = feed.read()
        if packet is None:
            return self.finish()
        number = feed.number - 1
        self._set_skipping(skips is not None and number < len(skips) and bool(skips[number]))
        self._recent.append((number, packet))
        if number == self._tail + 1 and self._is_leaf(number):
            # In front of other pictures, and behind a key packet, these look back beyond it.
            self._spoiled_alone.add(number)
            self._tail = number
        frames = feed.decode(packet)
        if feed.is_broken:
            if not frames:
                self.refused.add(number)
                self._uncounted.append(number)
            self._spoil(number)
        return self._sort(frames)

    def finish(self) -> list[Came]:
        """Take out all pictures that are still inside the decoder, and stop running."""
        came = self._sort(self.feed.drain())
        self.is_running = False
        return came

    def is_sound(self, number: int) -> bool:
        """Whether nothing that has been seen in this run spoils the picture of a packet."""
        if self._known[number] or number in self._spoiled_alone:
            return False
        place = bisect_right(self._spoiled, number, key=lambda span: span[0]) - 1
        return place < 0 or number >= self._spoiled[place][1]

    def _is_leaf(self, number: int) -> bool:
        context = self.feed.stream.codec_context
        return any(is_leaf(context, packet) for known, packet in self._recent if known == number)

    def _spoil(self, number: int) -> None:
        if self._is_leaf(number):
            self._spoiled_alone.add(number)
            return
        end = next_reset(self._line.resets, number, len(self._line.pts))
        insort(self._spoiled, (number, end))
        if self._counts:
            self._tail = end
        else:
            self._spoiled_alone.update(leading_packets(self._line.pts, self._line.resets, end))

    def _sort(self, frames: list[tuple[int, av.VideoFrame]]) -> list[Came]:
        came = []
        for number, frame in frames:
            picture = self._index_of(number)
            if picture >= 0:
                if frame.is_corrupt:
                    self._spoil(number)
                came.append(Came(picture, number, frame))
        return came

    def _index_of(self, number: int) -> int:
        if not 0 <= number < len(self._line.picture):
            # A file may have changed since it was probed.
            return -1
        if not self._counts:
            return int(self._line.picture[number])
        while self._uncounted and self._uncounted[0] < number:
            self._counted += self._line.picture[self._uncounted.pop(0)] >= 0
        self._counted += 1
        return self._counted - 1 if self._counted <= len(self._line.packet) else -1

    def _set_skipping(self, skips: bool) -> None:
        context = self.feed.stream.codec_context
        level = "NONREF" if skips else "DEFAULT"
        if context.skip_frame != level:
            context.skip_frame = level
