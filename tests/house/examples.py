"""The examples of the README: console blocks whose output is that of the commands above it."""

import os
import re
import shlex
import subprocess
import sys
import tempfile

from tests.house.repo import ROOT

BLOCK = re.compile(r"^```console\n\$ apollo (.*)\n((?:.*\n)*?)```$", re.MULTILINE)


def commands(text: str) -> dict[str, str]:
    """Arguments of each example, and the output that the text shows for it."""
    return {match[1]: match[2] for match in BLOCK.finditer(text)}


def run_example(arguments: str) -> tuple[int, str]:
    """Exit code and stdout of ``apollo ARGUMENTS`` on a machine where nothing was done before."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "apollo_cli", *shlex.split(arguments)]
        alone = {"APOLLO_HOME": home, "HF_HOME": home, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | alone, capture_output=True, text=True, check=False
        )
    return done.returncode, align(done.stdout)


def align(text: str) -> str:
    """Columns between tabs, set under each other as a terminal shows them."""
    rows = [line.split("\t") for line in text.splitlines()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)


def fill_examples(text: str) -> str:
    """A text with the output of each example brought up to date."""
    return BLOCK.sub(lambda m: f"```console\n$ apollo {m[1]}\n{run_example(m[1])[1]}```", text)
