"""``models verify --quant`` and ``models quantize``, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from apollo_cli.cli import main
from tests import tiny
from tests.tiny import Tiny

pytest.importorskip("bitsandbytes", reason="the extra [quant] is not installed")

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("agree") / "checkpoint", Tiny())


@pytest.fixture
def models(capfd: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["models", *arguments])
        written = capfd.readouterr()
        return code, written.out, written.err

    return call


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_verify_says_how_far_fewer_bits_are_from_all(models: Call, checkpoint: Path, kind: str):
    code, out, _ = models("verify", str(checkpoint), "--quant", kind, "--json")
    assert code == 0
    found = json.loads(out)["agreement"]
    assert found["tokens"] == 6 * 24
    assert 0.7 < found["same"] <= 1
    assert 0 < found["distance"] < 0.2
    assert 0 < found["divergence"] < 0.2


def test_verify_tells_it_in_words_and_names_what_stayed_whole(models: Call, checkpoint: Path):
    code, out, err = models("verify", str(checkpoint), "--quant", "4bit")
    assert code == 0
    assert "% of 144 tokens are those of float32" in out
    assert "left whole" in err
    assert "q_proj" in err


def test_verify_without_the_option_compares_nothing(models: Call, checkpoint: Path):
    code, out, _ = models("verify", str(checkpoint), "--json")
    assert code == 0
    assert "agreement" not in json.loads(out)


def test_a_saved_model_is_used_like_any_folder(models: Call, checkpoint: Path, tmp_path: Path):
    target = tmp_path / "small"
    code, out, err = models("quantize", str(checkpoint), "--quant", "8bit", "-o", str(target))
    assert code == 0
    assert out == f"{target}\n"
    assert "14 layers in 8bit" in err
    code, out, _ = models("show", str(target), "--json")
    assert code == 0
    code, _, err = models("verify", str(target), "--quant", "8bit")
    assert code == 5
    assert "stored quantised" in err


def test_a_folder_that_exists_is_not_written_over(models: Call, checkpoint: Path, tmp_path: Path):
    code, out, err = models("quantize", str(checkpoint), "-o", str(tmp_path))
    assert (code, out) == (2, "")
    assert "exists" in err
