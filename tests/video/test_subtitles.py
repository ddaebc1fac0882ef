"""Subtitles come with the right times and without markup, from files and from tracks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from apollo_cli.errors import MediaError
from apollo_cli.video.probe import probe
from apollo_cli.video.subtitles import (
    Subtitle,
    find_subtitles,
    read_subtitles,
    subtitles_between,
)
from tests.cases import FOLDER
from tests.video.made import make_talk

SRT = """1
00:00:01,000 --> 00:00:02,500
<i>Grüße</i>, {\\an8}a < b
second line

2
00:00:03,000 --> 00:00:04,000
Bye
"""
VTT = """WEBVTT

NOTE a remark

intro
00:01.000 --> 00:02.500 align:start
<v Bob>Grüße, <c.red>a</c> &lt; b</v>
second line

00:00:03.000 --> 00:00:04.000
Bye
"""
WANT = (Subtitle(1.0, 2.5, "Grüße, a < b second line"), Subtitle(3.0, 4.0, "Bye"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize(("name", "text"), [("a.srt", SRT), ("a.SRT", SRT), ("a.vtt", VTT)])
def test_files_are_read_in_each_encoding(tmp_path: Path, name: str, text: str, encoding: str):
    (tmp_path / name).write_bytes(text.replace("\n", "\r\n").encode(encoding))
    assert read_subtitles(tmp_path / name) == WANT


def test_a_file_with_the_name_of_the_video_is_found(tmp_path: Path):
    shutil.copyfile(FOLDER / "cfr30.mp4", tmp_path / "talk.mp4")
    info = probe(tmp_path / "talk.mp4")
    assert find_subtitles(info, "auto") == ()
    (tmp_path / "talk.srt").write_text(SRT, encoding="utf-8")
    assert find_subtitles(info, "auto") == WANT
    assert find_subtitles(info, "none") == ()
    assert find_subtitles(info, str(tmp_path / "talk.srt")) == WANT


def test_a_damaged_track_is_one_line_with_the_name_of_the_file(tmp_path: Path):
    path = make_talk(tmp_path / "talk.mkv")
    path.write_bytes(path.read_bytes().replace(b"<b>one</b>", b"\xff\xfe\xfd\xfc\xfb" * 2))
    info = probe(path)
    with pytest.raises(MediaError, match=r"talk\.mkv: its subtitle track is damaged"):
        find_subtitles(info, "auto")
    assert find_subtitles(info, "none") == ()


def test_a_text_track_follows_the_clock_of_the_pictures(tmp_path: Path):
    info = probe(make_talk(tmp_path / "talk.mkv"))
    assert info.clock_offset_seconds == pytest.approx(5)
    found = find_subtitles(info, "auto")
    assert [(s.start_seconds, s.end_seconds, s.text) for s in found] == [
        (pytest.approx(1), pytest.approx(2), "one"),
        (pytest.approx(3), pytest.approx(4), "two"),
    ]


def test_rolling_captions_are_joined(tmp_path: Path):
    lines = "".join(f"00:0{k}.000 --> 00:0{k + 1}.000\nsame\n\n" for k in range(3))
    (tmp_path / "a.vtt").write_text("WEBVTT\n\n" + lines)
    assert read_subtitles(tmp_path / "a.vtt") == (Subtitle(0, 3, "same"),)


def test_a_span_shows_what_overlaps_it():
    assert subtitles_between(WANT, 2.4, 3.0) == WANT[:1]
    assert subtitles_between(WANT, 2.5, 3.1) == WANT[1:]


@pytest.mark.parametrize("name", ["notes.txt", "empty.srt", "rubbish.vtt", "gone.srt"])
def test_what_holds_no_subtitle_is_one_line(tmp_path: Path, name: str):
    path = tmp_path / name
    if "gone" not in name:
        path.write_text("" if "empty" in name else "no times at all\n" * 4)
    with pytest.raises(MediaError, match=name):
        read_subtitles(path)
