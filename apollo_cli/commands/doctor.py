"""``apollo doctor``: what this machine can run, and what is missing."""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from apollo_cli._version import __version__
from apollo_cli.commands.output import format_bytes, write_facts, write_json
from apollo_cli.errors import ApolloError, DeviceError
from apollo_cli.text import hide_secrets

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "av",
    "numpy",
    "pillow",
)
EXTRAS = {
    "quant": ("bitsandbytes", "accelerate"),
    "flash": ("flash-attn",),
    "ui": ("gradio",),
    "finetune": ("peft", "accelerate", "matplotlib"),
    "ray": ("ray",),
    "decord": ("decord",),
}
DECODERS = {"PyAV": ("av", "av"), "decord": ("decord", "decord")}
DISTRIBUTION = "apollo-video-cli"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Show what this machine can run, and what is missing.

    Ends with exit code 6 when a package that is needed cannot be imported.
    """
    report = examine()
    if as_json:
        write_json(report)
    else:
        write_facts(_facts(report))
    if report["problems"]:
        context.exit(DeviceError.exit_code)


def examine() -> dict[str, Any]:
    """Everything that is shown, as plain data."""
    from apollo_cli.hardware import import_fault, package_version

    versions = {name: package_version(name) for name in PACKAGES}
    modules = {"torch": "torch", "transformers": "transformers", "av": "av"}
    faults = {name: import_fault(module, name) for name, module in modules.items()}
    report: dict[str, Any] = {
        "apollo": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "problems": [fault for fault in faults.values() if fault],
        "decoders": _decoders(),
        "extras": _extras(),
        "disk": _disk(),
        "models": _models(),
    }
    if faults["torch"] is None:
        report |= _hardware()
    return report


def _hardware() -> dict[str, Any]:
    import torch

    from apollo_cli.hardware import choose_device, list_devices

    return {
        "devices": [asdict(device) for device in list_devices()],
        "choice": asdict(choose_device()),
        "torch_cuda": torch.version.cuda,
    }


def _decoders() -> dict[str, str]:
    from apollo_cli.hardware import import_fault, package_version

    found = {}
    for name, (module, package) in DECODERS.items():
        version = package_version(package) or package_version(f"{package}2") or ""
        found[name] = import_fault(module, package) or version
    return found


def _extras() -> dict[str, dict[str, str | None]]:
    from apollo_cli.hardware import package_version

    return {name: {p: package_version(p) for p in packages} for name, packages in EXTRAS.items()}


def _disk() -> dict[str, Any]:
    from huggingface_hub import constants

    from apollo_cli.weights.files import apollo_cache, apollo_home

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return {
        "cache": str(cache),
        "cache_free_bytes": shutil.disk_usage(existing).free,
        "memories": str(apollo_cache()),
        "records": str(apollo_home()),
        "offline": bool(constants.HF_HUB_OFFLINE),
        "endpoint": hide_secrets(constants.ENDPOINT),
    }


def _models() -> dict[str, str]:
    from apollo_cli.weights.store import list_models

    try:
        return {row.name: row.state for row in list_models()}
    except ApolloError as error:
        return {"error": error.message}


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("apollo", report["apollo"]),
        ("python", f"{report['python']} on {report['platform']}"),
        *((name, version or "missing") for name, version in report["packages"].items()),
    ]
    for device in report.get("devices", []):
        memory = f"{format_bytes(device['free_bytes'])} free of " if device["free_bytes"] else ""
        capability = device["capability"]
        extra = f", compute capability {capability[0]}.{capability[1]}" if capability else ""
        total = format_bytes(device["total_bytes"])
        facts.append((device["device"], f"{device['name']}, {memory}{total}{extra}"))
    if "choice" in report:
        facts += [("chosen", reason) for reason in report["choice"]["reasons"]]
    facts += [(f"decoder {name}", text) for name, text in report["decoders"].items()]
    facts += [(f"extra {name}", _extra(name, found)) for name, found in report["extras"].items()]
    disk = report["disk"]
    facts += [
        ("models", f"{disk['cache']}, {format_bytes(disk['cache_free_bytes'])} free"),
        ("memories", disk["memories"]),
        ("records", disk["records"]),
        ("hub", f"{disk['endpoint']}{', offline mode is on' if disk['offline'] else ''}"),
        *((f"model {name}", state) for name, state in report["models"].items()),
    ]
    return facts + [("problem", problem) for problem in report["problems"]]


def _extra(name: str, found: dict[str, str | None]) -> str:
    missing = [package for package, version in found.items() if version is None]
    if not missing:
        return ", ".join(f"{package} {version}" for package, version in found.items())
    isolation = " --no-build-isolation" if name == "flash" else ""
    command = f'{Path(sys.executable).name} -m pip install{isolation} "{DISTRIBUTION}[{name}]"'
    return f"without {', '.join(missing)}; {command}"
