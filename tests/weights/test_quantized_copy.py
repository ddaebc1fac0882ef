"""``models quantize``, as a user types it."""

from __future__ import annotations

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


def test_a_saved_model_is_used_like_any_folder(models: Call, checkpoint: Path, tmp_path: Path):
    target = tmp_path / "small"
    code, out, err = models("quantize", str(checkpoint), "--quant", "8bit", "-o", str(target))
    assert code == 0
    assert out == f"{target}\n"
    assert "14 layers in 8bit" in err
    assert models("show", str(target), "--json")[0] == 0
    assert models("verify", str(target))[0] == 0


def test_a_folder_that_exists_is_not_written_over(models: Call, checkpoint: Path, tmp_path: Path):
    code, out, err = models("quantize", str(checkpoint), "-o", str(tmp_path))
    assert (code, out) == (2, "")
    assert "exists" in err
