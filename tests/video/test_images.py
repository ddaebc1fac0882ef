"""Single images, animations and folders of images take the same path as videos."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apollo_cli.config import ReadingOptions
from apollo_cli.errors import MediaError
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import check_pictures, describe_damage, read_frames
from tests.cases import FOLDER
from tests.cases.marker import draw_marker
from tests.video.made import numbers, read_marks

MARKED = [Image.fromarray(draw_marker(number, 0, 160, 90)) for number in range(12)]
RAMP = np.tile(np.linspace(0, 1, 256), (8, 1))
COLOURS = ("RGB", "RGBA", "RGBX", "RGBa", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV")
TWO_A_SECOND = ReadingOptions(image_fps=2)


def only_picture(path: Path) -> np.ndarray:
    (frame,) = read_frames(probe(path), [0.0])
    return frame.rgb


def flip_checksum(path: Path) -> Path:
    """Damage a PNG in a way that Pillow passes over."""
    data = bytearray(path.read_bytes())
    data[data.rindex(b"IEND") - 6] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_animations_are_videos(tmp_path: Path, suffix: str):
    path = tmp_path / f"moving.{suffix}"
    first, *others = [picture.convert("RGB") for picture in MARKED]
    first.save(path, save_all=True, append_images=others, duration=100, lossless=True)
    info = probe(path)
    assert (info.kind, info.warnings) == ("video", ())
    assert info.times == pytest.approx(np.arange(12) / 10)
    assert info.duration_seconds == pytest.approx(1.2)
    for wanted in (range(12), [7], [11, 0]):
        assert numbers(info, wanted) == list(wanted)


def test_the_default_picture_of_an_apng_is_no_part_of_the_animation():
    info = probe(FOLDER / "apng_default.png")
    assert (info.frame_count, info.kind, info.warnings) == (12, "video", ())
    assert numbers(info) == list(range(12))


@pytest.mark.parametrize("suffix", ["gif", "png"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
def test_the_sound_start_of_a_cut_animation_is_read_and_the_cut_is_told(
    tmp_path: Path, suffix: str, share: float
):
    path = tmp_path / f"cut.{suffix}"
    MARKED[0].save(path, save_all=True, append_images=MARKED[1:], duration=100)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    info = probe(path)
    assert 2 <= info.frame_count <= 12
    assert any("cut" in warning for warning in info.warnings)
    assert numbers(info) == list(range(info.frame_count))


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "CMYK", "LA", "1", "I;16"])
def test_stills_of_every_colour_mode_are_read(tmp_path: Path, mode: str):
    path = tmp_path / ("still.tif" if mode == "CMYK" else "still.png")
    deep = Image.fromarray(np.asarray(MARKED[3]).astype(np.uint16) * 257)
    (deep if mode == "I;16" else MARKED[3].convert(mode)).save(path)
    info = probe(path)
    assert (info.kind, info.frame_count, info.duration_seconds) == ("image", 1, 0)
    assert only_picture(path).shape == (90, 160, 3)
    assert numbers(info) == [3]


@pytest.mark.parametrize(("order", "is_inverted"), [(">u2", 0), ("<u2", 0), ("<u2", 1)])
def test_gray_levels_of_16_bits_become_a_ramp(tmp_path: Path, order: str, is_inverted: int):
    path = tmp_path / "deep.tif"
    Image.fromarray((RAMP * 65535).astype(order)).save(path, tiffinfo={262: 1 - is_inverted})
    ramp = np.arange(256)[:, None]
    want = 255 - ramp if is_inverted else ramp
    assert np.abs(only_picture(path)[4].astype(int) - want).max() <= 1


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.float32, np.uint8, np.uint16])
def test_gray_levels_without_a_fixed_range_are_refused(tmp_path: Path, kind: type):
    path = tmp_path / "deep.tif"
    pixels = (RAMP * 100).astype(kind)
    image = Image.fromarray(pixels.view(np.int32) if kind is np.uint32 else pixels)
    image.save(path, tiffinfo={339: 1} if kind is np.uint32 else {339: 2})
    with pytest.raises(MediaError, match=r"deep.tif"):
        probe(path)


@pytest.mark.parametrize("suffix", ["tif", "png", "jpg", "webp", "bmp", "gif", "avif"])
@pytest.mark.parametrize(
    "mode", ["RGB", "RGBA", "RGBX", "RGBa", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV"]
)
def test_a_colour_stays_that_colour_in_every_mode_that_a_file_holds(
    tmp_path: Path, mode: str, suffix: str
):
    path = tmp_path / f"still.{suffix}"
    red = Image.new("RGB", (32, 16), (204, 51, 0))
    try:
        (red.convert("RGBA") if mode == "RGBa" else red).convert(mode).save(path)
        rgb = only_picture(path)
    except (OSError, ValueError, MediaError):
        # Pillow does not write the mode, or has written what it cannot read.
        return
    assert np.abs(rgb.astype(int) - (204, 51, 0)).max() <= 12
    assert probe(path).warnings == ()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "I;16"])
def test_a_colour_that_stands_for_nothing_is_black(tmp_path: Path, mode: str):
    gray = (np.tile(np.arange(2) * 255, (4, 2))).astype(np.uint8)
    deep = Image.fromarray(gray.astype(np.uint16) * 257)
    picture = deep if mode == "I;16" else Image.fromarray(gray).convert("RGB").convert(mode)
    picture.save(tmp_path / "hole.png", transparency=picture.getpixel((1, 0)))
    assert not only_picture(tmp_path / "hole.png").any()


def test_transparent_pixels_are_black(tmp_path: Path):
    pixels = np.full((4, 4, 4), 200, dtype=np.uint8)
    pixels[..., 3] = [0, 255, 128, 255]
    Image.fromarray(pixels, "RGBA").save(tmp_path / "glass.png")
    assert only_picture(tmp_path / "glass.png")[0, :, 0].tolist() == [0, 200, 100, 200]


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_turn_of_a_photo_is_followed(tmp_path: Path, suffix: str, orientation: int):
    upright = np.asarray(MARKED[3])
    # What a camera stores, so that turning it as the number says gives the picture.
    stored = upright[:, ::-1] if orientation in (2, 4, 5, 7) else upright
    quarters = {3: 2, 4: 2, 5: 1, 8: 3, 6: 1, 7: 3}.get(orientation, 0)
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(stored, quarters)))
    exif = turned.getexif()
    exif[0x0112] = orientation
    path = tmp_path / f"photo.{suffix}"
    turned.save(path, exif=exif, quality=95)
    info = probe(path)
    assert (info.stored_size, info.display_size) == (turned.size, (160, 90))
    assert numbers(info) == [3]


def test_what_is_odd_about_an_image_is_told(tmp_path: Path):
    MARKED[3].save(tmp_path / "photo.webp", exif=b"Exif\0\0no such thing", quality=95)
    MARKED[3].save(tmp_path / "pages.tif", save_all=True, append_images=[MARKED[0].copy()])
    MARKED[3].save(tmp_path / "film.mp4", "PNG")
    for name, word in (("photo.webp", "EXIF"), ("pages.tif", "pages"), ("film.mp4", "png")):
        info = probe(tmp_path / name)
        assert word in info.warnings[0]
        assert numbers(info) == [3]


def test_a_cut_photo_is_an_error(tmp_path: Path):
    MARKED[0].resize((640, 360)).save(tmp_path / "cut.jpg")
    data = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(MediaError, match=r"cut.jpg is a damaged image"):
        only_picture(tmp_path / "cut.jpg")


@pytest.mark.parametrize("name", ["c1_010_flip_photo.jpg", "flipped.png"])
def test_damage_that_pillow_passes_over_is_told_and_strict_reading_stops(tmp_path: Path, name: str):
    path = FOLDER / name
    if name == "flipped.png":
        MARKED[0].save(tmp_path / name)
        path = flip_checksum(tmp_path / name)
    info = probe(path)
    (frame,) = read_frames(info, [0.0])
    assert list(frame.damaged) == check_pictures(info) == [0.0]
    assert "damaged" in describe_damage(info, frame.damaged, info.times)
    with pytest.raises(MediaError, match=name):
        list(read_frames(info, [0.0], ReadingOptions(strict=True)))


@pytest.mark.parametrize(
    "settings",
    [
        {"progressive": True},
        {"restart_marker_blocks": 3},
        {"subsampling": 0, "quality": 100},
        {"comment": b"x" * 999, "icc_profile": b"y" * 99_999},
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_sound_photo_is_not_called_damaged(tmp_path: Path, mode: str, settings: dict):
    path = tmp_path / "sound.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (91, 161, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path, **settings)
    path.write_bytes(path.read_bytes() + bytes(500))
    info = probe(path)
    assert (info.warnings, check_pictures(info)) == ((), [])


@pytest.mark.parametrize(
    ("brands", "word"),
    [(b"heic....mif1", "HEIC"), (b"mif1....heic", "HEIC"), (b"avif....", "avif")],
)
def test_a_photo_without_a_decoder_is_named(tmp_path: Path, brands: bytes, word: str):
    head = struct.pack(">I", 8 + len(brands)) + b"ftyp" + brands
    (tmp_path / "photo.avif").write_bytes(head + bytes(200))
    with pytest.raises(MediaError, match=word):
        probe(tmp_path / "photo.avif")


def test_an_image_of_the_most_pixels_takes_what_its_limit_says():
    code = (
        "import resource, numpy as np; from apollo_cli.video.probe import probe\n"
        "from apollo_cli.video.reader import read_clips\n"
        "from apollo_cli.video.transforms import PixelSpec\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000\n"
        "start, info = peak(), probe(__import__('sys').argv[1])\n"
        "black, none = (0, 0, 0), (1.0, 1.0, 1.0)\n"
        "specs = [PixelSpec(w, 224, w, black, none, none) for w in ('bicubic', 'bilinear')]\n"
        "list(read_clips(info, np.zeros((1, 4)), specs)); print(peak() - start)"
    )
    command = [sys.executable, "-c", code, str(FOLDER / "png8k.png")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, picture in enumerate(MARKED):
        picture.save(tmp_path / f"shot{number}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden.png").write_text("nor this")
    return tmp_path


def test_a_folder_of_images_is_a_video_in_the_order_of_their_numbers(folder: Path):
    with GuardedReader() as guard:
        info = guard.probe(folder, TWO_A_SECOND)
        facts = (info.frame_count, info.duration_seconds, info.source_fps, info.warnings)
        assert facts == (12, 6, 2, ())
        ours = [frame.rgb for frame in guard.read_frames(info, info.times)]
    assert numbers(info) == list(range(12))
    assert np.array_equal(ours, [frame.rgb for frame in read_frames(info, info.times)])


def test_a_folder_without_a_rate_or_with_anything_but_images_is_one_line(folder: Path):
    (folder / "none").mkdir()
    (folder / "page").mkdir()
    (folder / "page" / "shot3.png").write_text("<html>")
    for place, reading, said in (
        (folder, ReadingOptions(), r"is a folder; .*--image-fps"),
        (folder / "none", TWO_A_SECOND, "is a folder without images"),
        (folder / "page", TWO_A_SECOND, r"shot3.png is a web page"),
    ):
        with pytest.raises(MediaError, match=said):
            probe(place, reading)


def test_a_damaged_image_of_a_folder_is_told(folder: Path):
    flip_checksum(folder / "shot4.png")
    info = probe(folder, TWO_A_SECOND)
    assert [one.is_damaged for one in read_marks(info)] == [k == 4 for k in range(12)]
    assert check_pictures(info) == [2.0]
    assert "stands in" not in describe_damage(info, [2.0], info.times)


def test_what_is_odd_about_the_images_of_a_folder_is_told(folder: Path):
    small = MARKED[0].resize((80, 60))
    small.save(folder / "shot7.tif", save_all=True, append_images=[small.copy()])
    assert "shot7.tif: 2 pages" in " ".join(probe(folder, TWO_A_SECOND).warnings)
