"""Files of kinds beyond the handed ones, made here: other encoders, containers and faults."""

from __future__ import annotations

import resource
import sys
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition
from av.video.stream import VideoStream

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import read_frames
from tests.cases import FOLDER
from tests.cases.marker import draw_marker, read_marker
from tests.video.made import make_film, marked_frame, numbers, read_marks, remux

X265 = {"x265-params": "open-gop=1:keyint=12:bframes=4:log-level=none"}
OPEN_GROUPS = {"x264-params": "open-gop=1:bframes=5:b-pyramid=2:scenecut=0"}
REFRESH = {"x264-params": "intra-refresh=1:keyint=20:bframes=2"}
B_PICTURES = {"bf": "3"}
PLENTY = {"b": "2M"}
ALTERNATE = {"auto-alt-ref": "1", "lag-in-frames": "16", "b": "200k", "cpu-used": "8"}
PRORES = {"codec": "prores_ks", "pixel_format": "yuv422p10le"}
UNEVEN = {"ticks": [k * k * 100 + k * 33 for k in range(60)], "tick": Fraction(1, 90000)}
BEFORE_ZERO = {
    "ticks": [k * 33 - 1000 for k in range(60)],
    "tick": Fraction(1, 1000),
    "mux": {"avoid_negative_ts": "disabled"},
}
FRAGMENT_EACH = {"movflags": "frag_every_frame+empty_moov"}
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}

KINDS: dict[str, dict] = {
    "hevc_open.mp4": {"codec": "libx265", "options": X265, "gop": 12},
    "hevc_open.ts": {"codec": "libx265", "options": X265, "gop": 12},
    "h264_open.mkv": {"options": OPEN_GROUPS, "gop": 12},
    "h264_open.ts": {"options": OPEN_GROUPS, "gop": 12},
    "refresh.mkv": {"options": REFRESH, "gop": 20},
    "refresh.ts": {"options": REFRESH, "gop": 20},
    "alternate_references_vp8.webm": {"codec": "libvpx", "options": ALTERNATE},
    "alternate_references_vp9.webm": {"codec": "libvpx-vp9", "options": ALTERNATE},
    "b_pictures.avi": {"options": B_PICTURES},
    "b_pictures.asf": {"options": B_PICTURES},
    "b_pictures.flv": {"options": B_PICTURES},
    "b_pictures.nut": {"options": B_PICTURES},
    "b_pictures_mpeg4.avi": {"codec": "mpeg4", "options": {"bf": "2", "b": "2M"}},
    "many_references.mp4": {"options": {"x264-params": "ref=16:bframes=8:b-adapt=0"}},
    "bare.h264": {"options": B_PICTURES, "file_format": "h264"},
    "bare.hevc": {"codec": "libx265", "options": X265, "file_format": "hevc"},
    "bare.mjpeg": {"codec": "mjpeg", "pixel_format": "yuvj420p", "file_format": "mjpeg"},
    "bare.m2v": {"codec": "mpeg2video", "options": PLENTY, "fps": 25, "file_format": "mpeg2video"},
    "mpeg2.vob": {"codec": "mpeg2video", "options": PLENTY | {"bf": "2"}, "fps": 25},
    "mpeg2.mxf": {"codec": "mpeg2video", "options": PLENTY, "fps": 25, "size": (192, 96)},
    "mpeg1.mpg": {"codec": "mpeg1video", "options": PLENTY | {"bf": "2"}, "fps": 25},
    "blu_ray.ts": {"options": B_PICTURES, "mux": {"mpegts_m2ts_mode": "1"}},
    "clock_of_ten_hours.ts": {"options": B_PICTURES, "mux": {"output_ts_offset": "36000"}},
    "clock_wraps.ts": {"options": B_PICTURES, "mux": {"output_ts_offset": "95442.8"}},
    "fragments.mp4": {"options": B_PICTURES, "mux": FRAGMENTS},
    "fragment_each.mp4": {"options": B_PICTURES, "mux": FRAGMENT_EACH},
    "no_edit_list.mp4": {"options": B_PICTURES, "mux": {"use_editlist": "0"}},
    "phone.3gp": {"codec": "h263", "options": PLENTY, "size": (176, 144)},
    "old.rm": {"codec": "rv10", "options": PLENTY, "size": (176, 144)},
    "prores.mov": PRORES,
    "prores_alpha.mov": PRORES | {"pixel_format": "yuva444p10le", "options": {"profile": "4444"}},
    "animation.mov": {"codec": "qtrle", "pixel_format": "rgb24"},
    "png.mov": {"codec": "png", "pixel_format": "rgba"},
    "raw.avi": {"codec": "rawvideo", "pixel_format": "bgr24"},
    "raw.y4m": {"codec": "rawvideo", "file_format": "yuv4mpegpipe"},
    "video1.avi": {"codec": "msvideo1", "pixel_format": "rgb555le", "size": (160, 88)},
    "screen.avi": {"codec": "zmbv", "pixel_format": "bgr0"},
    "deep_planes.mkv": {"codec": "ffv1", "pixel_format": "gbrp10le"},
    "interlaced.mp4": {"options": {"x264-params": "interlaced=1"}, "size": (160, 96)},
    "thousand_a_second.mkv": {"fps": 1000},
    "uneven.mp4": UNEVEN,
    "before_zero.mkv": BEFORE_ZERO | {"options": B_PICTURES},
}


def check_whole_and_singly(path: Path, count: int = 60) -> None:
    info = probe(path)
    assert numbers(info) == list(range(count))
    for index in np.random.default_rng(3).integers(0, count, 6).tolist():
        assert numbers(info, [index]) == [index]


@pytest.mark.parametrize("name", KINDS)
def test_further_kinds_read_right_in_order_and_singly(tmp_path: Path, name: str):
    check_whole_and_singly(make_film(tmp_path / name, **KINDS[name]))


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True)])
def test_every_display_matrix_is_followed(tmp_path: Path, degrees: int, flips: tuple[bool, bool]):
    def turn(stream: VideoStream) -> None:
        stream.set_display_rotation(degrees, *flips)

    info = probe(make_film(tmp_path / "turned.mp4", count=2, prepare=turn))
    (frame,) = read_frames(info, [0])
    want = np.rot90(draw_marker(0, 0, 160, 90), degrees // 90)
    want = want[:, ::-1] if flips[0] else want
    want = want[::-1] if flips[1] else want
    assert info.display_size == want.shape[::-1]
    assert np.array_equal(frame.rgb[..., 1] > 128, want > 128)


@pytest.mark.parametrize(("aspect", "width"), [(Fraction(8, 9), 142), (Fraction(100), 160)])
def test_pixel_aspect_is_applied_unless_absurd(tmp_path: Path, aspect: Fraction, width: int):
    def widen(stream: VideoStream) -> None:
        stream.sample_aspect_ratio = aspect

    info = probe(make_film(tmp_path / "wide.mp4", count=3, prepare=widen))
    assert info.display_size == (width, 90)
    (frame,) = read_frames(info, [0])
    assert frame.rgb.shape == (90, width, 3)


@pytest.mark.parametrize("transfer", ["smpte2084", "arib-std-b67"])
def test_hdr_is_mapped_to_a_picture_one_can_see(tmp_path: Path, transfer: str):
    params = f"log-level=none:colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc"
    path = make_film(
        tmp_path / "hdr.mp4",
        codec="libx265",
        pixel_format="yuv420p10le",
        options={"x265-params": params},
        count=10,
    )
    check_whole_and_singly(path, 10)
    info = probe(path)
    assert any("HDR" in warning for warning in info.warnings)
    (frame,) = read_frames(info, [0])
    assert frame.rgb.min() < 20
    assert frame.rgb.max() > 200


def test_the_default_stream_is_taken_or_the_one_that_was_asked_for(tmp_path: Path):
    path = tmp_path / "two.mkv"
    with av.open(str(path), "w") as container:
        streams = []
        for size in ((80, 46), (160, 90)):
            stream = container.add_stream("libx264", rate=30)
            assert isinstance(stream, VideoStream)
            stream.width, stream.height = size
            stream.pix_fmt = "yuv420p"
            streams.append(stream)
        streams[1].disposition = Disposition.default
        for stream in streams:
            for number in range(5):
                frame = marked_frame(number, 0, (stream.width, stream.height))
                frame.pts, frame.time_base = number, Fraction(1, 30)
                container.mux(stream.encode(frame.reformat(format="yuv420p")))
            container.mux(stream.encode())
    assert probe(path).display_size == (160, 90)
    assert probe(path, ReadingOptions(stream=0)).display_size == (80, 46)
    with pytest.raises(MediaError, match=r"--stream 7 of .*two.mkv; its picture streams are 0, 1"):
        probe(path, ReadingOptions(stream=7))


def cut(data: bytes) -> bytes:
    return data[: int(len(data) * 0.6)]


def zero_the_tail(data: bytes) -> bytes:
    return data[: int(len(data) * 0.75)].ljust(len(data), b"\0")


def lose_packets(data: bytes) -> bytes:
    units = [data[at : at + 188] for at in range(0, len(data), 188)]
    return b"".join(unit for number, unit in enumerate(units) if number not in (40, 41, 77))


def lose_the_start(data: bytes) -> bytes:
    return data[int(len(data) * 0.37) :]


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("film.mkv", cut, "the header promises"),
        ("film.webm", cut, "the header promises"),
        ("film.flv", cut, "the file ends early"),
        ("film.avi", cut, "the file ends early"),
        ("film.mp4", zero_the_tail, "the file has holes of zeros"),
        ("film.ts", lose_packets, "data is lost in 2 places"),
        ("film.ts", lose_the_start, "the file starts in a group"),
    ],
)
def test_damage_is_said_and_never_shown(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], said: str
):
    codec = {"film.webm": "libvpx", "film.avi": "mpeg4"}.get(name, "libx264")
    mux = {"movflags": "faststart"} if name.endswith("mp4") else None
    path = make_film(tmp_path / name, codec=codec, options=PLENTY, mux=mux)
    start = probe(path).clock_offset_seconds
    path.write_bytes(damage(path.read_bytes()))
    info = probe(path)
    assert any(said in warning for warning in info.warnings)
    assert 25 < info.frame_count < 60
    for seen in read_marks(info):
        assert seen.number is not None, "a broken picture was handed out"
        true_seconds = seen.seconds + info.clock_offset_seconds - start
        assert seen.number / 30 == pytest.approx(true_seconds, abs=2e-3)


def test_a_start_that_cannot_be_decoded_is_left_out(tmp_path: Path):
    whole = make_film(tmp_path / "whole.ts", codec="libx265", gop=12, options=X265)
    info = probe(remux(whole, tmp_path / "late.ts", lambda keys, _: keys > 1))
    assert any("can't be decoded" in warning for warning in info.warnings)
    assert numbers(info) == list(range(12, 60))


SCRIPT = r"is .*, not a video"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"ffconcat version 1.0\nfile 'FILM'\n", SCRIPT),
        (b"file 'FILM'\n", ""),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nFILM\n", SCRIPT),
        (b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n", ""),
        (bytes(100_000), ""),
        (b"\0", ""),
        (b"\x1aE\xdf\xa3" * 50, ""),
        (b"RIFF\0\0\0\0AVI ", ""),
    ],
)
def test_scripts_and_rubbish_are_one_line_and_open_no_other_file(
    tmp_path: Path, data: bytes, said: str
):
    path = tmp_path / "thing.mp4"
    path.write_bytes(data.replace(b"FILM", bytes(FOLDER / "cfr30.mp4")))
    with pytest.raises(MediaError, match=rf"thing.mp4.*{said}"):
        probe(path)


def test_an_hour_is_read_in_flat_memory(tmp_path: Path):
    path = tmp_path / "hour.mp4"
    with av.open(str(FOLDER / "cfr10_target.mp4")) as source, av.open(str(path), "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        second = [bytes(p) for p in source.demux(stream) if p.size]
        for number in range(3600 * 10):
            packet = av.Packet(second[number % 10])
            packet.pts = packet.dts = number
            packet.duration, packet.time_base = 1, Fraction(1, 10)
            packet.is_keyframe = number % 10 == 0
            packet.stream = copy
            target.mux(packet)
    info = probe(path)
    assert info.frame_count == 36_000
    assert info.duration_seconds == pytest.approx(3600)
    (last,) = read_frames(info, [3598.45])
    assert last.seconds == pytest.approx(3598.4)
    tracemalloc.start()
    wanted = np.arange(0.3, 3600, 15)
    for frame in read_frames(info, wanted):
        mark = read_marker(frame.rgb)
        assert mark is not None
        assert mark.number == np.rint(frame.seconds * 10) % 10
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 2**20


def test_fast_reading_gives_true_key_pictures_and_says_their_times():
    info = probe(FOLDER / "open_gop_b.mp4")
    frames = {
        f.position: f for f in read_frames(info, [0.0, 1.1, 1.9, 5.9], ReadingOptions(fast=True))
    }
    assert [frames[k].seconds for k in range(4)] == pytest.approx([0, 1, 2, 5])
    for frame in frames.values():
        mark = read_marker(frame.rgb)
        assert mark is not None
        assert mark.number == np.rint(frame.seconds * 24)


@pytest.mark.skipif(sys.platform != "linux", reason="counts in the units of Linux")
def test_thousands_of_openings_leak_neither_handles_nor_memory():
    info = probe(FOLDER / "cfr10_target.mp4")

    def open_often(count: int) -> None:
        for _ in range(count):
            next(iter(read_frames(info, [0.3])))

    open_often(50)
    handles = len(list(Path("/proc/self/fd").iterdir()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    open_often(400)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(list(Path("/proc/self/fd").iterdir())) <= handles + 1
    assert after - before < 8 * 1024
