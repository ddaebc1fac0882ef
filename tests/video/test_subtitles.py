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


# What people say in subtitles, and the encodings in which files of the language are found.
SPEECH: dict[str, tuple[list[str], str]] = {
    "ru": (
        ["cp1251", "koi8-r", "cp866"],
        "Я был дома. Смотрел фильм о войне. Почему ты мне не позвонил? Извини, я совсем "
        "забыл. Ничего страшного, поговорим завтра.",
    ),
    "de": (
        ["cp1252"],
        "Ich war zu Hause. Schöner Film über den Krieg. Warum hast du mich nicht angerufen? "
        "Müde? Entschuldigung, das hätte ich fast vergessen. Macht nichts, wir sprechen "
        "später darüber.",
    ),
    "fr": (
        ["cp1252"],
        "J'étais à la maison. Un film sur la guerre. Pourquoi tu ne m'as pas appelé ? Désolé, "
        "j'ai complètement oublié. Ça ne fait rien, on en parlera demain, c'est noté.",
    ),
    "pl": (
        ["cp1250", "iso8859-2"],
        "Byłem w domu. Oglądałem film o wojnie. Dlaczego do mnie nie zadzwoniłeś? "
        "Przepraszam, całkiem zapomniałem. Nic się nie stało, pogadamy jutro, dobrze?",
    ),
    "el": (
        ["cp1253"],
        "Ήμουν στο σπίτι. Έβλεπα μια ταινία για τον πόλεμο. Γιατί δεν με πήρες τηλέφωνο; "
        "Συγγνώμη, το ξέχασα εντελώς. Δεν πειράζει, θα τα πούμε αύριο.",
    ),
    "ar": (
        ["cp1256"],
        "كنت في البيت. شاهدت فيلما عن الحرب. لماذا لم تتصل بي؟ آسف، لقد نسيت تماما. لا بأس، "
        "سنتحدث غدا.",
    ),
    "ja": (
        ["shift_jis", "euc_jp"],
        "家にいたよ。戦争の映画を見ていた。 どうして電話してくれなかっ"
        "たの? ごめん、すっかり忘れていた。 大丈夫、また明日話そう。",
    ),
    "zh": (
        ["gbk"],
        "我在家里,看了一部关于战争的电影。 你为什么不给我打电"
        "话? 对不起,我完全忘记了。 没关系,我们明天再说吧。",
    ),
    "ko": (
        ["euc_kr"],
        "집에 있었어. 전쟁 영화를 봤어. 왜 나한테 전화하지 않았어?"
        " 미안해, 완전히 잊어버렸어. 괜찮아, 내일 다시 이야기하자.",
    ),
}
UNICODE = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]


LATIN = ["cp1250", "cp1252", "cp1254"]


def as_srt(text: str) -> str:
    lines = [text[k : k + 60] for k in range(0, len(text), 60)]
    return "".join(
        f"{k}\n00:00:{k:02},000 --> 00:00:{k:02},900\n{line}\n\n" for k, line in enumerate(lines, 1)
    )


@pytest.mark.parametrize("language", SPEECH)
def test_letters_are_right_in_every_encoding_of_a_language(tmp_path: Path, language: str):
    encodings, speech = SPEECH[language]
    for encoding in (*UNICODE, *encodings):
        path = tmp_path / f"{language}.srt"
        path.write_bytes(as_srt(speech * 3).encode(encoding))
        notes: list[str] = []
        found = read_subtitles(path, notes=notes)
        is_right = "".join("".join(s.text for s in found).split()) == "".join((speech * 3).split())
        if encoding in UNICODE:
            assert is_right
            assert notes == []
        else:
            assert f"{language}.srt" in notes[0]
            # Encodings of Latin letters differ in few of them.
            assert is_right or encoding in LATIN, encoding


def test_an_encoding_that_nothing_gives_away_is_told_as_a_guess(tmp_path: Path):
    (tmp_path / "short.srt").write_bytes(as_srt("naïve").encode("cp1252"))
    notes: list[str] = []
    (line,) = read_subtitles(tmp_path / "short.srt", notes=notes)
    assert line.text
    assert "taken for" in notes[0]


def test_damaged_utf_8_stays_utf_8(tmp_path: Path):
    data = as_srt(SPEECH["ru"][1]).encode().replace("м".encode(), b"\xd0?", 1)
    (tmp_path / "a.srt").write_bytes(data)
    notes: list[str] = []
    found = read_subtitles(tmp_path / "a.srt", notes=notes)
    assert "Извини" in "".join(line.text for line in found)
    assert "1 characters" in notes[0]


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
