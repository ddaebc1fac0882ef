"""``apollo ui``: what it refuses before anything starts, and one whole run as a user has it."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from base64 import b64encode
from pathlib import Path

import pytest

from apollo_cli.atomic import scratch_folder
from apollo_cli.cli import main
from apollo_cli.commands.ui import ui
from apollo_cli.ui.options import MOST_FILES
from tests.house.repo import ROOT
from tests.ui.serving import request

TOYBOX = ROOT / "examples" / "toybox.mp4"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--host", "0.0.0.0"], 2, "--host 0.0.0.0 lets other machines in; needed is --auth"),
        (["--host", "no.such.host.invalid", "--no-auth"], 2, "has no address"),
        (["--auth", "onlyme"], 2, "--auth; allowed is user:password"),
        (["--auth", "ann:"], 2, "--auth; allowed is user:password"),
        (["--auth", "ann:x", "--no-auth"], 2, "allowed is one of the two"),
        (["--allow", "/no/such/folder"], 2, "--allow /no/such/folder: no such folder"),
        (["--fit", "auto"], 2, "--fit auto without a video"),
        (["--port", "70000"], 2, "70000"),
        (["--keep-videos", "0"], 2, "0"),
        (["--max-upload-mb", "0"], 2, "0"),
        ([str(TOYBOX)] * 9, 2, "9 files; allowed are eight"),
        (["--fps", "0"], 2, "--fps 0; allowed is 0.001 to 1,000"),
        (["no_such_video.mp4"], 3, "no such file"),
        (["--model", "nosuch"], 5, "unknown model 'nosuch'"),
        (["--model", "apollo-nano", "--adapter", "/nope"], 5, "adapter /nope does not exist"),
        (["--model", "tests"], 5, "tests"),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_starts(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["ui", "--no-browser", *arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ")
    assert said in printed.err and printed.err.count("\n") == 1


def test_the_page_has_room_for_as_many_files_as_may_be_opened():
    style = (ROOT / "ui" / "style.css").read_text()
    shown = {int(number) for number in re.findall(r'data-shown="(\d+)"', style)}
    assert shown == set(range(MOST_FILES))


def test_a_password_is_never_repeated(capsys: pytest.CaptureFixture[str]):
    assert main(["ui", "--auth", "tellnobody"]) == 2
    assert "tellnobody" not in capsys.readouterr().err


def test_without_gradio_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["ui"]) == 2
    assert 'pip install "apollo-video-cli[ui]"' in capsys.readouterr().err


def test_flags_reach_the_options():
    from apollo_cli.commands.ui import read_ui_options

    arguments = ["--allow", str(ROOT / "examples"), "--allow", str(ROOT / "tests")]
    arguments += ["--quant", "4bit"]
    arguments += ["--max-upload-mb", "3", "--max-clips", "7", "--keep-videos", "2", "--fit", "auto"]
    flags = ui.make_context("ui", [str(TOYBOX), *arguments]).params
    options = read_ui_options(flags.pop("files"), flags)
    assert options.allow == (ROOT / "examples", ROOT / "tests")
    assert options.files == (TOYBOX,)
    assert (options.max_upload_bytes, options.keep_videos) == (3_000_000, 2)
    assert options.sampling.max_clips == 7 and options.model["quant"] == "4bit"
    assert options.fit and options.auth is None and options.show_page


def test_files_of_the_start_are_named_by_where_their_links_lead(tmp_path: Path):
    from apollo_cli.commands.ui import read_ui_options

    (tmp_path / "link.mp4").symlink_to(TOYBOX)
    flags = ui.make_context("ui", [str(tmp_path / "link.mp4")]).params
    assert read_ui_options(flags.pop("files"), flags).files == (TOYBOX,)


def test_only_the_folder_of_the_start_is_allowed_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from apollo_cli.commands.ui import read_ui_options

    monkeypatch.chdir(tmp_path)
    flags = ui.make_context("ui", []).params
    assert read_ui_options(flags.pop("files"), flags).allow == (tmp_path,)


def test_a_whole_run_tells_its_address_asks_for_the_password_and_ends_without_a_trace(
    tmp_path: Path,
):
    flags = ["--port", "0", "--model", "apollo-nano", "--device", "cpu", "--no-browser"]
    run = subprocess.Popen(
        [sys.executable, "-m", "apollo_cli", "ui", str(TOYBOX), *flags, "--allow", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "APOLLO_UI_AUTH": "ann:secret", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    try:
        line = run.stdout.readline()
        assert line.startswith("http://127.0.0.1:") and line.endswith("/  (Ctrl-C ends it)\n")
        address = line.split()[0]
        allowed = {"Authorization": "Basic " + b64encode(b"ann:secret").decode()}
        assert request(address, "/").status == 401
        assert request(address, "/", more=allowed).status == 200
        video = request(address, f"/media?file={TOYBOX}", more={**allowed, "Range": "bytes=0-9"})
        assert video.status == 206
        other = ROOT / "tests" / "cases" / "cfr30.mp4"
        assert request(address, f"/media?file={other}", more=allowed).status == 403
    finally:
        run.send_signal(signal.SIGINT)
        out, told = run.communicate()
    assert (run.returncode, out) == (0, "")
    assert told.splitlines()[-1] == "stopped" and "Traceback" not in told
    assert f"refused: GET /media?file={other}" in told
    assert "secret" not in told
    assert not list(tmp_path.glob("apollo-ui-*"))


def test_what_a_server_that_was_killed_has_left_is_cleared_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import sys; from apollo_cli.atomic import scratch_folder as made\n"
    code += "with made('apollo-ui-') as place: print(place, flush=True); sys.stdin.read()"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    killed, fresh, alive = places = [
        Path(run.stdout.readline().strip()) for run in runs if run.stdout
    ]
    for place in places:
        (place / "dropped.mp4").write_text("x")
    for run in runs[:2]:
        run.kill()
        run.wait()
    other = tmp_path / "apollo-ui-other"
    other.mkdir()
    for place in (killed, alive):
        os.utime(place.parent, (1, 1))
    with scratch_folder("apollo-ui-") as own:
        assert own.is_dir()
        left = {path.parent for path in (fresh, alive, own)} | {other}
        assert set(tmp_path.glob("apollo-ui-*")) == left
        assert (alive / "dropped.mp4").exists()
    assert not own.parent.exists()
    runs[2].kill()
    runs[2].wait()


def test_previews_go_on_only_for_files_that_a_page_shows(tmp_path: Path):
    from apollo_cli.ui.options import UiOptions
    from apollo_cli.ui.server import open_site

    with open_site(UiOptions(allow=(tmp_path,), show_page=False)) as site:
        assert site.media.previews.is_wanted == site.desk.shows


def test_the_page_is_built_without_torch_which_loads_once_the_page_is_there():
    code = "import sys, apollo_cli.ui.server, apollo_cli.ui.page; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"
