"""What a browser plays is told by content; the rest gets a light preview with the same times."""

import os
import signal
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from apollo_cli.ui import previews
from apollo_cli.ui.encoding import look
from apollo_cli.ui.previews import Job, Previews
from apollo_cli.video.guard import child_environment
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import read_frames
from tests.cases.marker import read_marker
from tests.house.repo import ROOT, source_files
from tests.video.made import make_film
from tests.waiting import until

CASES = Path(__file__).resolve().parents[1] / "cases"


def wait_for(maker: Previews, path: Path) -> Job:
    """The job of a file, once it has ended."""
    job = maker.job(path)
    until(lambda: job.share == 1 or job.failure)
    return job


@pytest.fixture
def maker(tmp_path: Path):
    made = Previews(tmp_path / "previews")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "kind", "media_type", "reason"),
    [
        ("cfr30.mp4", "video", "video/mp4", ""),
        ("rot90.mp4", "video", "video/mp4", ""),
        ("vp8.webm", "video", "video/webm", ""),
        ("odd161x91.webm", "video", "video/webm", ""),
        ("photo.jpg", "image", "image/jpeg", ""),
        ("jpeg.mp4", "image", "image/jpeg", ""),
        ("hevc10.mp4", "video", "video/mp4", "browsers do not play hevc everywhere"),
        ("five_frames.webm", "video", "video/webm", "do not play gbrp pictures everywhere"),
        ("mjpeg.avi", "video", "video/mp4", "browsers do not open avi files"),
        ("h264_hi10.mkv", "video", "video/mp4", "browsers do not open matroska files"),
        ("cover_first.mp4", "video", "video/mp4", "would show another picture stream"),
        ("anim.gif", "video", "video/mp4", "an animation has no player"),
    ],
)
def test_what_plays_is_judged_by_content(name: str, kind: str, media_type: str, reason: str):
    seen = look(CASES / name)
    assert (seen["kind"], seen["type"]) == (kind, media_type)
    assert reason in seen["reason"] and bool(reason) == bool(seen["reason"])


def test_what_is_no_picture_is_told_by_the_child_and_looked_at_once(maker: Previews):
    seen = maker.look(CASES / "html_page.mp4")
    assert seen.kind == "none" and "is a web page" in seen.reason
    assert maker.look(CASES / "html_page.mp4") is seen
    assert maker.look(CASES / "nowhere.mp4").kind == "none"


def test_one_piece_says_where_children_find_the_package():
    texts = {path: (ROOT / path).read_text() for path in source_files()}
    named = [str(path) for path, text in texts.items() if "PYTHONPATH" in text]
    assert named == ["apollo_cli/video/guard.py"]
    root = Path(child_environment()["PYTHONPATH"].split(os.pathsep)[0])
    assert (root / "apollo_cli" / "ui" / "encoding.py").is_file()


def test_sound_that_no_browser_plays_needs_a_preview(tmp_path: Path):
    path = tmp_path / "ac3.mp4"
    with av.open(str(path), "w") as container:
        film = container.add_stream("libx264", rate=10)
        film.width, film.height, film.pix_fmt = 64, 64, "yuv420p"
        sound = container.add_stream("ac3", rate=48_000, layout="stereo")
        picture = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
        picture.pts = 0
        container.mux(film.encode(picture))
        container.mux(film.encode(None))
        samples = av.AudioFrame.from_ndarray(
            np.zeros((2, 4096), np.float32), format="fltp", layout="stereo"
        )
        samples.sample_rate, samples.pts = 48_000, 0
        container.mux(sound.encode(samples))
        container.mux(sound.encode(None))
    assert look(path)["reason"] == "browsers do not play ac3 sound"


def test_a_preview_is_light_plays_everywhere_and_keeps_every_time(maker: Previews, tmp_path: Path):
    # Pictures come in bursts with long pauses, as in a recording of a screen.
    ticks = [0, 1, 2, 30, 31, 32, 33, 90, 150, 151]
    source = make_film(
        tmp_path / "screen.mkv",
        size=(1280, 720),
        count=len(ticks),
        ticks=ticks,
        tick=Fraction(1, 30),
        codec="mpeg4",
    )
    job = wait_for(maker, source)
    assert (job.failure, job.share) == ("", 1.0)
    assert look(job.target) == {"kind": "video", "type": "video/mp4", "reason": ""}
    before, after = probe(source), probe(job.target)
    assert after.display_size == (854, 480)
    assert after.duration_seconds == pytest.approx(before.duration_seconds, abs=1 / 15)
    times = [0.0, 0.5, 0.99, 1.2, 2.9, 3.1, 4.9, 5.03]
    marks = [read_marker(frame.rgb) for frame in read_frames(before, times)]
    assert None not in marks
    assert [read_marker(frame.rgb) for frame in read_frames(after, times)] == marks


@pytest.mark.parametrize("name", ["rot90.mp4", "anim.gif", "ts_jump_back.ts", "offset5.mkv"])
def test_previews_of_odd_files_keep_size_and_length(maker: Previews, name: str):
    job = wait_for(maker, CASES / name)
    assert job.failure == ""
    before, after = probe(CASES / name), probe(job.target)
    assert after.display_size == before.display_size
    assert after.duration_seconds == pytest.approx(before.duration_seconds, abs=1 / 15 + 0.01)
    assert after.times[0] == 0


def test_sound_comes_along_at_its_time(maker: Previews):
    job = wait_for(maker, CASES / "edit_empty.mp4")
    with av.open(str(job.target)) as container:
        assert container.streams.audio[0].codec_context.name == "aac"
        ends = [
            float((p.pts + (p.duration or 0)) * p.time_base)
            for p in container.demux(audio=0)
            if p.pts is not None and p.time_base is not None
        ]
    assert max(ends) == pytest.approx(probe(CASES / "edit_empty.mp4").duration_seconds, abs=0.15)


def test_an_image_that_no_browser_shows_becomes_a_jpeg(maker: Previews, tmp_path: Path):
    from PIL import Image

    Image.new("RGB", (3000, 1000), "red").save(tmp_path / "scan.tiff")
    job = wait_for(maker, tmp_path / "scan.tiff")
    with Image.open(job.target) as image:
        assert (image.format, image.size) == ("JPEG", (1600, 533))


def test_a_preview_is_made_once_and_found_again_by_another_run(maker: Previews, tmp_path: Path):
    job = wait_for(maker, CASES / "hevc10.mp4")
    written = job.target.stat().st_mtime_ns
    other = Previews(tmp_path / "previews")
    assert other.job(CASES / "hevc10.mp4").share == 1.0
    assert job.target.stat().st_size > 0 and job.target.stat().st_mtime_ns >= written
    job.target.unlink()
    assert wait_for(maker, CASES / "hevc10.mp4").target.exists()
    # The other one only ever found it; once it is gone, it makes it anew.
    job.target.unlink()
    assert wait_for(other, CASES / "hevc10.mp4").target.exists()
    other.close()


def test_what_went_wrong_is_tried_again_when_the_file_is_opened_again(
    maker: Previews, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # As a disk that is full: what was to be a folder cannot be one.
    maker.folder.write_text("")
    job = wait_for(maker, CASES / "hevc10.mp4")
    assert job.failure.startswith("no preview could be written")
    maker.folder.unlink()
    assert maker.job(CASES / "hevc10.mp4") is job
    maker.forget_failure(CASES / "hevc10.mp4")
    assert wait_for(maker, CASES / "hevc10.mp4").failure == ""
    with monkeypatch.context() as patch:
        patch.setattr(previews, "_LOOK_SECONDS", 0.0)
        assert maker.look(CASES / "mjpeg.avi").reason == "mjpeg.avi could not be looked at"
    maker.forget_failure(CASES / "mjpeg.avi")
    assert maker.look(CASES / "mjpeg.avi").kind == "video"


def test_what_cannot_be_converted_is_told_and_leaves_nothing(maker: Previews):
    job = wait_for(maker, CASES / "encrypted.mp4")
    assert "is encrypted" in job.failure
    assert list(maker.folder.iterdir()) == []


def test_a_child_that_hangs_is_given_up(maker: Previews, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(previews, "_STALL_SECONDS", 0.0)
    assert wait_for(maker, CASES / "hevc10.mp4").failure == "it could not be converted"
    assert list(maker.folder.iterdir()) == []


def test_a_server_that_ends_leaves_no_half_of_a_preview(maker: Previews, tmp_path: Path):
    source = make_film(tmp_path / "long.mkv", size=(640, 360), count=400, codec="mpeg4")
    job = held(maker, source)
    maker.close()
    assert job.share < 1
    assert list(maker.folder.iterdir()) == []


def held(maker: Previews, source: Path) -> Job:
    """A preview that is begun and comes to no end, however fast the machine is."""
    job = maker.job(source)
    until(lambda: maker._child)
    assert maker._child is not None
    maker._child.send_signal(signal.SIGSTOP)
    assert job.share < 1
    return job


def long_film(path: Path) -> Path:
    return make_film(path, size=(640, 360), count=400, codec="mpeg4")


def test_the_preview_that_was_asked_for_last_comes_first(maker: Previews, tmp_path: Path):
    running = held(maker, long_film(tmp_path / "running.mkv"))
    names = ("mjpeg.avi", "hevc10.mp4", "anim.gif")
    first, second, third = (maker.job(CASES / name) for name in names)
    # Opened again, so it is the one that somebody looks for.
    maker.forget_failure(CASES / "mjpeg.avi")
    assert maker._waiting == [second, third, first]
    assert maker._child is not None
    maker._child.send_signal(signal.SIGCONT)
    for job in (first, third, second):
        assert job.share < 1
        wait_for(maker, job.source)
    assert (running.share, running.failure) == (1, "")


def test_the_preview_of_a_file_that_nobody_looks_at_any_more_is_stopped(
    maker: Previews, tmp_path: Path
):
    source = long_film(tmp_path / "long.mkv")
    view = {source, CASES / "hevc10.mp4"}
    maker.is_wanted = view.__contains__
    job, unseen = held(maker, source), maker.job(CASES / "mjpeg.avi")
    view.remove(source)
    assert wait_for(maker, CASES / "hevc10.mp4").share == 1
    assert job.share < 1 and unseen.share == 0 and job.failure == unseen.failure == ""
    assert [path.suffix for path in maker.folder.iterdir()] == [".mp4"]
    # Whoever comes back to it finds it being made anew.
    view.add(source)
    assert maker.job(source) is not job
    assert wait_for(maker, source).share == 1


def test_of_a_file_that_changes_only_the_last_state_gets_a_preview(maker: Previews, tmp_path: Path):
    source = long_film(tmp_path / "grows.mkv")
    job = held(maker, source)
    make_film(source, size=(64, 64), count=10, codec="mpeg4")
    assert wait_for(maker, source).share == 1
    assert job.is_dropped and job.share < 1
    assert list(maker.folder.iterdir()) == [maker.target(source)]


def test_the_folder_is_bounded_and_keeps_what_was_used_last(tmp_path: Path):
    maker = Previews(tmp_path / "previews", most_bytes=5000)
    # What somebody else put there is left alone, and stands in nobody's way.
    (maker.folder / "folder").mkdir(parents=True)
    (maker.folder / "folder" / "note.txt").write_text("x" * 6000)
    first = wait_for(maker, CASES / "mjpeg.avi")
    second = wait_for(maker, CASES / "hevc10.mp4")
    until(lambda: not first.target.exists())
    assert second.target.exists()
    assert wait_for(maker, CASES / "anim.gif").share == 1
    assert (maker.folder / "folder" / "note.txt").exists()
    maker.close()
