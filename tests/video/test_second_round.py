"""Files that were read wrongly once: right pictures at right times, and a word on what is odd."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.stream import VideoStream

from apollo_cli.errors import MediaError
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import describe_damage
from tests.cases import FOLDER
from tests.video.made import make_film, marked_frame, numbers, packets_of, read_marks

FLIPPED = [16, 44, *range(102, 120), *range(150, 180), *range(185, 210)]
# Name: number of pictures, those that are damaged, and a word of the warnings.
FILES: dict[str, tuple[int, list[int], str]] = {
    "concat_flv_size.flv": (60, [], "size or format changes"),
    "mjpeg_size_change.mkv": (60, [], "size or format changes"),
    "trail_zeros.mp4": (60, [], ""),
    "concat_ogv.ogv": (60, [], "starts again"),
    "c1_006_flip_ffv1.mkv": (30, [9, 10, 11], ""),
    "c1_004_flip_mjpeg.avi": (30, [27], ""),
    "drift_nonref_len.mp4": (900, [329], ""),
    "drift_ref_len.mp4": (900, list(range(331, 600)), ""),
    "bit_flips.mp4": (240, FLIPPED, ""),
    "intra_refresh_nostart.ts": (52, [], "the first 48 pictures can't be decoded"),
}
# What is drawn into the first picture; the last one's marks are all drawn alike.
FIRST_MARKS = {"intra_refresh_nostart.ts": 98}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_second_round_is_right_whole_and_singly(name: str):
    count, damaged, said = FILES[name]
    info = probe(FOLDER / name)
    assert info.frame_count == count
    assert said in " ".join(info.warnings)
    whole = read_marks(info)
    assert [k for k, seen in enumerate(whole) if seen.is_damaged] == damaged
    sound = np.setdiff1d(np.arange(count), damaged)
    for index, seen in enumerate(whole):
        nearest = np.abs(info.times[sound] - info.times[index]).min()
        assert abs(seen.seconds - info.times[index]) == pytest.approx(nearest)
        shown = int(np.argmin(np.abs(info.times - seen.seconds)))
        assert seen.number == shown + FIRST_MARKS.get(name, 0)
    for index in {0, count // 2, *range(5, count, max(7, count // 6)), *damaged[:2], count - 1}:
        assert read_marks(info, [index]) == [whole[index]], index


@pytest.mark.parametrize(
    ("seconds", "words"),
    [([0.9], r"1 of 30 .* is .*at 0.90 s.* it$"), ([0.3, 0.4], r"2 of 30 .* are .*0.30 s.*each$")],
)
def test_one_damaged_picture_is_not_told_as_the_first(seconds: list[float], words: str):
    info = probe(FOLDER / "c1_006_flip_ffv1.mkv")
    assert re.match(words, describe_damage(info, seconds, info.times))


def test_a_second_sample_description_is_followed_after_a_jump(tmp_path: Path):
    path = tmp_path / "two_descriptions.mp4"
    with (
        av.open(str(FOLDER / "concat_flv_size.flv")) as read,
        av.open(str(path), "w") as written,
    ):
        stream = read.streams.video[0]
        copy = written.add_stream_from_template(stream)
        packets = [packet for packet in read.demux(stream) if packet.size]
        later = [bytes(packet) for packet in packets[30:]]
        for number in range(330):
            packet = packets[number] if number < 60 else av.Packet(later[number % 30])
            packet.is_keyframe = packets[30 + number % 30 if number >= 60 else number].is_keyframe
            packet.pts = packet.dts = number
            packet.time_base, packet.stream = Fraction(1, 30), copy
            written.mux(packet)
    assert path.read_bytes().count(b"avcC") == 2
    info = probe(path)
    assert "size or format changes" in " ".join(info.warnings)
    for index in (29, 31, 250, 329):
        assert numbers(info, [index]) == [index if index < 30 else 30 + index % 30]


def test_a_header_that_is_sent_once_reaches_every_picture_behind_it(tmp_path: Path):
    path = tmp_path / "once.ts"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 160, 90, "yuv420p"
        for part, size in enumerate([(160, 90), (96, 64)]):
            encoder = av.CodecContext.create("libx264", "w")
            encoder.width, encoder.height = size
            encoder.pix_fmt, encoder.time_base, encoder.framerate = (
                "yuv420p",
                Fraction(1, 30),
                Fraction(30),
            )
            encoder.gop_size, encoder.options = 5, {"bf": "0", "x264-params": "scenecut=0"}
            packets = []
            for number in range(30):
                frame = marked_frame(30 * part + number, 0, size).reformat(format="yuv420p")
                frame.pts, frame.time_base = 30 * part + number, Fraction(1, 30)
                packets += encoder.encode(frame)
            for number, packet in enumerate([*packets, *encoder.encode()]):
                data = bytes(packet)
                if number and packet.is_keyframe:
                    data = data[data.rindex(b"\0\0\1\x65") :]
                bare = av.Packet(data)
                bare.pts, bare.dts, bare.time_base = packet.pts, packet.dts, Fraction(1, 30)
                bare.is_keyframe, bare.stream = packet.is_keyframe, stream
                container.mux(bare)
    info = probe(path)
    assert info.frame_count == 60
    assert "size or format changes" in " ".join(info.warnings)
    for index in (3, 29, 30, 37, 59):
        assert numbers(info, [index]) == [index]


def test_a_damaged_picture_without_heirs_is_lost_alone_in_mpeg_4_too(tmp_path: Path):
    path = make_film(tmp_path / "film.avi", gop=30, codec="mpeg4", options={"bf": "2", "b": "2M"})
    packets = packets_of(path)
    data = path.read_bytes()
    # The third packet is a B picture, since nothing is shown before the first.
    at = data.index(packets[2]) + 12
    path.write_bytes(data[:at] + b"\x55" * 12 + data[at + 12 :])
    seen = read_marks(probe(path))
    assert [k for k, one in enumerate(seen) if one.is_damaged] == [1]
    assert [one.number for one in seen] == [0, 0, *range(2, 60)]


def cut_index(data: bytes) -> bytes:
    return data[: data.rindex(b"moov") + 400]


def hold_still(data: bytes) -> bytes:
    # The rate of the first entry of the edit list.
    at = data.index(b"elst") + 20
    return data[:at] + bytes(4) + data[at + 4 :]


def twice(data: bytes) -> bytes:
    return data * 2


TOLD: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "another stream goes on": ("pid_change.ts", bytes, r"stream 1 holds the pictures from"),
    "which stream is read": ("pid_change.ts", bytes, "only picture stream 0 is read, not 1"),
    "lost bytes": ("i_ts_resync.ts", bytes, "data is lost in 2 places"),
    "a gap in the edits": ("edits_gap.mp4", bytes, "shows nothing for 2.00 s"),
    "a still in the edits": ("edits_gap.mp4", hold_still, "holds pictures"),
    "two mp4": ("cfr10_target.mp4", twice, "another file is stored behind the first"),
    "two flv": ("concat_flv_size.flv", twice, "another file is stored behind the first"),
    "encrypted": ("cenc_frag.mp4", bytes, "is encrypted"),
    "a cut index": ("cfr30.mp4", cut_index, "its index (moov) is cut"),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_is_not_read_is_told(tmp_path: Path, case: str):
    name, change, said = TOLD[case]
    path = tmp_path / name
    path.write_bytes(change((FOLDER / name).read_bytes()))
    try:
        told = probe(path).warnings
    except MediaError as error:
        told = (str(error),)
    assert said in " ".join(told)


@pytest.mark.parametrize(("degrees", "odd"), [(30, True), (90, False), (45, True), (180, False)])
def test_a_turn_by_no_right_angle_is_told(tmp_path: Path, degrees: int, odd: bool):
    def turn(stream: VideoStream) -> None:
        stream.set_display_rotation(degrees)

    info = probe(make_film(tmp_path / "turned.mp4", count=2, prepare=turn))
    assert any("right angle" in fault for fault in info.warnings) == odd


def test_sums_of_pictures_that_a_file_holds_are_looked_at(tmp_path: Path):
    sums = {"x265-params": "hash=1:log-level=none:bframes=2:b-adapt=0:keyint=20"}
    path = make_film(tmp_path / "sums.mp4", codec="libx265", options=sums, count=30)
    packets = packets_of(path)
    data = path.read_bytes()
    at = data.index(packets[5]) + 30
    path.write_bytes(data[:at] + b"\x55\xaa\x55" + data[at + 3 :])
    seen = read_marks(probe(path))
    assert any(one.is_damaged for one in seen)
    assert all((one.number == k) != one.is_damaged for k, one in enumerate(seen))
