"""``apollo check``: which files can be trusted, and what is odd about the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from apollo_cli.commands.output import progress, say_note, write_json, write_table
from apollo_cli.errors import ApolloError, MediaError, UsageError

if TYPE_CHECKING:
    from apollo_cli.video.guard import GuardedReader
    from apollo_cli.video.info import VideoInfo
    from apollo_cli.video.reader import ReadReport

# Pictures of a short file are all decoded; of a longer one, so many that lie spread over it.
_ALL_UP_TO, _SPREAD = 1500, 12


@dataclass(frozen=True)
class Finding:
    """What was found in one file.

    Attributes:
        path: as it was given. verdict: ``ok``, ``odd`` or ``broken``.
        summary: size, rate, length. remarks: why it is odd or broken, a sentence each.
    """

    path: Path
    verdict: str
    summary: str
    remarks: tuple[str, ...]


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="FILE_OR_FOLDER...")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("--full", is_flag=True, help="Decode every picture of long files too.")
@click.option("--recursive", "-r", is_flag=True, help="Look into folders inside of folders too.")
def check(places: tuple[str, ...], as_json: bool, full: bool, recursive: bool) -> None:
    """Tell which video files can be trusted, and what is odd about the others.

    Every packet is looked at. The pictures of short files are all decoded, of longer files those
    of a few moments spread over them; of all files all with --full.
    The exit code is 3 when any file is broken.
    """
    files = list(find_files(places, recursive))
    if not files:
        raise UsageError(f"{places[0]} holds no file")
    from apollo_cli.video.guard import GuardedReader

    found = []
    with GuardedReader() as reader, progress() as report:
        for number, path in enumerate(files, start=1):
            found.append(check_file(reader, path, full))
            report("check", number, len(files))
    if as_json:
        write_json([finding.__dict__ for finding in found])
    else:
        rows = [
            [finding.verdict, finding.path.name, finding.summary, "; ".join(finding.remarks)]
            for finding in found
        ]
        write_table(["VERDICT", "FILE", "WHAT IT IS", "WHAT IS ODD"], rows)
    counts = {verdict: sum(f.verdict == verdict for f in found) for verdict in ("odd", "broken")}
    say_note(f"{len(found)} files, {counts['odd']} odd, {counts['broken']} broken")
    if counts["broken"]:
        raise MediaError(f"{counts['broken']} of {len(found)} files are broken")


def find_files(places: tuple[str, ...], recursive: bool) -> Iterator[Path]:
    """The files of files and folders, by name; hidden ones are left out."""
    for place in places:
        if not place:
            raise UsageError("an empty name", "a file or folder is needed")
        path = Path(place).expanduser()
        if path.is_dir():
            inside = path.rglob("*") if recursive else path.iterdir()
            yield from sorted(p for p in inside if not p.is_dir() and p.name[0] != ".")
        else:
            yield path


def check_file(reader: GuardedReader, path: Path, full: bool) -> Finding:
    """Probe a file and decode some or all of its pictures, in a child that may be ended."""
    from apollo_cli.video.opening import shown

    try:
        info = reader.probe(path)
        report, remarks = _decode(reader, info, full), list(info.warnings)
    except ApolloError as error:
        reason = error.message.removeprefix(shown(path)).lstrip(": ")
        return Finding(path, "broken", "", (reason,))
    width, height = info.display_size
    facts = [f"{width}x{height}", info.codec]
    if info.kind == "video":
        rate = f"{info.source_fps:.4g} fps" if info.source_fps else "unknown rate"
        facts += [rate, f"{info.duration_seconds:.2f} s"]
    if report.damaged_seconds:
        remarks.append(report.describe())
    verdict = "odd" if remarks else "ok"
    return Finding(path, verdict, ", ".join(facts), tuple(remarks))


def _decode(reader: GuardedReader, info: VideoInfo, full: bool) -> ReadReport:
    import numpy as np

    from apollo_cli.video.reader import ReadReport

    if full or info.frame_count <= _ALL_UP_TO:
        return reader.check_pictures(info)
    report = ReadReport()
    spread = np.linspace(0, info.frame_count - 1, _SPREAD).astype(int)
    for _ in reader.read_frames(info, info.times[spread], report=report):
        pass
    return report
