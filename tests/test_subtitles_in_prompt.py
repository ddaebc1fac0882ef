"""Subtitles stand where they were asked to, and are counted."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile

import pytest

from apollo_cli import engine
from apollo_cli.config import GenerationOptions, ReadingOptions
from apollo_cli.engine import Apollo
from tests import tiny
from tests.tiny import Tiny

CASES = Path(__file__).parent / "cases"
SHORT = GenerationOptions(max_new_tokens=4)
SRT = "1\n00:00:00,500 --> 00:00:01,500\nhello there\n\n2\n00:00:02,000 --> 00:00:03,000\nbye\n"


@pytest.fixture
def video(tmp_path: Path) -> Path:
    (tmp_path / "talk.srt").write_text(SRT)
    return Path(copyfile(CASES / "cfr30.mp4", tmp_path / "talk.mp4"))


@pytest.fixture(scope="module")
def apollo(tmp_path_factory: pytest.TempPathFactory) -> Apollo:
    folder = tiny.save(tmp_path_factory.mktemp("said") / "checkpoint")
    return engine.load(folder, use_cache=False)


def test_listed_subtitles_stand_before_the_question(apollo: Apollo, video: Path):
    memory = apollo.watch(video, reading=ReadingOptions(subtitles="auto"))
    told = apollo.prompts.tokenizer.decode(apollo.suffix_ids([memory], "what?"))
    assert told.strip() == (
        "This video's subtitles are listed below:\nhello there\nbye\nwhat? ASSISTANT:"
    )
    assert memory.describe()["subtitles"] == 2


def test_interleaved_subtitles_stand_with_the_clip_that_shows_them(apollo: Apollo, video: Path):
    reading = ReadingOptions(subtitles="auto", subtitle_style="interleaved")
    memory = apollo.watch(video, reading=reading)
    texts = apollo.prompts.visual_texts(memory.part)
    assert texts[0].endswith('0.0-1.5 seconds: "hello there" ')
    assert texts[1] == ',\n2.0-3.5 seconds: "bye" '


def test_a_guessed_encoding_is_among_the_warnings(apollo: Apollo, video: Path):
    said = "Где ты был вчера вечером? Почему ты мне не позвонил?"
    video.with_suffix(".srt").write_bytes(SRT.replace("hello there", said).encode("cp1251"))
    memory = apollo.watch(video, reading=ReadingOptions(subtitles="auto"))
    assert memory.spoken.subtitles[0].text == said
    warnings = memory.describe()["warnings"]
    assert [True for text in warnings if "talk.srt" in text and "cp1251" in text] == [True]


def test_without_being_asked_for_none_are_read(apollo: Apollo, video: Path):
    plain = apollo.watch(video)
    assert plain.spoken.subtitles == ()
    assert "hello" not in apollo.prompts.tokenizer.decode(apollo.suffix_ids([plain], "what?"))


@pytest.mark.parametrize("style", ["listed", "interleaved"])
def test_subtitles_take_their_share_of_the_budget(style, tmp_path: Path, video: Path):
    small = engine.load(tiny.save(tmp_path / "small", Tiny(context=400)), use_cache=False)
    long = Path(copyfile(CASES / "one_key_60s.mp4", tmp_path / "long.mp4"))
    lines = [
        f"{i + 1}\n00:00:{i:02},000 --> 00:00:{i:02},900\nword number {i}\n" for i in range(50)
    ]
    (tmp_path / "long.srt").write_text("\n".join(lines[:20]))
    bare = small.watch(long, reserve_tokens=40)
    reading = ReadingOptions(subtitles="auto", subtitle_style=style)
    told = small.watch(long, reserve_tokens=40, reading=reading)
    assert len(told) < len(bare)
    assert small.ask(told, "what?", SHORT).tokens.total <= 400
