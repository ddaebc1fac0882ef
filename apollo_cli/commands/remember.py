"""``apollo remember`` and ``apollo cache``: memories of videos that the user or apollo keeps."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from apollo_cli.commands.options import FILE, flags_of, read_options
from apollo_cli.commands.output import format_bytes, progress, say_note, write_json, write_table
from apollo_cli.config import ModelOptions, ReadingOptions, SamplingOptions
from apollo_cli.errors import MediaError, UsageError


@click.command()
@click.argument("video", metavar="VIDEO", type=click.Path(readable=False))
@click.option(
    "-o",
    "--output",
    type=FILE,
    show_default="VIDEO with .apollo instead of its ending",
    help="File to write.",
)
@flags_of(ModelOptions, SamplingOptions, ReadingOptions)
def remember(video: str, output: Path | None, **flags: Any) -> None:
    """Watch all of a video once and keep what the model saw in a file.

    Questions about the file are answered like questions about the video, also about another part
    of it, and nothing is decoded again. Running the same command again resumes a stopped run.
    """
    from apollo_cli.memory_record import SUFFIX, read_record
    from apollo_cli.video.guard import GuardedReader

    if not Path(video).name:
        raise UsageError(f"{video!r} is no name of a video file", next_step="name one")
    target = (output or Path(video).with_suffix(SUFFIX)).absolute()
    if target.suffix != SUFFIX:
        raise UsageError(f"-o {output}", f"a name that ends in {SUFFIX} is needed")
    if not target.parent.is_dir():
        raise UsageError(f"-o {output}", next_step=f"make the folder {target.parent} first")
    sampling, reading = read_options(SamplingOptions, flags), read_options(ReadingOptions, flags)
    model = read_options(ModelOptions, flags)
    with progress(at_once=True) as report, GuardedReader() as reader:
        info = reader.probe(video, replace(reading, image_fps=None))
        if output is None:
            # The memory of another video of the same name is not written over.
            with suppress(MediaError):
                remembered = read_record(target).path
                if Path(remembered) != info.path:
                    advice = "choose another name with -o"
                    raise UsageError(f"{target} remembers {remembered}", next_step=advice)
        from apollo_cli.engine import load

        apollo = load(**vars(model), use_cache=False, reader=reader, on_progress=report)
        memory = apollo.remember(info, target, sampling, reading=reading, on_progress=report)
    for note in memory.warnings:
        say_note(f"{info.path.name}: {note}")
    size = format_bytes(target.stat().st_size)
    say_note(f"{memory.plan.describe()}; {size}; ask it with: apollo ask {target} ...")
    click.echo(target)


@click.group()
def cache() -> None:
    """List and clear the memories of videos that apollo keeps by itself.

    Together they take at most 10 GB, or as many as the variable APOLLO_CACHE_GB says; inf is no
    limit. The memory that was unused for longest is deleted first.
    """
    from apollo_cli.memory_cache import adopt_old

    moved = adopt_old()
    if moved:
        say_note(moved)


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def list_command(as_json: bool) -> None:
    """List the remembered videos, the last used first."""
    from apollo_cli.memory_cache import cache_folder, limit_bytes, list_memories

    memories = list_memories()
    if as_json:
        rows = [{"path": m.path, "size_bytes": m.size_bytes, **m.record.__dict__} for m in memories]
        write_json({"folder": cache_folder(), "limit_bytes": limit_bytes(), "memories": rows})
        return
    table = [
        [
            Path(memory.record.path).name,
            memory.record.model,
            str(memory.record.clips),
            format_bytes(memory.size_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(memory.used)),
        ]
        for memory in memories
    ]
    write_table(["VIDEO", "MODEL", "CLIPS", "SIZE", "LAST USED"], table)
    total = format_bytes(sum(memory.size_bytes for memory in memories))
    say_note(f"{total} of {format_bytes(limit_bytes())} (APOLLO_CACHE_GB) in {cache_folder()}")


@cache.command("rm")
@click.argument("file", metavar="FILE")
def rm_command(file: str) -> None:
    """Delete what is remembered of one video, or one memory of the list.

    FILE is the video, also one that is gone, or a memory as apollo cache list --json names it.
    """
    from apollo_cli.memory_cache import remove

    say_note(f"{format_bytes(remove(file))} freed")


@cache.command("clear")
def clear_command() -> None:
    """Delete all remembered videos; files of apollo remember stay."""
    from apollo_cli.memory_cache import clear

    say_note(f"{format_bytes(clear())} freed")
