"""``apollo plan`` as a user types it: no download, no torch, nothing assumed in silence."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from apollo_cli.cli import main
from apollo_cli.model.tokenizer import PieceCounter
from tests import tiny
from tests.command import apollo

ROOT = Path(__file__).parent.parent
CASES = Path(__file__).parent / "cases"
CLIP, MINUTE = str(CASES / "cfr30.mp4"), str(CASES / "one_key_60s.mp4")
RELEASED = ("--model", "apollo-3b")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No model but the embedded one is on this machine, and no GPU."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("shutil.which", lambda name: None)


def planned(*arguments: str) -> dict:
    done = apollo("plan", *arguments, "--json")
    assert done.returncode == 0
    return json.loads(done.stdout)


def test_videos_are_looked_at_in_a_child_that_can_be_ended(monkeypatch: pytest.MonkeyPatch):
    def hang(*arguments: object, **options: object) -> None:
        pytest.fail("a native library that hangs would take the command with it")

    monkeypatch.setattr("apollo_cli.video.probe.probe", hang)
    assert planned(CLIP, "--model", "apollo-nano")["videos"][0]["frames"] == 120


def test_every_known_model_and_precision_gets_a_row_and_what_is_assumed_is_said_once():
    done = apollo("plan", CLIP, str(CASES / "photo.jpg"), MINUTE)
    assert done.returncode == 0
    heading, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert heading[:3] == ["MODEL", "BITS", "CLIPS"]
    assert heading[-4:] == ["8 GB", "12 GB", "16 GB", "24 GB"]
    for name in ("apollo-1.5b", "apollo-3b", "apollo-7b"):
        assert [row[1] for row in rows if row[0] == name] == ["bf16", "8bit", "4bit"]
    for words in (
        "cfr30.mp4: 4.0 s, 120 pictures",
        "one_key_60s.mp4: 1:00, 600 pictures",
        "cfr30.mp4: 2 clips, every moment seen (apollo-nano, apollo-1.5b",
        "some sizes are assumed: apollo-1.5b, apollo-3b, apollo-7b",
        "0.6 GB",
    ):
        assert done.stderr.count(words) == 1
    assert len(done.stderr.splitlines()) == len(set(done.stderr.splitlines()))


def test_a_terminal_of_80_columns_shows_each_row_on_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    hour, screen = still_video(tmp_path / "hour.mp4", seconds=3600), Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", str(hour), CLIP]) == 0
    lines = screen.getvalue().splitlines()
    assert len(lines) == 2 + 12
    assert all("apollo-" in line for line in lines[2:])


def test_json_holds_videos_machine_tokens_memory_and_cards():
    found = planned(MINUTE, *RELEASED)
    assert found["models"][0]["assumed"][0] == "clips of 2 seconds"
    assert found["videos"][0]["duration_seconds"] == 60.0
    assert found["machine"]["device"] == "cpu"
    (model,) = found["models"]
    assert model["clips"] == 30
    assert model["tokens"]["visual"] == 30 * 32
    assert model["tokens"]["exact"] is False
    assert [row["precision"] for row in model["precisions"]] == ["bf16", "8bit", "4bit"]
    row = model["precisions"][-1]
    assert set(row["cards"]) == {"8", "12", "16", "24"}
    parts = row["memory"]
    assert row["peak_bytes"] >= parts["weights"] + parts["runtime"] + parts["encode"]


def test_an_hour_fills_the_context_and_3b_in_4_bits_fits_8_gb(tmp_path: Path):
    hour = still_video(tmp_path / "hour.mp4", seconds=3600)
    (model,) = planned(str(hour), *RELEASED)["models"]
    assert "2.0 s seen of every 5." in model["videos"][0]["words"]
    tokens = model["tokens"]
    used = sum(tokens[part] for part in ("visual", "text", "question", "answer"))
    assert 32768 - 60 < used <= 32768
    assert 630 < model["clips"] < 670
    row = model["precisions"][-1]
    assert row["cards"]["8"]["all"] is True
    assert model["precisions"][0]["cards"]["8"]["all"] is False


def test_the_table_in_the_docs_is_what_the_program_says(tmp_path: Path):
    hour = still_video(tmp_path / "hour.mp4", seconds=3600)
    known = [word for n in ("1.5b", "3b", "7b") for word in ("--model", f"apollo-{n}")]
    cells = [line.split("\t") for line in apollo("plan", str(hour), *known).stdout.splitlines()[1:]]
    rows = [f"| {' | '.join([*c[:4], *c[5:]])} |" for c in cells]
    assert len(rows) == 9
    table = (ROOT / "docs" / "performance.md").read_text("utf-8").splitlines()
    assert [row for row in rows if row not in table] == []


def still_video(path: Path, seconds: int) -> Path:
    """A long file of few pictures: one a second, all alike."""
    import av
    import numpy as np

    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        grey = np.full((32, 32, 3), 90, np.uint8)
        for _ in range(seconds):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        file.mux(stream.encode())
    return path


def test_a_checkpoint_on_disk_is_planned_exactly(tmp_path: Path):
    folder = tiny.save(tmp_path / "checkpoint")
    (model,) = planned(CLIP, "--model", str(folder))["models"]
    assert model["tokens"]["exact"] is True
    assert model["assumed"] == []
    assert model["tokens"]["visual"] == 8 * model["clips"]


def test_a_checkpoint_stored_in_fewer_bits_has_that_row_only(tmp_path: Path):
    folder = tiny.save(tmp_path / "checkpoint")
    config = json.loads((folder / "llm" / "config.json").read_text())
    config["quantization_config"] = {"load_in_4bit": True}
    (folder / "llm" / "config.json").write_text(json.dumps(config))
    (model,) = planned(CLIP, "--model", str(folder))["models"]
    assert [row["precision"] for row in model["precisions"]] == ["4bit"]


def test_several_videos_share_the_budget():
    (model,) = planned(CLIP, MINUTE, *RELEASED)["models"]
    assert [Path(video["path"]).name for video in model["videos"]] == [
        "cfr30.mp4",
        "one_key_60s.mp4",
    ]
    assert model["clips"] == sum(video["clips"] for video in model["videos"])


def test_the_sampling_flags_of_ask_hold():
    (model,) = planned(MINUTE, *RELEASED, "--from", "10", "--to", "20")["models"]
    assert model["clips"] == 5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.mp4"], 3, "missing.mp4"),
        ([CLIP, "--model", "apollo-9b"], 5, "unknown model"),
        ([CLIP, "--model", "someone/something"], 5, "the shape of someone/something is not known"),
        ([CLIP, "--dtype", "int3"], 6, "allowed are"),
        ([CLIP, "--max-new-tokens", "0"], 2, "--max-new-tokens"),
        ([CLIP, *RELEASED, "--max-new-tokens", "40000"], 4, "context"),
        ([], 2, "VIDEO"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(arguments: list[str], code: int, message: str):
    done = apollo("plan", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


def test_planning_loads_no_torch():
    code = (
        "import sys; from apollo_cli.cli import main; "
        f"assert main(['plan', {CLIP!r}, '--json']) == 0; "
        "print(sorted({'torch', 'transformers', 'bitsandbytes'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (",\n12.0-13.5 seconds: ", 13),
        (",\n1234.5-1236.0 seconds: ", 17),
        ("What happens?", 3),
    ],
)
def test_labels_are_counted_by_the_rule_that_cuts_text(text: str, tokens: int):
    assert len(PieceCounter().encode(text)) == tokens
