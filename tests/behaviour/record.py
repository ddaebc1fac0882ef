"""What apollo does today, as files: ``python -m tests.behaviour.record --write`` records it anew.

Each recorder goes through the command line or a public function and returns plain values by
name. ``test_behaviour.py`` compares them with the files in ``recorded/``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.behaviour import doors
from tests.command import apollo

HERE = Path(__file__).parent
CASES = HERE.parent / "cases"
WORLDS = HERE / "videos"
RECORDED = HERE / "recorded"
NANO = ("--model", "apollo-nano", "--device", "cpu")

DURATIONS = (0.04, 0.5, 1.999, 2.0, 2.0005, 3.3, 7.0, 60.0, 61.7, 600.04, 3600.0, 9000.5)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "fps 1": {"fps": 1.0},
    "fps 7.3": {"fps": 7.3},
    "4 clips": {"max_clips": 4},
    "uniform": {"mode": "uniform"},
    "uniform 13": {"mode": "uniform", "frames": 13},
    "window": {"start_seconds": 0.3, "end_seconds": 47.25},
    "stretch": {"short": "stretch"},
    "error": {"short": "error"},
}

# Each is run as it stands; {cases} and {out} are folders.
COMMANDS = (
    "",
    "--version",
    "models",
    "cache",
    "finetune",
    "nothing",
    "ask",
    "ask {cases}/cfr30.mp4",
    "ask {cases}/none.mp4 What?",
    "ask {cases}/empty.mp4 What?",
    "ask {cases}/audio_only.mp4 What?",
    "ask {cases}/cfr30.mp4 What? --json",
    "ask {cases}/cfr30.mp4 {cases}/photo.jpg What? --json",
    "ask {cases}/cfr30.mp4 -q One? -q Two? --json --no-cache",
    "ask -q What? --json",
    "ask {cases}/cfr30.mp4 Which? --choice red --choice blue --json",
    "ask {cases}/cfr30.mp4 Which? --choice red --choice blue --blind-check",
    "ask {cases}/cfr30.mp4 What? --blind-check --json",
    "ask {cases}/cfr30.mp4 What? --format srt",
    "ask {cases}/cfr30.mp4 What? --format csv",
    "ask {cases}/cfr30.mp4 What? --format md",
    "ask {cases}/cfr30.mp4 What? --fps nan",
    "ask {cases}/cfr30.mp4 What? --fps 0",
    "ask {cases}/cfr30.mp4 What? --from 3 --to 2",
    "ask {cases}/cfr30.mp4 What? --from 9",
    "ask {cases}/cfr30.mp4 What? --from 1 --to 3 --json",
    "ask {cases}/cfr30.mp4 What? --sampling uniform --frames 9 --json",
    "ask {cases}/cfr30.mp4 What? --max-clips 1 --fps 1 --json",
    "ask {cases}/cfr30.mp4 What? --max-new-tokens 1 --json",
    "ask {cases}/cfr30.mp4 What? --template qwen_1_5 --json",
    "ask {cases}/cfr30.mp4 What? --temperature 1 --seed 3 --json",
    "ask {cases}/cfr30.mp4 What? --device tpu",
    "ask {cases}/cfr30.mp4 What? --dtype int8",
    "ask {cases}/cfr30.mp4 What? --subtitles {cases}/none.srt",
    "ask {cases}/cfr30.mp4 What? --max-pixels 9",
    "ask {cases}/bit_flips.mp4 What? --strict",
    "ask --videos {cases}/none What?",
    "plan {cases}/cfr30.mp4 --json",
    "plan {cases}/one_key_60s.mp4 {cases}/photo.jpg --json",
    "plan --duration 1:00:00 --json",
    "frames {cases}/cfr30.mp4 --at 1.5 --at 3 -o {out}/at",
    "frames {cases}/cfr30.mp4 --sheet -o {out}/sheet",
    "frames {cases}/empty.mp4 -o {out}/none",
    "check {cases}/none.mp4",
    "remember {cases}/cfr30.mp4 -o {out}/cfr30.apollo",
    "ask {out}/cfr30.apollo What? --json",
    "ask {out}/cfr30.apollo What? --from 1 --to 3 --json",
    "ask {cases}/cfr30.mp4 What? --model {cases}",
    "models show apollo-nano --json",
    "models show nobody",
    "models verify apollo-nano",
    "models rm apollo-nano",
    "models list --json",
    "cache list --json",
    "cache clear",
    "finetune new {out}/new",
    "finetune check {out}/new/sft.toml",
    "finetune run {out}/none.toml",
)
# What a machine, a release or the wording of a sentence changes.
PASSING = {
    "path", "folder", "seconds", "reasons", "notes", "warnings", "remarks", "version", "machine",
    "precisions", "advice", "words", "coverage_text", "summary", "language_model", "note",
    "size_bytes", "digest", "source", "fingerprint", "limit_bytes", "remembered",
}  # fmt: skip


def sampler() -> dict[str, Any]:
    """Times of the clips of a plan by duration and options, for 40 clips at most."""
    return {
        f"{duration} s, {name}": _grid(duration, options)
        for duration in DURATIONS
        for name, options in SAMPLINGS.items()
    }


def _grid(duration: float, options: dict[str, Any]) -> Any:
    times = doors.clip_times(duration, options)
    if isinstance(times, str):
        return times
    rounded = np.round(times, 6)
    row = {"clips": len(times), "first": rounded[0].tolist(), "last": rounded[-1].tolist()}
    return row | {"all": _digest(json.dumps(rounded.tolist()).encode())}


def prompts() -> dict[str, Any]:
    """Token ids of prompts by template and what is shown."""
    return dict(doors.prompt_ids())


def cases() -> dict[str, Any]:
    """Of each file: verdict, exit code, and the times and pixels of the pictures of four clips."""
    found: dict[str, Any] = {}
    for path in sorted(CASES.iterdir()):
        if path.suffix in {".py", ".json"} or path.is_dir():
            continue
        check = apollo("check", path, "--json")
        row = next(iter(json.loads(check.stdout)), {})
        with tempfile.TemporaryDirectory() as out:
            seen = apollo("frames", path, "--max-clips", 4, "-o", out, *NANO[:2])
            pictures = {p.stem.rpartition("-")[2]: _pixels(p) for p in sorted(Path(out).iterdir())}
        found[path.name] = {
            "check": check.returncode,
            "verdict": row.get("verdict"),
            "remarks": len(row.get("remarks", ())),
            "frames": seen.returncode,
            "pictures": pictures,
        }
    return found


def _pixels(path: Path) -> str:
    """Mean of each channel: decoders of other releases may differ by a level here and there."""
    with Image.open(path) as picture:
        means = np.asarray(picture.convert("RGB"), float).mean((0, 1)).round()
    return " ".join(str(int(mean)) for mean in means)


def commands() -> dict[str, Any]:
    """Exit code of each command, and its JSON, the keys that pass left out."""
    done: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as out:
        for line in COMMANDS:
            words = [word.format(cases=CASES, out=out) for word in line.split()]
            if words and words[0] in {"ask", "plan", "remember", "frames"} and len(words) > 2:
                words += NANO[:2] if "--model" not in words else ()
            ran = apollo(*words)
            row: dict[str, Any] = {"exit": ran.returncode, "stdout": bool(ran.stdout)}
            if "--json" in words and ran.stdout:
                row["json"] = _settled(_parse(ran.stdout))
            done[line] = row
        done["files"] = sorted(
            p.relative_to(out).as_posix() for p in Path(out).rglob("*") if p.is_file()
        )
    return done


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _settled(v) for k, v in value.items() if k not in PASSING}
    return [_settled(v) for v in value] if isinstance(value, list) else value


def answers() -> dict[str, Any]:
    """What apollo-nano answers to questions about drawn videos."""
    asked = json.loads((HERE / "questions.json").read_text())
    said: dict[str, Any] = {}
    for name, questions in asked.items():
        flags = [word for question in questions for word in ("-q", question)]
        ran = apollo("ask", WORLDS / name, *flags, "--json", "--no-cache", *NANO)
        rows = [json.loads(line) for line in ran.stdout.splitlines()]
        said |= {f"{name}: {row['question']}": row["answer"] for row in rows}
    return said


RECORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sampler": sampler,
    "prompts": prompts,
    "cases": cases,
    "commands": commands,
    "answers": answers,
}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    """Record everything, or what the arguments name."""
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(RECORDERS)
    home = tempfile.mkdtemp()
    os.environ |= {"APOLLO_HOME": home, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in names:
        text = json.dumps(RECORDERS[name](), indent=1, sort_keys=True) + "\n"
        if "--write" in sys.argv:
            RECORDED.mkdir(exist_ok=True)
            (RECORDED / f"{name}.json").write_text(text)
        else:
            sys.stdout.write(text)
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
