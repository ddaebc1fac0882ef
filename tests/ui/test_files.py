"""Only files under the allowed folders are opened, whatever the name looks like."""

import os
from pathlib import Path

import pytest

from apollo_cli.errors import UsageError
from apollo_cli.ui.files import AllowedFolders, UiForbidden


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a video in it, in a folder below, and one outside."""
    inside = tmp_path / "videos"
    (inside / "trip").mkdir(parents=True)
    for path in (inside / "a.mp4", inside / "trip" / "b.mkv", tmp_path / "secret.mp4"):
        path.write_bytes(b"x")
    return inside


@pytest.mark.parametrize(
    "text", ["a.mp4", "./a.mp4", "trip/../a.mp4", ' "a.mp4" ', "'a.mp4'", "../videos/a.mp4"]
)
def test_a_name_is_found_from_the_first_folder_on(place: Path, text: str):
    assert AllowedFolders([place]).resolve(text) == place / "a.mp4"


@pytest.mark.parametrize(
    "text",
    ["../secret.mp4", "trip/../../secret.mp4", "/etc/passwd", "/", "..", "~root/x", "/nowhere/x"],
)
def test_a_name_that_leads_outside_is_refused_whether_or_not_it_is_there(place: Path, text: str):
    with pytest.raises(UiForbidden, match=r"may not be opened here; allowed are .*--allow"):
        AllowedFolders([place]).resolve(text)


def test_a_folder_whose_name_only_starts_alike_is_outside(place: Path):
    twin = place.with_name("videos2")
    twin.mkdir()
    with pytest.raises(UiForbidden):
        AllowedFolders([place]).resolve(str(twin))


def test_a_link_is_judged_by_what_it_leads_to(place: Path):
    (place / "out.mp4").symlink_to("../secret.mp4")
    (place / "way").symlink_to("..")
    (place / "in.mp4").symlink_to("trip/b.mkv")
    (place / "loop").symlink_to("loop")
    files = AllowedFolders([place])
    for name in ("out.mp4", "way/secret.mp4", "way"):
        with pytest.raises(UiForbidden):
            files.resolve(name)
    assert files.resolve("in.mp4") == place / "trip" / "b.mkv"
    with pytest.raises(UsageError, match="no such file"):
        files.resolve("loop")


def test_an_allowed_folder_may_itself_be_a_link(place: Path):
    link = place.with_name("link")
    link.symlink_to(place)
    assert AllowedFolders([link]).resolve("a.mp4") == place / "a.mp4"
    assert AllowedFolders([link]).resolve(str(link / "a.mp4")) == place / "a.mp4"


@pytest.mark.parametrize("text", ["", "  ", "a\0b", "a\udcff\0"])
def test_what_is_no_path_is_a_plain_error(place: Path, text: str):
    with pytest.raises(UsageError, match=r"no file was named|not a usable path"):
        AllowedFolders([place]).resolve(text)


def test_a_file_that_was_named_at_the_start_is_allowed_by_itself(place: Path):
    secret = place.parent / "secret.mp4"
    files = AllowedFolders([place], files=[secret])
    assert files.resolve(str(secret)) == secret
    with pytest.raises(UiForbidden):
        files.resolve(str(secret.with_name("other.mp4")))


def test_an_upload_is_opened_by_the_exact_path_that_was_handed_over_and_by_nothing_else(
    place: Path, tmp_path: Path
):
    # Even where the folder of the uploads lies below an allowed one.
    uploads = place / "uploads"
    (uploads / "1f2e").mkdir(parents=True)
    dropped = uploads / "1f2e" / "c.mp4"
    dropped.write_bytes(b"x")
    (uploads / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    files = AllowedFolders([place], uploads=uploads)
    assert files.resolve_upload(str(dropped)) == dropped
    assert files.is_upload(dropped) and not files.is_upload(place / "a.mp4")
    for name in (uploads, dropped.parent, uploads / "link.mp4", place / "a.mp4", f"{dropped}/"):
        with pytest.raises(UiForbidden, match="upload it again"):
            files.resolve_upload(str(name))
    for name in (uploads, dropped.parent, dropped, "uploads/1f2e/c.mp4"):
        with pytest.raises(UiForbidden):
            files.resolve(str(name))
        with pytest.raises(UiForbidden):
            files.list_media(str(name))
    assert {entry.name for entry in files.list_media()[0]} == {"trip", "a.mp4"}


def test_sentences_name_uploads_without_where_they_lie(place: Path):
    files, inner = AllowedFolders([place], uploads=place / "uploads"), "0f" * 32
    for folder in (place / "uploads", Path("/tmp/apollo-ui-x_1/files"), Path("/tmp/apollo-ui-2")):
        assert (
            files.shorten(f"{folder}/{inner}/a b.mp4 is text; open x") == "a b.mp4 is text; open x"
        )
        assert files.shorten(f"{folder}/{inner} is no file") == "a folder of uploads is no file"
    others = f"{place}/{inner}/a.mp4 is text; /tmp/apollo/x and {inner}"
    assert files.shorten(others) == others


def test_a_file_whose_place_was_taken_by_a_link_is_noticed(place: Path):
    files = AllowedFolders([place])
    path = files.resolve("a.mp4")
    files.check_still(path)
    path.unlink()
    path.symlink_to(place.parent / "secret.mp4")
    with pytest.raises(UiForbidden, match="has become a link"):
        files.check_still(path)


def test_a_listing_shows_folders_and_likely_media_and_nothing_that_leads_outside(place: Path):
    for name in ("notes.txt", ".hidden.mp4", "Z.WEBM", "photo.jpg", "seen.apollo"):
        (place / name).write_bytes(b"xy")
    os.mkfifo(place / "pipe.mp4")
    (place / "out.mp4").symlink_to("../secret.mp4")
    (place / "gone.mp4").symlink_to("nowhere")
    (place / "in.mp4").symlink_to("trip/b.mkv")
    entries, is_cut = AllowedFolders([place]).list_media()
    names = ["trip", "a.mp4", "in.mp4", "photo.jpg", "Z.WEBM"]
    assert [entry.name for entry in entries] == names
    assert entries[0].is_folder and entries[-1].size_bytes == 2
    assert not is_cut


def test_a_listing_is_bounded(place: Path):
    for number in range(30):
        (place / f"{number}.mp4").touch()
    entries, is_cut = AllowedFolders([place]).list_media("", most=10)
    assert len(entries) == 10 and is_cut


def test_only_allowed_folders_are_listed(place: Path):
    files = AllowedFolders([place])
    assert [entry.name for entry in files.list_media("trip")[0]] == ["b.mkv"]
    with pytest.raises(UiForbidden):
        files.list_media("..")
    with pytest.raises(UsageError, match="is no folder"):
        files.list_media("a.mp4")


def test_a_name_cannot_break_out_of_its_line(place: Path):
    with pytest.raises(UiForbidden) as caught:
        AllowedFolders([place]).resolve("/x\nnote: all is well\x1b[2J")
    assert "\n" not in caught.value.message and "\x1b" not in caught.value.message
