"""Which pictures around a damaged place are sound, and which of them stands in."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

from apollo_cli.video.run import REORDER_PACKETS, Came, Run
from apollo_cli.video.timeline import Timeline, leading_packets, next_reset

# Streams without clean key packets need a longer run-up.
RUN_UP_KEYS = 2

_SOUND, _DAMAGED = 1, 2


class Scout:
    """Decodes whole groups on a reader of its own, so its word never hangs on what was read before.

    Args:
        times: (pictures,) when each picture is shown.
    """

    def __init__(self, path: Path, stream_index: int, line: Timeline, times: np.ndarray) -> None:
        self._line = line
        self._times = times
        self._run = Run(path, stream_index, line)
        self._enters = line.walk in ("seek", "skip")
        self._verdicts = np.zeros(len(times), dtype=np.uint8)
        places = np.searchsorted(line.resets, line.packet, side="right") - 1
        self._groups = line.key_of if self._enters else np.maximum(places, 0)
        self._came: dict[int, int] = {}
        self._kept: dict[int, av.VideoFrame] = {}

    def close(self) -> None:
        """Close the file."""
        self._run.feed.close()

    def knows_damaged(self, picture: int) -> bool:
        """Whether a picture has been found damaged."""
        return bool(self._verdicts[picture] == _DAMAGED)

    def bring(self, picture: int) -> tuple[int, av.VideoFrame] | None:
        """The picture if it is sound after all, else the sound one nearest in time.

        Returns:
            Its index and itself; None when no picture of the file is sound.
        """
        if not self._verdicts[picture]:
            self._survey(picture, picture)
        shown = self._nearest(picture)
        if shown is None:
            return None
        if shown not in self._kept:
            self._survey(shown, shown, again=True)
        frame = self._kept.get(shown)
        return None if frame is None else (shown, frame)

    def _nearest(self, picture: int) -> int | None:
        while True:
            open_ones = self._verdicts != _DAMAGED
            if open_ones[picture]:
                return picture
            before = np.flatnonzero(open_ones[:picture])[-1:]
            after = picture + np.flatnonzero(open_ones[picture:])[:1]
            both = np.concatenate([before, after])
            if not len(both):
                return None
            gaps = np.abs(self._times[both] - self._times[picture])
            candidate = int(both[np.argmin(gaps)])
            if self._verdicts[candidate] == _SOUND:
                return candidate
            self._survey(candidate, picture)

    def _survey(self, member: int, near: int, *, again: bool = False) -> None:
        """Find out which pictures of a group are sound; keep those that lie nearest to one."""
        group = int(self._groups[member])
        members = np.flatnonzero(self._groups == group)
        self._kept = {}
        if self._enters:
            self._judge_group(group, near, 0)
            withheld = self._line.packet[members[self._verdicts[members] == 0]]
            if group and not set(withheld.tolist()) <= self._run.refused:
                self._judge_group(group, near, RUN_UP_KEYS)
        else:
            self._judge_from_start(int(self._line.packet[members[-1]]), near, again)
        self._verdicts[members[self._verdicts[members] == 0]] = _DAMAGED

    def _judge_group(self, group: int, near: int, run_up: int) -> None:
        line, run = self._line, self._run
        run.is_running = False
        run.enter(int(line.keys[max(0, group - run_up)]))
        end = next_reset(line.resets, int(line.keys[group]), len(line.pts))
        leads = leading_packets(line.pts, line.resets, end)
        self._judge(near, int(leads[-1]) + 1 if len(leads) else end)
        if run.is_running:
            self._note(run.finish(), near)
        self._settle()

    def _judge_from_start(self, last: int, near: int, again: bool) -> None:
        if again:
            self._run.rewind()
        self._run.enter(0)
        self._judge(near, last + REORDER_PACKETS)
        self._settle()

    def _judge(self, near: int, stop: int) -> None:
        while self._run.is_running and self._run.feed.number < stop:
            self._note(self._run.step(), near)

    def _note(self, came: list[Came], near: int) -> None:
        for one in came:
            self._came[one.picture] = one.number
            if self._run.is_sound(one.number) and one.picture not in self._kept:
                before = one.picture < near
                rivals = [p for p in self._kept if p != near and (p < near) == before]
                if one.picture == near or all(
                    abs(one.picture - near) < abs(p - near) for p in rivals
                ):
                    for rival in rivals if one.picture != near else []:
                        del self._kept[rival]
                    self._kept[one.picture] = one.frame

    def _settle(self) -> None:
        """Judge what has come, now that all is known which may spoil it."""
        for picture, number in self._came.items():
            if self._run.is_sound(number):
                self._verdicts[picture] = _SOUND
            elif not self._verdicts[picture]:
                self._verdicts[picture] = _DAMAGED
            if self._verdicts[picture] == _DAMAGED:
                self._kept.pop(picture, None)
        self._came.clear()
