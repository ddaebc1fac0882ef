"""Single images, animations and folders of images take the same path as videos."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apollo_cli.errors import MediaError
from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.limits import Limits
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import read_frames
from tests.cases import FOLDER
from tests.cases.marker import draw_marker, read_marker


def marked_image(number: int = 0, size: tuple[int, int] = (160, 90)) -> Image.Image:
    return Image.fromarray(draw_marker(number, 0, *size))


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_animations_are_videos(tmp_path: Path, suffix: str):
    path = tmp_path / f"moving.{suffix}"
    pictures = [marked_image(k).convert("RGB") for k in range(12)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100, lossless=True)
    info = probe(path)
    assert info.kind == "video"
    assert info.times == pytest.approx(np.arange(12) / 10)
    assert info.duration_seconds == pytest.approx(1.2)
    for wanted in (info.times, info.times[[7]], info.times[[11, 0]]):
        for frame in read_frames(info, wanted):
            mark = read_marker(frame.rgb)
            assert mark is not None
            assert mark.number == round(frame.wanted_seconds * 10)


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "CMYK", "LA", "1", "I;16"])
def test_stills_of_every_colour_mode_are_read(tmp_path: Path, mode: str):
    path = tmp_path / ("still.tif" if mode == "CMYK" else "still.png")
    if mode == "I;16":
        Image.fromarray(draw_marker(0, 0, 160, 90).astype(np.uint16) * 257).save(path)
    else:
        marked_image().convert(mode).save(path)
    info = probe(path)
    assert (info.kind, info.frame_count, info.duration_seconds) == ("image", 1, 0)
    (frame,) = read_frames(info, [0.0])
    mark = read_marker(frame.rgb)
    assert frame.rgb.shape == (90, 160, 3)
    assert mark is not None
    assert mark.turned == 0


def test_the_turn_of_a_photo_is_followed(tmp_path: Path):
    turned = Image.fromarray(np.rot90(draw_marker(0, 0, 160, 90)))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "photo.jpg", exif=exif, quality=95)
    info = probe(tmp_path / "photo.jpg")
    assert (info.stored_size, info.display_size) == ((90, 160), (160, 90))
    (frame,) = read_frames(info, [0.0])
    mark = read_marker(frame.rgb)
    assert mark is not None
    assert mark.turned == 0


def test_transparent_pixels_are_black(tmp_path: Path):
    pixels = np.full((4, 4, 4), 200, dtype=np.uint8)
    pixels[..., 3] = [0, 255, 128, 255]
    Image.fromarray(pixels, "RGBA").save(tmp_path / "glass.png")
    (frame,) = read_frames(probe(tmp_path / "glass.png"), [0.0])
    assert frame.rgb[0, :, 0].tolist() == [0, 200, 100, 200]


def test_a_cut_photo_is_an_error_and_a_huge_one_is_refused(tmp_path: Path):
    marked_image(size=(640, 360)).save(tmp_path / "cut.jpg")
    data = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(MediaError, match=r"cut.jpg is a damaged image"):
        list(read_frames(probe(tmp_path / "cut.jpg"), [0.0]))
    with pytest.raises(MediaError, match=r"photo.jpg has pictures of 320x180; allowed are 1,000"):
        probe(FOLDER / "photo.jpg", limits=Limits(max_pixels=1000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        marked_image(number).save(tmp_path / f"shot{number}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden.png").write_text("nor this")
    return tmp_path


def test_a_folder_of_images_is_a_video_in_the_order_of_their_numbers(folder: Path):
    info = probe(folder, image_fps=2)
    assert (info.frame_count, info.duration_seconds, info.source_fps) == (12, 6, 2)
    with GuardedReader() as guard:
        guarded = guard.probe(folder, image_fps=2)
        assert guarded.files == info.files
        for frames in (read_frames(info, info.times), guard.read_frames(guarded, info.times)):
            marks = [read_marker(frame.rgb) for frame in frames]
            assert [mark and mark.number for mark in marks] == list(range(12))


def test_a_folder_without_a_rate_or_without_images_is_one_line(folder: Path):
    with pytest.raises(MediaError, match=r"is a folder; .*--image-fps"):
        probe(folder)
    (folder / "none").mkdir()
    with pytest.raises(MediaError, match="is a folder without images"):
        probe(folder / "none", image_fps=1)
    (folder / "shot3.png").write_text("<html>")
    with pytest.raises(MediaError, match=r"shot3.png is a web page"):
        probe(folder, image_fps=1)
