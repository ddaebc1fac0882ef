"""Forged memories, whose digest is right, are refused by name; no field of theirs is trusted."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apollo_cli.cli import main
from apollo_cli.errors import MediaError, WeightsError
from apollo_cli.memory_file import MemoryWriter, load_memory
from apollo_cli.memory_record import RECORD_KEY, MemoryRecord, read_record
from apollo_cli.model.config import NetworkConfig
from apollo_cli.weights.checkpoint import read_checkpoint
from apollo_cli.weights.network import build_network_config

GOLDEN = Path(__file__).parent / "golden" / "tiny-checkpoint"
RECORD = MemoryRecord(
    "m", "f", "s", "/x.mp4", "video", 8.0, 2, (0, 8), 2.0, 4, 4, ("a note",), ((0.0, 1.0, "hi"),)
)
BAD = ("null", "NaN", "1e999", "9" * 5000, "-7", "0.5", "true", '"x"', "[]", "{}", '[[["x"]]]')


@pytest.fixture(scope="module")
def config() -> NetworkConfig:
    return build_network_config(read_checkpoint(GOLDEN))


def write(
    target: Path, tokens: torch.Tensor | None = None, times: np.ndarray | None = None
) -> Path:
    tokens = torch.zeros(4, 8, 64) if tokens is None else tokens
    times = np.arange(16.0).reshape(4, 4) / 2 if times is None else times
    shape: Any = tuple(tokens.shape)
    writer = MemoryWriter(target, RECORD, shape, times.shape[1], tokens.dtype)
    writer.add(tokens, times)
    writer.finish(RECORD.notes)
    writer.release()
    return target


def forge(target: Path, place: Path, changes: dict[str, str]) -> Path:
    """A copy whose record holds other values, as raw JSON."""
    content = target.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    record = json.loads(header["__metadata__"][RECORD_KEY])
    rows = {key: json.dumps(value) for key, value in record.items()} | changes
    spelled = ", ".join(f"{json.dumps(key)}: {value}" for key, value in rows.items())
    header["__metadata__"][RECORD_KEY] = f"{{{spelled}}}"
    raw = json.dumps(header).encode()
    place.write_bytes(len(raw).to_bytes(8, "little") + raw + content[end:])
    return place


@pytest.mark.parametrize("field", [field.name for field in fields(MemoryRecord)])
def test_a_field_of_a_wrong_type_is_refused_with_file_and_field(
    field: str, config: NetworkConfig, tmp_path: Path
):
    target = write(tmp_path / "video.apollo")
    expected = asdict(read_record(target))
    for raw in BAD:
        forged = forge(target, tmp_path / "forged.apollo", {field: raw})
        try:
            load_memory(forged, "f", "m", config)
            changed = {k for k, v in asdict(read_record(forged)).items() if v != expected[k]}
        except (MediaError, WeightsError) as error:
            assert "forged.apollo" in error.message
        else:
            assert changed <= {field}
            assert type(getattr(read_record(forged), field)) is type(expected[field]) or (
                field == "clip_seconds"
            )


@pytest.mark.parametrize(
    ("tokens", "times"),
    [
        (torch.zeros(4, 8, 32), None),
        (torch.zeros(4, 4, 64), None),
        (torch.full((4, 8, 64), torch.nan), None),
        (None, np.full((4, 4), np.nan)),
        (None, np.full((4, 4), 1e300)),
        (None, np.zeros((4, 3))),
    ],
)
def test_tokens_and_times_of_another_shape_or_no_numbers_are_refused(
    tokens: torch.Tensor | None, times: np.ndarray | None, config: NetworkConfig, tmp_path: Path
):
    target = write(tmp_path / "video.apollo", tokens, times)
    with pytest.raises(MediaError, match=r"video\.apollo"):
        load_memory(target, "f", "m", config)


def test_a_forged_memory_is_one_line_of_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    forged = forge(write(tmp_path / "a.apollo"), tmp_path / "b.apollo", {"duration_seconds": "[]"})
    assert main(["ask", str(forged), "one?"]) == 3
    told = capsys.readouterr().err
    assert "b.apollo" in told
    assert "duration_seconds" in told
