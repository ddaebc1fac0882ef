"""The same coded pictures have the same times and pictures in every container that holds them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from apollo_cli.video.probe import probe
from tests.video.made import make_film, numbers, remux

X265 = "keyint=12:bframes=4:b-adapt=0:log-level=none"
UNEVEN = np.cumsum(np.random.default_rng(5).choice([1, 2, 30, 500, 7000], 40)).tolist()

STREAMS: dict[str, dict] = {
    "slides": {"fps": 1, "count": 40, "gop": 250},
    "slides with pyramids": {
        "fps": 1,
        "count": 40,
        "gop": 20,
        "options": {"x264-params": "bframes=8:b-adapt=0:b-pyramid=2"},
    },
    "a picture each ten seconds": {"fps": Fraction(1, 10), "count": 20, "gop": 8},
    "screen": {"ticks": UNEVEN, "tick": Fraction(1, 1000), "count": 40, "gop": 15},
    "screen in hevc": {
        "ticks": UNEVEN,
        "tick": Fraction(1, 1000),
        "count": 40,
        "codec": "libx265",
        "options": {"x265-params": X265},
    },
    "open groups": {
        "count": 40,
        "options": {"x264-params": "open-gop=1:bframes=5:b-pyramid=2:scenecut=0"},
        "gop": 12,
    },
    "two a second in mpeg-4": {"fps": 2, "count": 30, "codec": "mpeg4", "options": {"bf": "2"}},
}
# What else holds each: FLV knows no HEVC, and a transport stream lacks the header of MPEG-4.
HOLDERS = {
    "mkv": list(STREAMS),
    "mov": list(STREAMS),
    "ts": [name for name in STREAMS if "mpeg-4" not in name],
    "flv": ["slides", "slides with pyramids", "screen", "open groups"],
}


def read_all(path: Path) -> tuple[np.ndarray, list[int | None]]:
    """Times from the first picture on, and the numbers drawn into the pictures."""
    info = probe(path)
    assert not [fault for fault in info.warnings if "starts again" in fault]
    return info.times - info.times[0], numbers(info)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_the_same_in_every_container(tmp_path: Path, name: str):
    film = make_film(tmp_path / "film.mp4", **STREAMS[name])
    times, marks = read_all(film)
    assert marks == list(range(len(times)))
    for ending, names in HOLDERS.items():
        if name in names:
            others, same = read_all(remux(film, tmp_path / f"film.{ending}"))
            assert same == marks, ending
            assert others == pytest.approx(times, abs=1.1e-3), ending


def test_recordings_put_end_to_end_in_matroska_are_told(tmp_path: Path):
    film = make_film(tmp_path / "film.mp4", count=20, fps=5, gop=10)
    path = tmp_path / "twice.mkv"
    with av.open(str(path), "w", options={"avoid_negative_ts": "disabled"}) as written:
        copy = None
        for part in range(2):
            with av.open(str(film)) as read:
                stream = read.streams.video[0]
                copy = copy or written.add_stream_from_template(stream)
                for number, packet in enumerate(p for p in read.demux(stream) if p.size):
                    # Matroska keeps showing times only; the muxer wants the others to rise.
                    packet.dts = part * 20 + number - 1_000_000
                    packet.stream = copy
                    written.mux(packet)
    info = probe(path)
    assert info.times == pytest.approx(np.arange(40) / 5, abs=2e-3)
    assert any("starts again" in fault for fault in info.warnings)
