"""``apollo check``: which files can be trusted, and what is odd about the others."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import click

from apollo_cli.commands.output import progress, say_note, write_json
from apollo_cli.errors import ApolloError, MediaError, UsageError
from apollo_cli.text import count

if TYPE_CHECKING:
    from apollo_cli.video.guard import GuardedReader
    from apollo_cli.video.info import VideoInfo

# Pictures of a short file are all decoded; of a longer one, so many that lie spread over it.
_ALL_UP_TO, _SPREAD = 1500, 12
_FILES_AT_ONCE = 2
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """What was found in one file.

    Attributes:
        path: as it was given, or below the folder that was given.
        verdict: ``ok``, ``odd``, ``broken``, or ``left out`` for what is no media in a folder.
        summary: size, rate, length. remarks: why it is odd or broken, a sentence each.
    """

    path: str
    verdict: str
    summary: str
    remarks: tuple[str, ...]


@click.command()
@click.argument(
    "places", nargs=-1, required=True, metavar="FILE_OR_FOLDER...", type=click.Path(readable=False)
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("--full", is_flag=True, help="Decode every picture of long files too.")
@click.option("--recursive", "-r", is_flag=True, help="Look into folders inside of folders too.")
def check(places: tuple[str, ...], as_json: bool, full: bool, recursive: bool) -> None:
    """Tell which video files can be trusted, and what is odd about the others.

    Every packet is read. All pictures of a short file are decoded, and twelve that are spread over
    a longer one; --full decodes them all. Two files are checked at a time. Files of a folder that
    are no video or image are left out. The exit code is 3 when any file is broken.
    """
    from apollo_cli.video.container import shown

    files = dict(find_files(places, recursive))
    if not files:
        raise UsageError(f"{places[0]} holds no file")
    found: dict[str, list[Finding]] = {"ok": [], "odd": [], "broken": [], "left out": []}
    is_terminal = sys.stdout.isatty()
    if not as_json and not is_terminal:
        click.echo("\t".join(["VERDICT", "FILE", "WHAT IT IS", "WHAT IS ODD"]))
    with progress(quiet=is_terminal) as report:
        for number, one in enumerate(check_files(files, full), start=1):
            report("check", number, len(files))
            found[one.verdict].append(one)
            if as_json or one.verdict == "left out":
                continue
            # A tab or line break in a name would make another row of it.
            name = shown(one.path)
            if is_terminal:
                click.echo(f"{one.verdict:8}{name}")
                for text in filter(None, [one.summary, *one.remarks]):
                    width = shutil.get_terminal_size().columns
                    click.echo(textwrap.indent(textwrap.fill(text, max(width - 8, 20)), " " * 8))
            else:
                click.echo("\t".join([one.verdict, name, one.summary, "; ".join(one.remarks)]))
    left_out = [one.path for one in found.pop("left out")]
    rows = [one for ones in found.values() for one in ones]
    if as_json:
        write_json([asdict(one) for one in rows])
    if left_out:
        say_note(describe_left_out(left_out))
    if not rows:
        raise UsageError(f"{places[0]} holds no video or image")
    files_text, broken = count(len(rows), "file"), [one.path for one in found["broken"]]
    say_note(f"{files_text}, {len(found['odd'])} odd, {len(broken)} broken")
    if broken:
        raise MediaError(f"{len(broken)} of {files_text} broken: {_name(broken)}")


def find_files(places: Iterable[str], recursive: bool) -> Iterator[tuple[str, bool]]:
    """The files of files and folders, by name, and whether each was named itself.

    Hidden ones are left out.
    """
    from apollo_cli.video.container import local_path

    for place in places:
        if not place:
            raise UsageError("an empty name", "a file or folder is needed")
        path = Path(local_path(place) or place).expanduser()
        if path.is_dir():
            inside = path.rglob("*") if recursive else path.iterdir()
            for file in sorted(p for p in inside if not p.is_dir() and p.name[0] != "."):
                yield str(file), False
        else:
            # A path would make one slash of the two in a web address.
            yield place if "://" in place and not path.exists() else str(path), True


def check_files(files: dict[str, bool], full: bool) -> Iterator[Finding]:
    """What is found in each file, as soon as it is known, two at a time.

    Each thread has a decoder of its own, so that a file that hangs delays no other.

    Args:
        files: names, and whether each was named by the user: all others may be no media.
    """
    from apollo_cli.video.guard import GuardedReader

    idle: SimpleQueue[GuardedReader] = SimpleQueue()

    def run(name: str) -> Finding:
        reader = idle.get()
        try:
            return check_file(reader, name, full, is_named=files[name])
        finally:
            idle.put(reader)

    with ExitStack() as readers, ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        started = [readers.enter_context(GuardedReader()) for _ in range(_FILES_AT_ONCE)]
        for reader in started:
            idle.put(reader)
        try:
            for future in as_completed([pool.submit(run, name) for name in files]):
                yield future.result()
        finally:
            # Whoever stops listening, as by Ctrl-C, waits for no file.
            pool.shutdown(wait=False, cancel_futures=True)
            for reader in started:
                reader.interrupt()


def check_file(reader: GuardedReader, name: str, full: bool, *, is_named: bool = True) -> Finding:
    """Probe a file and decode some or all of its pictures, in a child that may be ended."""
    from apollo_cli.video.container import MEDIA_SUFFIXES, shown

    try:
        info = reader.probe(name)
        remarks = [*info.warnings, *filter(None, [_decode(reader, info, full)])]
    except ApolloError as error:
        reason = error.message
        for start in (shown(Path(name).absolute()), shown(name)):
            reason = reason.removeprefix(start).lstrip(": ")
        is_media = is_named or Path(name).suffix.lower() in MEDIA_SUFFIXES
        return Finding(name, "broken" if is_media else "left out", "", (reason,))
    width, height = info.display_size
    facts = [f"{width}x{height}", info.codec]
    if info.kind == "video":
        rate = f"{info.source_fps:.4g} fps" if info.source_fps else "unknown rate"
        facts += [rate, f"{info.duration_seconds:.2f} s"]
    return Finding(name, "odd" if remarks else "ok", ", ".join(facts), tuple(remarks))


def _decode(reader: GuardedReader, info: VideoInfo, full: bool) -> str:
    """What is damaged among all pictures, or among some that lie spread over a long file."""
    import numpy as np

    from apollo_cli.video.reader import describe_damage

    if full or info.frame_count <= _ALL_UP_TO:
        return describe_damage(info, reader.check_pictures(info), info.times)
    times = info.times[np.linspace(0, info.frame_count - 1, _SPREAD).astype(int)]
    damaged = [seconds for frame in reader.read_frames(info, times) for seconds in frame.damaged]
    return describe_damage(info, damaged, times)


def describe_left_out(paths: list[str]) -> str:
    """That files of a folder are no videos, by the names of the first few."""
    return f"left out, no video or image: {_name(paths)}"


def _name(paths: list[str]) -> str:
    """The first few of many files, by name."""
    from apollo_cli.video.container import shown

    first = ", ".join(shown(path) for path in sorted(paths)[:_NAMES_SHOWN])
    more = len(paths) - _NAMES_SHOWN
    return f"{first} and {more} more" if more > 0 else first
