"""Docs that cannot drift: they are generated, or compared with what they speak of."""

import re
from pathlib import Path

import pytest

from tests.house.examples import commands, run_example
from tests.house.reference import GENERATED
from tests.house.repo import ROOT, project_files, read

# A place on somebody's machine, or a package index that others reach by another name.
LOCAL = re.compile(
    r"(?<![\w.-])/(?:work|root|home|Users)/[\w.]|(?<![\w/-])share[d]/"
    r"|py[p]i\.org|pythonh[o]sted|registry\.npm[j]s|deb\.debian"
)


def section(text: str, heading: str) -> str:
    """The part of a Markdown text under a heading of the second level."""
    match = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"no section {heading}"
    return match.group(1)


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name: str):
    assert read(name) == GENERATED[name](), "run python -m tests.house.reference --write"


def test_the_readme_has_exactly_two_set_up_commands():
    commands = fenced(section(read("README.md"), "Set up"), "sh")
    assert [command.count("\n") for command in commands] == [1, 1]
    assert "pip install . && apollo ask examples/toybox.mp4" in commands[0]
    assert commands[1].rstrip().endswith('pip install -e ".[dev]" && pytest')


@pytest.mark.slow
@pytest.mark.parametrize("arguments", commands(read("README.md")))
def test_the_examples_of_the_readme_end_as_shown(arguments: str):
    code, told = run_example(arguments)
    shown = commands(read("README.md"))[arguments]
    assert code == 0
    # Files are told as soon as each is known.
    assert sorted(told.splitlines()) == sorted(shown.splitlines())


def lines_of_text(path: Path) -> list[str]:
    """The lines of a file; none if it is binary."""
    content = (ROOT / path).read_bytes() if (ROOT / path).is_file() else b""
    try:
        return [] if b"\0" in content else content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return []


def test_no_text_names_a_place_on_somebodys_machine_or_a_package_index():
    named = [
        f"{path}:{number}"
        for path in project_files()
        for number, line in enumerate(lines_of_text(path), start=1)
        if LOCAL.search(line)
    ]
    assert named == []


@pytest.mark.parametrize(
    ("line", "local"),
    [
        ("open('/" + "home/ann/x.mp4')", True),
        ("see share" + "d/notes.md", True),
        (".github/workflows/ci.yml", False),
        ("a shared prefix / a root", False),
    ],
)
def test_the_search_for_local_places_finds_them(line: str, local: bool):
    assert bool(LOCAL.search(line)) is local


def test_links_between_the_docs_lead_somewhere():
    broken = []
    for path in (path for path in project_files() if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", read(str(path))):
            if "://" not in target and not (ROOT / path.parent / target).exists():
                broken.append(f"{path}: {target}")
    assert broken == []


def test_the_changelog_has_a_place_for_what_is_not_released_yet():
    assert "## Unreleased" in read("CHANGELOG.md")


def test_the_licence_is_apache_2():
    text = read("LICENSE")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert 'license = "Apache-2.0"' in read("pyproject.toml")


def test_the_page_for_agents_fits_on_a_screen():
    assert len(read("AGENTS.md").splitlines()) <= 60


ADDITIONS = read("docs/add.md").split("\n## ")[1:]


@pytest.mark.parametrize("addition", ADDITIONS, ids=[text.partition("\n")[0] for text in ADDITIONS])
def test_an_addition_touches_at_most_two_files_that_are_there(addition: str):
    (touched,) = re.findall(r"^Touches: (.*)\.$", addition, re.MULTILINE)
    places = touched.split(", ")
    assert 1 <= len(places) <= 2
    named = [place.strip("`") for place in places if place != "the file that uses it"]
    assert all((ROOT / place).is_file() for place in named)
    # Whatever else of the product the steps tell to change would be a further file.
    steps = re.findall(r"^(?:\d\. )?`([\w/]+\.py)`:", addition, re.MULTILINE)
    assert set(steps) == set(named)


def test_what_can_be_added_is_told():
    kinds = ("encoder", "sampler mode", "command", "format", "flag", "recipe key")
    assert all(any(kind in text.partition("\n")[0] for text in ADDITIONS) for kind in kinds)


def test_the_readme_fits_on_three_screens():
    assert len(read("README.md").splitlines()) <= 150
