"""What a name, a folder or a repository stands for."""

from pathlib import Path

import pytest

from apollo_cli.errors import WeightsError
from apollo_cli.weights.registry import known_models, resolve


def test_the_known_names_are_these():
    assert list(known_models()) == ["apollo-nano", "apollo-1.5b", "apollo-3b", "apollo-7b"]


def test_every_model_to_fetch_shows_both_licence_facts_a_size_and_its_shape():
    for entry in known_models().values():
        assert entry.licence
        if entry.repository is not None:
            assert entry.mirror_label
            assert entry.approximate_bytes
            assert entry.llm_shape
            assert entry.llm_shape.hidden_size % entry.llm_shape.heads == 0


def test_the_research_licence_of_the_middle_size_is_not_hidden():
    entry = known_models()["apollo-3b"]
    assert "no commercial use" in entry.licence
    assert "apache" not in known_models()["apollo-3b"].licence.lower()
    assert "Apache-2.0" in known_models()["apollo-1.5b"].licence


def test_a_known_name_is_found_in_any_case_and_with_a_revision():
    source = resolve("Apollo-3B@v1")
    assert (source.kind, source.name, source.revision) == ("hub", "apollo-3b", "v1")
    assert source.repository == "GoodiesHere/Apollo-LMMs-Apollo-3B-t32"


def test_the_embedded_model_is_a_folder_of_the_package():
    source = resolve("apollo-nano")
    assert source.kind == "embedded"
    assert source.folder is not None
    assert source.folder.name == "nano"
    with pytest.raises(WeightsError, match="has no revisions"):
        resolve("apollo-nano@main")


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert resolve(tmp_path).folder == tmp_path
    (tmp_path / "apollo-3b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("apollo-3b").kind == "hub"
    assert resolve("./apollo-3b").kind == "folder"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve("owner/name").kind == "folder"


@pytest.mark.parametrize(
    "text", ["owner/name", "owner/name@main", "https://huggingface.co/owner/name"]
)
def test_any_repository_is_taken(text: str):
    source = resolve(text)
    assert (source.kind, source.repository) == ("hub", "owner/name")
    assert source.revision == ("main" if "@" in text else None)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(WeightsError, match=r"did you mean apollo-3b.*known names are apollo-nano"):
        resolve("apollo3b")


@pytest.mark.parametrize(
    "text", ["", "nope", "./nope", "/nope/nope", "~nobody-here/x", "a/b/c", "a\0b", "x" * 9000]
)
def test_what_is_none_of_these_is_one_clear_line(text: str):
    with pytest.raises(WeightsError, match="known names are") as caught:
        resolve(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("revision", ["", "../main", "a b", "-x", "x;y"])
def test_a_revision_that_cannot_be_one_is_refused(revision: str):
    with pytest.raises(WeightsError, match="a branch, tag or commit is needed"):
        resolve(f"owner/name@{revision}")
