"""The command ``apollo`` in this process: importing torch once is enough for most tests."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from apollo_cli.cli import main


class Done(NamedTuple):
    """What a run of the command left behind."""

    returncode: int
    stdout: str
    stderr: str


def apollo(*arguments: object) -> Done:
    """Run ``apollo ARGUMENTS`` as a user types it."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        code = main([str(argument) for argument in arguments])
    out, err = (stream.buffer for stream in streams)
    assert isinstance(out, io.BytesIO)
    assert isinstance(err, io.BytesIO)
    return Done(code, out.getvalue().decode(), err.getvalue().decode())
