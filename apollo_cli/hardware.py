"""One place that chooses device, dtype and attention kernel, and says why."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass

from apollo_cli.errors import DeviceError

SDPA, FLASH = "sdpa", "flash_attention_2"
DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
}
_AMPERE = (8, 0)
_DEVICE = re.compile(r"cpu|mps|cuda(?::(\d+))?", re.ASCII)
_ALLOWED_DEVICES = "allowed are auto, cpu, cuda, cuda:N and mps"


@dataclass(frozen=True)
class HardwareChoice:
    """Where and how a model runs.

    Attributes:
        device: as torch spells it: ``cpu``, ``mps`` or ``cuda:N``.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        attention: ``sdpa`` or ``flash_attention_2``.
        reasons: one short sentence for each of the three.
    """

    device: str
    dtype: str
    attention: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class DeviceInfo:
    """One device of this machine.

    Attributes:
        device: as torch spells it.
        name: of the product; empty when unknown.
        total_bytes: its memory; None when unknown.
        free_bytes: free memory; None when unknown.
        capability: CUDA compute capability; None for other devices.
    """

    device: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None


def choose_device(requested: str | None = None, dtype: str | None = None) -> HardwareChoice:
    """Choose device and dtype, and the fastest attention kernel that runs there.

    Args:
        requested: ``auto`` or None takes the best there is; else ``cpu``, ``cuda``, ``cuda:N``
            or ``mps``.
        dtype: ``auto`` or None takes what fits the device; else a name such as ``bfloat16``.

    Raises:
        DeviceError: something was asked for that is unknown or cannot be met.
    """
    device, why_device = _pick_device(None if requested == "auto" else requested)
    capability = _capability(device)
    name, why_dtype = _pick_dtype(device, capability, None if dtype == "auto" else dtype)
    obstacle = flash_obstacle(device, name, capability)
    if obstacle:
        kernel, why_kernel = SDPA, f"attention {SDPA}: torch's own kernel, since {obstacle}"
    else:
        kernel, why_kernel = FLASH, f"attention {FLASH}: flash-attn is installed and fits"
    return HardwareChoice(device, name, kernel, (why_device, why_dtype, why_kernel))


def _pick_device(requested: str | None) -> tuple[str, str]:
    import torch

    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if requested is None:
        if has_cuda:
            return "cuda:0", f"device cuda:0: {torch.cuda.get_device_name(0)} is there"
        if has_mps:
            return "mps", "device mps: the GPU of this Mac is there"
        return "cpu", f"device cpu: {_why_no_cuda()}"
    match = _DEVICE.fullmatch(requested)
    if match is None:
        raise DeviceError(f"device {requested[:40]!r}", _ALLOWED_DEVICES)
    if requested == "mps" and not has_mps:
        raise DeviceError("device mps: not there", "", "use --device cpu or leave it out")
    if requested.startswith("cuda"):
        if not has_cuda:
            raise DeviceError(
                f"device {requested}: {_why_no_cuda()}", "", "use --device cpu or leave it out"
            )
        index, count = int(match.group(1) or 0), torch.cuda.device_count()
        if index >= count:
            raise DeviceError(f"device {requested}: there are {count}", "the first is cuda:0")
        return f"cuda:{index}", f"device cuda:{index}: asked for"
    return requested, f"device {requested}: asked for"


def _why_no_cuda() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA"
    return "no CUDA device is there, or its driver is missing or too old for this torch"


def _capability(device: str) -> tuple[int, int] | None:
    if not device.startswith("cuda"):
        return None
    import torch

    return torch.cuda.get_device_capability(device)


def _pick_dtype(
    device: str, capability: tuple[int, int] | None, requested: str | None
) -> tuple[str, str]:
    if requested is not None:
        name = dtype_name(requested)
        if name == "bfloat16" and not _has_bfloat16(device, capability):
            raise DeviceError(f"dtype bfloat16: {device} has none", "", "use float16 or float32")
        return name, f"dtype {name}: asked for"
    if device == "cpu":
        return "float32", "dtype float32: the exact and usually fastest one on a CPU"
    if _has_bfloat16(device, capability):
        return "bfloat16", f"dtype bfloat16: {device} has it, and the released weights are in it"
    return "float16", f"dtype float16: {device} has no bfloat16"


def _has_bfloat16(device: str, capability: tuple[int, int] | None) -> bool:
    import torch

    if device == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    if capability is None or torch.version.hip is not None:
        return True
    return capability >= _AMPERE


def flash_obstacle(device: str, dtype: str, capability: tuple[int, int] | None) -> str | None:
    """Why FlashAttention-2 cannot run here; None when it can."""
    if not device.startswith("cuda"):
        return "flash-attn runs on CUDA devices only"
    if capability is not None and capability < _AMPERE:
        return "flash-attn needs compute capability 8.0, and this GPU has {}.{}".format(*capability)
    if dtype not in ("float16", "bfloat16"):
        return f"flash-attn has no {dtype}"
    return import_fault("flash_attn", "flash-attn")


def import_fault(module: str, package: str) -> str | None:
    """Why a package cannot be imported; None when it can.

    A package with a compiled part that does not match its surroundings is as good as missing;
    the reason is kept.
    """
    if importlib.util.find_spec(module) is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        text = " ".join(str(error).split())
        return f"{package} is installed but its import fails ({text[:160]})"
    return None


def package_version(package: str) -> str | None:
    """Version of an installed package, without importing it; None when it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def list_devices() -> list[DeviceInfo]:
    """All devices that torch can use here, the CPU last."""
    import torch

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            DeviceInfo(
                device=f"cuda:{index}",
                name=torch.cuda.get_device_name(index),
                total_bytes=total,
                free_bytes=free,
                capability=torch.cuda.get_device_capability(index),
            )
        )
    if torch.backends.mps.is_available():
        devices.append(DeviceInfo("mps", "GPU of this Mac, sharing its memory"))
    devices.append(DeviceInfo("cpu", f"{torch.get_num_threads()} threads", *host_memory_bytes()))
    return devices


def dtype_name(word: str) -> str:
    """The full name of a dtype such as ``bf16``.

    Raises:
        DeviceError: there is none of that name.
    """
    name = DTYPES.get(word.removeprefix("torch."))
    if name is None:
        allowed = ", ".join(["auto", *sorted(set(DTYPES.values()))])
        raise DeviceError(f"dtype {word[:40]!r}", f"allowed are {allowed}")
    return name


def driver_gpus() -> list[DeviceInfo]:
    """GPUs that NVIDIA's own tool lists, without torch; empty where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    wanted = ("--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
    try:
        shown = subprocess.run(
            [tool, *wanted], capture_output=True, text=True, check=True, timeout=20
        ).stdout
        rows = [line.rsplit(",", 2) for line in shown.splitlines() if line.strip()]
        return [
            DeviceInfo(f"cuda:{i}", name.strip(), int(total) * 2**20, int(free) * 2**20)
            for i, (name, total, free) in enumerate(rows)
        ]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def free_bytes(device: str) -> int | None:
    """Free memory of a device, as ``choose_device`` names it; None where it does not say."""
    return {info.device: info.free_bytes for info in list_devices()}.get(device)


def host_memory_bytes() -> tuple[int | None, int | None]:
    """Total and available memory of the machine; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        total, free = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return _sysconf_memory_bytes(), None
    return total, free


def _sysconf_memory_bytes() -> int | None:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
