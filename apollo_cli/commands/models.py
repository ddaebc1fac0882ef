"""``apollo models``: list, show, pull, verify, quantise and remove models."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apollo_cli.commands.options import FILE, complete_model
from apollo_cli.commands.output import (
    format_bytes,
    progress,
    say,
    write_facts,
    write_json,
    write_table,
)
from apollo_cli.errors import UsageError, WeightsError
from apollo_cli.text import count

if TYPE_CHECKING:
    from apollo_cli.weights.hub import PullPlan
    from apollo_cli.weights.registry import ModelSource

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
name_argument = click.argument("name", metavar="NAME", shell_complete=complete_model)


@click.group()
def models() -> None:
    """List, fetch, inspect, verify and remove models.

    NAME is a known name, a folder, or OWNER/REPOSITORY with an optional @REVISION.
    """


@models.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the known and the fetched models."""
    from apollo_cli.weights.store import list_models

    rows = list_models()
    if as_json:
        write_json([asdict(row) for row in rows])
        return
    table = []
    for row in rows:
        about = "about " if row.state == "absent" and row.size_bytes else ""
        summary = row.entry.summary if row.entry else ""
        table.append([row.name, row.state, about + format_bytes(row.size_bytes), summary])
    write_table(["NAME", "STATE", "SIZE", "WHAT IT IS"], table)


@models.command("show")
@name_argument
@json_option
def show_command(name: str, as_json: bool) -> None:
    """Show what is known of a model, and what its files hold."""
    from apollo_cli.weights.registry import resolve
    from apollo_cli.weights.store import find_local, find_manifest

    source = resolve(name)
    folder, manifest = find_local(source), find_manifest(source)
    facts: dict[str, Any] = {"name": source.name, "kind": source.kind} | _licence(source)
    facts |= {
        "repository": source.repository,
        "state": "on this machine" if folder else "not on this machine",
        "commit": manifest.commit if manifest else None,
        "folder": str(folder) if folder else None,
        "files": {n: asdict(f) for n, f in manifest.files.items()} if manifest else None,
    }
    if folder is not None:
        facts |= _contents(folder)
    elif source.entry is not None:
        facts["approximate_size_bytes"] = source.entry.approximate_bytes
    if as_json:
        write_json(facts)
    else:
        shown = [(key, value) for key, value in facts.items() if value]
        write_facts([(k.removesuffix("_bytes").replace("_", " "), _line(k, v)) for k, v in shown])


def _licence(source: ModelSource) -> dict[str, Any]:
    from apollo_cli.weights.registry import LICENCE_REMINDER

    if source.entry is None:
        return {}
    return {
        "summary": source.entry.summary,
        "language_model": source.entry.language_model,
        "licence": source.entry.licence,
        "label_on_the_repository": source.entry.mirror_label,
        "note": LICENCE_REMINDER if source.repository else None,
    }


def _contents(folder: Path) -> dict[str, Any]:
    from apollo_cli.weights.checkpoint import read_checkpoint
    from apollo_cli.weights.network import build_network_config

    checkpoint = read_checkpoint(folder)
    network = build_network_config(checkpoint)
    return {
        "size_bytes": checkpoint.size_bytes,
        "encoders": list(checkpoint.encoder_names),
        "parameters": checkpoint.parameters,
        "tied_head": checkpoint.tied_head,
        "clip_seconds": network.clip_seconds,
        "tokens_per_clip": network.connector.tokens_per_clip,
        "context": network.context,
        "notes": list(network.notes),
    }


def _line(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key == "files":
        return f"{len(value)}, {format_bytes(sum(f['size_bytes'] for f in value.values()))}"
    if key == "parameters":
        return ", ".join(f"{part} {count / 1e6:.1f} M" for part, count in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


@models.command("pull")
@name_argument
@click.option(
    "--revision",
    show_default="the repository's main branch",
    help="Branch, tag or commit; the same as NAME@REVISION.",
)
@yes_option
@json_option
def pull_command(name: str, revision: str | None, yes: bool, as_json: bool) -> None:
    """Fetch a model, after showing its size and licence.

    The cache, token, mirror and offline mode of huggingface-hub hold: HF_HOME, HF_TOKEN,
    HF_ENDPOINT, HF_HUB_OFFLINE. Only safetensors and text files are fetched; a pull that was
    stopped is continued.
    """
    from apollo_cli.weights.hub import fetch_model
    from apollo_cli.weights.registry import resolve

    with progress() as report:
        manifest = fetch_model(
            resolve(name),
            confirm=lambda plan: _agrees(plan, yes),
            on_status=say,
            on_progress=lambda done, total: report("fetch", done, total),
            revision=revision,
        )
    if manifest is None:
        say("nothing was fetched")
    elif as_json:
        write_json(asdict(manifest))
    else:
        size = format_bytes(manifest.size_bytes)
        say(f"ready: {manifest.repository} at {manifest.commit[:12]}, {size}")
        click.echo(manifest.folder)


def _agrees(plan: PullPlan, yes: bool) -> bool:
    from apollo_cli.weights.registry import LICENCE_REMINDER

    say(f"{plan.repository} at {plan.commit[:12]}, {count(len(plan.files), 'file')}")
    say(
        f"  size     {format_bytes(plan.total_bytes)}, {format_bytes(plan.missing_bytes)} to fetch "
        f"into {plan.cache_dir} ({format_bytes(plan.free_bytes)} free)"
    )
    say(
        f"  licence  label on the repository: {plan.licence or 'none'} {plan.licence_link}".rstrip()
    )
    facts = _licence(plan.source)
    if facts:
        say(f"           {facts['licence']}")
    say(f"           {LICENCE_REMINDER}")
    if plan.gated:
        say("  access   its terms must be accepted on its page first")
    if yes or not plan.missing:
        return True
    return _confirmed("Fetch it?", "pull")


def _confirmed(question: str, verb: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(
            f"models {verb} cannot ask, since stdin is not a terminal", "", "add --yes to go on"
        )
    return click.confirm(question, err=True)


@models.command("verify")
@name_argument
@json_option
@click.pass_context
def verify_command(context: click.Context, name: str, as_json: bool) -> None:
    """Check that a model is complete and unchanged since it was fetched."""
    from apollo_cli.weights.registry import resolve
    from apollo_cli.weights.store import verify

    report = verify(resolve(name), on_file=None if as_json else say)
    if as_json:
        write_json(asdict(report) | {"ok": report.ok})
        context.exit(0 if report.ok else WeightsError.exit_code)
    if not report.ok:
        raise WeightsError(
            f"{report.folder}: {'; '.join(report.faults)}",
            "",
            f"apollo models pull {name} fetches what is missing",
        )
    hashed = (
        f"hashes agree ({count(report.hashed, 'file')})" if report.hashed else "no hashes were kept"
    )
    click.echo(f"ok: {report.folder} is complete, {hashed}")


@models.command("quantize")
@name_argument
@click.option(
    "--quant",
    type=click.Choice(["4bit", "8bit"]),
    default="4bit",
    help="Bits of the language model's linear layers.",
)
@click.option("--output", "-o", type=FILE, required=True, help="A new folder.")
@json_option
def quantize_command(name: str, quant: Any, output: Path, as_json: bool) -> None:
    """Save a model with its language model in 4 or 8 bits, to load it quicker.

    The copy is used like any folder: apollo ask --model DIR. Its answers are those of --quant.
    """
    from apollo_cli.weights.registry import resolve
    from apollo_cli.weights.repack import save_quantized
    from apollo_cli.weights.store import require_local

    with progress(as_json) as report:
        saved = save_quantized(
            require_local(resolve(name)),
            output,
            quant,
            on_progress=lambda done, total: report("load", done, total),
        )
    if saved.report.whole:
        from apollo_cli.weights.shards import name_some

        whole = name_some(list(saved.report.whole))
        say(f"left whole, since their shape cannot be quantised: {whole}")
    if as_json:
        write_json(asdict(saved))
    else:
        sizes = f"{format_bytes(saved.source_bytes)} became {format_bytes(saved.saved_bytes)}"
        say(f"ready: {count(len(saved.report.layers), 'layer')} in {quant}, {sizes}")
        click.echo(saved.folder)


@models.command("rm")
@name_argument
@yes_option
@json_option
def remove_command(name: str, yes: bool, as_json: bool) -> None:
    """Delete a fetched model from the disk."""
    from apollo_cli.weights.registry import resolve
    from apollo_cli.weights.store import remove

    source = resolve(name)
    if source.repository is not None and not yes:
        where = f"{source.repository}{'@' + source.revision if source.revision else ''}"
        if not _confirmed(f"Delete the files of {where} from the cache?", "rm"):
            say("nothing was deleted")
            return
    freed = remove(source)
    if as_json:
        write_json({"name": source.name, "freed_bytes": freed})
    else:
        say(f"removed {source.name}: {format_bytes(freed)} freed")
