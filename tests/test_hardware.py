"""Which device, dtype and kernel is chosen, and what is refused."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from apollo_cli.errors import DeviceError
from apollo_cli.hardware import choose_device, flash_obstacle, import_fault, list_devices

HAS_CUDA = torch.cuda.is_available()
without_cuda = pytest.mark.skipif(HAS_CUDA, reason="says what happens without a CUDA device")


def test_each_part_of_the_choice_has_its_reason():
    choice = choose_device()
    assert [reason.split(" ")[0] for reason in choice.reasons] == ["device", "dtype", "attention"]
    assert f"device {choice.device}:" in choice.reasons[0]
    assert f"dtype {choice.dtype}:" in choice.reasons[1]
    assert f"attention {choice.attention}:" in choice.reasons[2]


def test_a_cpu_runs_in_float32_unless_asked_otherwise():
    assert choose_device("cpu").dtype == "float32"
    assert choose_device("cpu", "auto") == choose_device("cpu")
    assert choose_device("cpu", "bf16").dtype == "bfloat16"
    assert choose_device("cpu", "torch.float16").dtype == "float16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tpu",), "allowed are auto, cpu, cuda, cuda:N and mps"),
        (("cuda:x",), "allowed are"),
        (("",), "allowed are"),
        (("cpu", "int8"), "allowed are auto, bfloat16, float16, float32"),
    ],
)
def test_what_cannot_be_met_is_refused_with_what_is_allowed(arguments: tuple, message: str):
    with pytest.raises(DeviceError, match=message):
        choose_device(*arguments)


@without_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device: str):
    with pytest.raises(DeviceError, match=f"device {device}: .*use --device cpu"):
        choose_device(device)


def test_flash_attention_needs_the_card_and_the_dtype():
    assert "compute capability 8.0, and this GPU has 7.5" in str(
        flash_obstacle("cuda:0", "float16", (7, 5))
    )
    assert flash_obstacle("cuda:0", "float32", (9, 0)) == "flash-attn has no float32"


def test_a_package_whose_import_breaks_is_as_good_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    reason = flash_obstacle("cuda:0", "bfloat16", (9, 0))
    assert reason is not None
    assert "installed but its import fails (undefined symbol: _ZN3c10)" in reason
    (tmp_path / "flash_attn.py").write_text("")
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    importlib.invalidate_caches()
    assert import_fault("no_such_module_at_all", "no-such") == "no-such is not installed"


def test_the_cpu_is_always_listed_last_with_its_memory():
    device = list_devices()[-1]
    assert device.device == "cpu"
    assert device.total_bytes is None or device.total_bytes > 1 << 28


@pytest.mark.gpu
def test_a_gpu_is_chosen_with_a_half_precision_dtype():
    if not HAS_CUDA and os.environ.get("APOLLO_REQUIRE_GPU") != "1":
        pytest.skip("no CUDA device")
    choice = choose_device()
    assert choice.device == "cuda:0"
    assert choice.dtype in ("bfloat16", "float16")
    with pytest.raises(DeviceError, match="there are"):
        choose_device("cuda:99")
