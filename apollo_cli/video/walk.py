"""A forward walk through a stream, decoding only what the wanted pictures need."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import numpy as np

from apollo_cli.video.decoder import Decoder, Numbered
from apollo_cli.video.info import Timeline
from apollo_cli.video.packets import is_leaf

# A jump costs about as much as reading on over this many packets.
_JUMP_PACKETS = 100

# No picture comes out later than this many packets after its own.
_REORDER_PACKETS = 32

# Streams without clean key packets need a longer run-up.
_RUN_UP_KEYS = 2

# Codecs whose decoder leaves out non-reference pictures without any effect on the others.
_SKIPS_NONREF = ("h264", "hevc", "mpeg2video", "mpeg1video")

# A picture is lost when this many later ones have come out without it.
_LATE_PICTURES = 3

_SOUND, _DAMAGED = 1, 2

# Index of a picture, number of its packet, and the picture as decoded.
Came = tuple[int, int, av.VideoFrame]


class Run:
    """Enters a stream at a key packet, decodes from there on, and tells what is damaged.

    What a damaged packet spoils follows from the file alone: every picture decoded after it up to
    the next key packet, and those behind the key packet that are shown before it; only itself,
    when nothing is built on it.

    Attributes:
        decoder: the open stream.
        is_running: the decoder holds what the next packet needs.
        refused: numbers of the packets out of which no picture comes.
        is_damaged: (packets,) what has been seen so far spoils the picture of the packet.
    """

    def __init__(self, path: Path, stream_index: int, line: Timeline) -> None:
        self.decoder = Decoder(path, stream_index)
        self.is_running = False
        self._line = line
        self._may_seek = line.walk == "seek"
        self._picture = np.full(len(line.pts), -1)
        self._picture[line.packet] = np.arange(len(line.packet))
        self._known = np.zeros(len(line.pts), dtype=bool)
        for first, end in line.damaged:
            self._known[first:end] = True
            self._known[line.leading(end)] = True
        self._forget()

    def _forget(self) -> None:
        self.refused: set[int] = set()
        self.is_damaged = self._known.copy()
        # Packets whose picture may still be inside of the decoder.
        self._recent: deque[tuple[int, av.Packet]] = deque(maxlen=_REORDER_PACKETS)
        # Without time stamps, the pictures behind this packet may look back beyond it.
        self._tail = -1
        self._counted = 0
        self._uncounted: list[int] = []

    def rewind(self) -> None:
        """Go back to the start of the file."""
        self.decoder.rewind()
        self.is_running = False
        self._forget()

    def enter(self, key: int) -> None:
        """Be ready to decode from packet ``key``, or to go on if that is behind us."""
        decoder, line = self.decoder, self._line
        if self.is_running and decoder.number >= key:
            return
        if not line.enters_anywhere:
            if not self.is_running and decoder.number:
                self.rewind()
            self.is_running = True
            return
        if decoder.number > key:
            self.rewind()
        before = decoder.number
        if self._may_seek and key - before > _JUMP_PACKETS:
            landed = decoder.seek(key, line.pts)
            self._may_seek = landed and decoder.number >= before
            if not landed:
                decoder.rewind()
        decoder.skip_to(key)
        decoder.context.flush_buffers()
        self._forget()
        self.is_running = True

    def step(self, skips: np.ndarray | None = None) -> list[Came]:
        """Decode the next packet; at the end of the file give what is left and stop running.

        Args:
            skips: (packets,) bool: may be left out when nothing is built on them.
        """
        decoder = self.decoder
        packet = decoder.read()
        if packet is None:
            return self.finish()
        number = decoder.number - 1
        is_skipped = skips is not None and number < len(skips) and skips[number]
        level = "NONREF" if is_skipped else "DEFAULT"
        if decoder.context.skip_frame != level:
            decoder.context.skip_frame = level
        self._recent.append((number, packet))
        if number == self._tail + 1 and self._is_leaf(number):
            self.is_damaged[number : number + 1] = True
            self._tail = number
        frames = decoder.decode(packet)
        if decoder.is_broken:
            if not frames:
                self.refused.add(number)
                self._uncounted.append(number)
            self._spoil(number)
        return self._sort(frames)

    def finish(self) -> list[Came]:
        """Take out all pictures that are still inside the decoder, and stop running."""
        came = self._sort(self.decoder.drain())
        self.is_running = False
        return came

    def _is_leaf(self, number: int) -> bool:
        context = self.decoder.context
        return any(is_leaf(context, packet) for known, packet in self._recent if known == number)

    def _spoil(self, number: int) -> None:
        if self._is_leaf(number):
            self.is_damaged[number : number + 1] = True
            return
        end = self._line.group_end(number)
        self.is_damaged[number:end] = True
        if self._line.walk == "count":
            self._tail = end
        else:
            self.is_damaged[self._line.leading(end)] = True

    def _sort(self, frames: list[Numbered]) -> list[Came]:
        """Find the index of each picture by the number of its packet."""
        came: list[Came] = []
        for number, frame in frames:
            # A file may have changed since it was probed.
            if not 0 <= number < len(self._picture):
                continue
            picture = int(self._picture[number])
            if self._line.walk == "count":
                while self._uncounted and self._uncounted[0] < number:
                    self._counted += self._picture[self._uncounted.pop(0)] >= 0
                picture, self._counted = int(self._counted), self._counted + 1
            if 0 <= picture < len(self._line.packet):
                if frame.is_corrupt:
                    self._spoil(number)
                came.append((picture, number, frame))
        return came


class Walk:
    """Fetches pictures of one stream in ascending order.

    It jumps or skips only to the key packet that a wanted picture needs, leaves out
    non-reference pictures that nobody wants, and takes a picture out of the decoder at once when
    nothing else of its group is wanted. It holds at most the decoder's own pictures and three
    more. A second decoder looks at whole groups where a picture does not come or is damaged.

    Args:
        times: (pictures,) when each picture is shown.
    """

    def __init__(
        self, path: Path, stream_index: int, timeline: Timeline, times: np.ndarray
    ) -> None:
        self._line, self._times = timeline, times
        self._source = (path, stream_index, timeline)
        self._run = Run(*self._source)
        codec = self._run.decoder.context.name
        self._may_skip_nonref = timeline.enters_anywhere and codec in _SKIPS_NONREF
        self._run_up = 0
        self._ready: dict[int, av.VideoFrame] = {}
        self._second: Run | None = None
        self._verdicts = np.zeros(len(times), dtype=np.uint8)
        # The sound pictures nearest to a damaged one: before it, and from it on.
        self._near: dict[bool, tuple[int, av.VideoFrame]] = {}

    def close(self) -> None:
        """Close the file."""
        for run in (self._run, self._second):
            if run is not None:
                run.decoder.close()

    def fetch(self, pictures: Sequence[int]) -> Iterator[tuple[int, int, av.VideoFrame]]:
        """Yield ascending, distinct pictures; none where no picture of the file is sound.

        Yields:
            The index wanted, the index of the picture that comes (the sound one nearest in time
            stands in for a damaged one), and the picture as decoded.
        """
        wanted = set(pictures)
        skips = None
        if self._may_skip_nonref:
            skips = np.ones(len(self._line.pts), dtype=bool)
            skips[self._line.packet[np.fromiter(pictures, np.int64, len(pictures))]] = False
        following: list[int | None] = [*pictures[1:], None]
        for picture, after in zip(pictures, following, strict=True):
            shown, frame = picture, None
            if self._verdicts[picture] != _DAMAGED:
                frame = self._advance(picture, after, wanted, skips)
            if frame is None:
                found = self._find_sound(picture)
                if found is None:
                    continue
                shown, frame = found
                if shown == picture and self._line.enters_anywhere:
                    # In a stream without clean key packets each picture may need a run-up.
                    self._run_up = _RUN_UP_KEYS
            yield picture, shown, frame

    def _advance(
        self, picture: int, after: int | None, wanted: set[int], skips: np.ndarray | None
    ) -> av.VideoFrame | None:
        """Decode until a picture comes; None where it is lost or damaged."""
        run = self._run
        # Where pictures are known by their count only, nothing says when one has been sent.
        number = int(self._line.packet[picture])
        number = len(self._line.pts) if self._line.walk == "count" else number
        if picture not in self._ready:
            run.enter(self._key_before(picture))
        late = 0
        while picture not in self._ready and run.is_running and late < _LATE_PICTURES:
            is_sent = run.decoder.number > number
            is_last = after is None or self._key_before(after) >= run.decoder.number
            if is_sent and is_last:
                came = run.finish()
            else:
                came = run.step(None if self._run_up else skips)
            for shown, packet, frame in came:
                late += is_sent and shown > picture
                if shown in wanted and not run.is_damaged[packet]:
                    self._ready[shown] = frame
        return self._ready.pop(picture, None)

    def _key_before(self, picture: int) -> int:
        if not self._line.enters_anywhere:
            return 0
        return int(self._line.keys[max(0, self._line.key_of[picture] - self._run_up)])

    def _find_sound(self, picture: int) -> tuple[int, av.VideoFrame] | None:
        """The picture if it is sound after all, else the sound one nearest in time."""
        while True:
            is_open = self._verdicts != _DAMAGED
            before, after = np.flatnonzero(is_open[:picture]), np.flatnonzero(is_open[picture:])
            both = np.concatenate([before[-1:], picture + after[:1]])
            if not len(both):
                return None
            nearest = int(both[np.argmin(np.abs(self._times[both] - self._times[picture]))])
            nearest = picture if is_open[picture] else nearest
            for found in self._near.values():
                if found[0] == nearest:
                    return found
            if self._verdicts[nearest] == _SOUND:
                self._judge_group(nearest, nearest)
                return self._near.get(True)
            self._judge_group(nearest, picture)

    def _judge_group(self, member: int, near: int) -> None:
        """Find out which pictures of a group are sound; keep the nearest to one on each side."""
        line = self._line
        run = self._second = self._second or Run(*self._source)
        group = int(line.key_of[member])
        members = np.flatnonzero(line.key_of == group)
        self._near = {}
        if line.enters_anywhere:
            start, end = int(line.keys[group]), line.group_end(int(line.keys[group]))
            stop = int(max([end - 1, *line.leading(end)])) + 1
            self._judge(start, stop, near)
            withheld = line.packet[members[self._verdicts[members] == 0]]
            if group and not set(withheld.tolist()) <= run.refused:
                self._judge(int(line.keys[max(0, group - _RUN_UP_KEYS)]), stop, near)
        else:
            if self._verdicts[member]:
                run.rewind()
            self._judge(0, int(line.packet[members[-1]]) + _REORDER_PACKETS, near)
        self._verdicts[members[self._verdicts[members] == 0]] = _DAMAGED

    def _judge(self, key: int, stop: int, near: int) -> None:
        """Decode from a key packet on, and judge what comes."""
        run = self._second
        assert run is not None
        run.is_running &= not self._line.enters_anywhere
        run.enter(key)
        packets: dict[int, int] = {}
        while run.is_running:
            if run.decoder.number < stop:
                came = run.step()
            elif self._line.enters_anywhere:
                came = run.finish()
            else:
                break
            for picture, packet, frame in came:
                packets[picture] = packet
                if run.is_damaged[packet] or self._verdicts[picture] == _DAMAGED:
                    continue
                kept = self._near.get(picture >= near)
                if kept is None or abs(picture - near) < abs(kept[0] - near):
                    self._near[picture >= near] = picture, frame
        # Only now all is known that may spoil a picture.
        for picture, packet in packets.items():
            if not run.is_damaged[packet]:
                self._verdicts[picture] = _SOUND
            elif not self._verdicts[picture]:
                self._verdicts[picture] = _DAMAGED
        for side, (picture, _) in list(self._near.items()):
            if self._verdicts[picture] == _DAMAGED:
                del self._near[side]
