"""One import package from several folders, and a wheel that holds all of it and no more."""

import importlib
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.house.repo import ROOT, SOURCE_FOLDERS, project_files, read

MAPPED = ("weights", "ui", "finetune")
SHIPPED_SUFFIXES = {".py", ".toml", ".json", ".safetensors", ".md", ".txt", ".css", ".js"}


def installed_path(path: Path) -> Path:
    """Where a file of the project lies once it is installed."""
    return Path("apollo_cli") / path if path.parts[0] in MAPPED else path


def package_files() -> list[Path]:
    return [
        path
        for path in project_files()
        if path.parts[0] in SOURCE_FOLDERS and not (ROOT / path).is_symlink()
    ]


def test_the_package_list_equals_the_folders_on_disk():
    listed = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["packages"]
    on_disk = {
        ".".join(installed_path(path).parent.parts)
        for path in package_files()
        if path.suffix == ".py"
    }
    assert set(listed) == on_disk
    assert len(listed) == len(set(listed))


def test_each_mapped_folder_has_a_relative_link_inside_the_package():
    for name in (name for name in MAPPED if (ROOT / name).is_dir()):
        link = ROOT / "apollo_cli" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_a_mapped_folder_refuses_to_be_imported_by_its_bare_name(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in (name for name in MAPPED if (ROOT / name).is_dir()):
        with pytest.raises(ImportError, match=f"apollo_cli.{name}"):
            importlib.import_module(name)


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> set[str]:
    """Names in a wheel built by way of an sdist from exactly the files of the project."""
    source = tmp_path_factory.mktemp("source")
    for path in project_files():
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_symlink():
            target.symlink_to((ROOT / path).readlink())
        else:
            target.write_bytes((ROOT / path).read_bytes())
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(wheel_names):
    expected = {
        installed_path(path).as_posix()
        for path in package_files()
        if path.suffix in SHIPPED_SUFFIXES or path.name == "py.typed"
    }
    inside = {name for name in wheel_names if name.startswith("apollo_cli/")}
    assert inside == expected


@pytest.mark.slow
def test_nothing_else_lands_in_site_packages(wheel_names):
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"apollo_cli"}
    assert len(tops) == 2


@pytest.mark.slow
def test_the_wheel_brings_the_licence(wheel_names):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
