"""What ``apollo doctor`` tells."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from apollo_cli.cli import main
from apollo_cli.commands import doctor


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path))


def test_the_report_names_versions_devices_choice_decoders_disk_and_models(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["torch"]
    assert report["devices"][-1]["device"] == "cpu"
    assert len(report["choice"]["reasons"]) == 3
    assert set(report["decoders"]) == {"PyAV", "decord"}
    assert report["disk"]["cache_free_bytes"] > 0
    assert report["models"]["apollo-nano"] == "embedded"
    assert report["problems"] == []


def test_a_missing_extra_says_how_to_install_it():
    text = doctor._extra("quant", {"bitsandbytes": None, "accelerate": "1.0"})
    assert text.startswith("without bitsandbytes; ")
    assert 'pip install "apollo-video-cli[quant]"' in text
    assert "--no-build-isolation" in doctor._extra("flash", {"flash-attn": None})


def test_the_plain_report_is_one_fact_a_line_on_stdout(capsys):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    names = {line.split("  ")[0] for line in out.splitlines()}
    assert {"apollo", "python", "torch", "chosen", "models", "memories", "model apollo-3b"} <= names


def test_a_needed_package_that_cannot_be_imported_is_a_problem_and_ends_with_6(
    capsys, monkeypatch: pytest.MonkeyPatch
):
    from apollo_cli import hardware

    whole = hardware.import_fault
    fault = "torch is installed but its import fails (libcudnn.so.9)"
    monkeypatch.setattr(
        hardware, "import_fault", lambda m, p: fault if m == "torch" else whole(m, p)
    )
    assert main(["doctor"]) == 6
    out = capsys.readouterr().out
    assert "problem" in out
    assert fault in out
    assert "chosen" not in out


def test_the_extras_are_those_of_the_package_with_all_that_they_need():
    path = Path(__file__).parents[1] / "pyproject.toml"
    extras = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    needed = {
        name: {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
        for name, requirements in extras.items()
        if name not in ("all", "dev")
    }
    assert {name: set(packages) for name, packages in doctor.EXTRAS.items()} == needed
