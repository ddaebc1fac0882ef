"""Every value of a checkpoint's configs: read and checked, or refused with its file and key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apollo_cli.cli import main
from apollo_cli.errors import WeightsError
from apollo_cli.model.config import NetworkConfig
from apollo_cli.model.tokenizer import load_tokenizer
from apollo_cli.weights.checkpoint import Checkpoint, read_checkpoint, stored_kind
from apollo_cli.weights.files import parse_json_object
from apollo_cli.weights.network import build_network_config

TINY = Path(__file__).resolve().parents[1] / "golden" / "tiny-checkpoint"
FILES = sorted(
    str(path.relative_to(TINY))
    for path in TINY.rglob("*config.json")
    if path.name != "tokenizer_config.json"
)
# As they are written in the file: Python's own parser takes more than JSON allows.
BAD = (
    "null",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e308",
    "1e999",
    "9" * 5000,
    str(10**30),
    "-1",
    "0",
    "0.5",
    "true",
    "false",
    '"x"',
    '""',
    "[]",
    "{}",
    "[[[[{}]]]]",
    '{"a": {"b": [null]}}',
)
IMAGE = "vision_tower/siglip-so400m-patch14-384"
# Other values that are allowed.
VALID = {
    ("config.json", "mm_vision_select_layer", "-1"),
    ("config.json", "clip_duration", "0.5"),
    ("llm/config.json", "attention_dropout", "0.5"),
    ("llm/config.json", "max_position_embeddings", "null"),
    ("llm/config.json", "tie_word_embeddings", "true"),
    ("llm/config.json", "rms_norm_eps", "0.5"),
    ("llm/generation_config.json", "eos_token_id", "0"),
    ("llm/generation_config.json", "top_k", "0"),
    ("llm/generation_config.json", "eos_token_id", "null"),
    ("llm/generation_config.json", "top_k", "null"),
    ("llm/generation_config.json", "repetition_penalty", "null"),
    ("llm/generation_config.json", "repetition_penalty", "0.5"),
    (f"{IMAGE}/config.json", "layer_norm_eps", "0.5"),
    (f"{IMAGE}/preprocessor_config.json", "image_mean", "0"),
}
# What libraries write where a value is not set.
NULLS = {
    "config.json": "model_max_length use_mm_start_end",
    "llm/config.json": "hidden_size num_key_value_heads use_sliding_window tie_word_embeddings "
    "rope_scaling layer_types head_dim quantization_config attention_dropout model_max_length",
    "mm_connector/config.json": "resampler_type projector_type resampler_head_dim ff_multi "
    "num_output_tokens token_input_shape",
    "vision_tower/config.json": "token_output_shape num_vision_encoders",
    "vision_tower/internvideo2/config.json": "depth d_model num_frames",
    f"{IMAGE}/config.json": "num_channels patch_size",
    f"{IMAGE}/preprocessor_config.json": "do_convert_rgb do_pad crop_size",
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


def network(folder: Path) -> NetworkConfig:
    return replace(build_network_config(read_checkpoint(folder)), notes=())


def keys(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values, objects and lists included."""
    rows = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in rows:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from keys(item, (*path, key))


def spell(value: Any, path: tuple[Any, ...], raw: str) -> str:
    """A config as JSON, with the raw text in the place of one value."""
    changed = json.loads(json.dumps(value))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "@"
    return json.dumps(changed).replace('"@"', raw, 1)


def edit(path: Path, **changes: object) -> None:
    """Change keys of a config; None takes one out."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def refusal(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        network(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_config(checkpoint: Checkpoint, file: str, config: dict[str, Any]) -> Checkpoint:
    """A checkpoint with another config; its tensors are not listed again."""
    name = Path(file).parent.name
    fields: dict[str, Any] = {
        "config.json": {"config": config},
        "llm/config.json": {"llm_config": config},
        "llm/generation_config.json": {"generation_config": config},
        "mm_connector/config.json": {"connector_config": config},
        "vision_tower/config.json": {"tower_config": config},
    }
    if file in fields:
        return replace(checkpoint, **fields[file])
    if file.endswith("preprocessor_config.json"):
        others = checkpoint.preprocessor_configs
        return replace(checkpoint, preprocessor_configs=others | {name: config})
    return replace(checkpoint, encoder_configs=checkpoint.encoder_configs | {name: config})


@pytest.mark.parametrize("file", FILES)
def test_no_bad_value_is_an_unexpected_error_or_changes_the_network(file: str):
    checkpoint = read_checkpoint(TINY)
    expected, others = build_network_config(checkpoint), set()
    value = json.loads((TINY / file).read_text())
    for path in keys(value):
        for raw in BAD if not str(path[0]).endswith("_cfg") else ():
            try:
                config = parse_json_object(spell(value, path, raw).encode(), file)
                found = build_network_config(with_config(checkpoint, file, config))
            except WeightsError as error:
                assert file in error.message, (path, raw)
                assert str(path[0]) in error.message or "JSON" in error.message, (path, raw)
            else:
                if replace(found, notes=()) != expected:
                    others.add((file, path[0], raw))
    assert others == {row for row in VALID if row[0] == file}


@pytest.mark.parametrize("raw", BAD)
def test_no_bad_list_of_encoders_is_an_unexpected_error(copy: Path, raw: str):
    place = copy / "vision_tower" / "config.json"
    value = json.loads(place.read_text())
    for path in (("vision_towers",), ("vision_towers", 0), ("configs",)):
        place.write_text(spell(value, path, raw))
        try:
            assert network(copy) == network(TINY)
        except WeightsError as error:
            assert "vision_tower/config.json" in error.message


@pytest.mark.parametrize(
    ("file", "key", "raw"),
    [
        ("llm/config.json", "num_hidden_layers", "1e308"),
        ("llm/config.json", "vocab_size", "{}"),
        ("llm/config.json", "hidden_act", "null"),
        ("vision_tower/internvideo2/config.json", "num_heads", "NaN"),
    ],
)
def test_a_bad_value_ends_a_command_with_its_file_and_key(
    copy: Path, file: str, key: str, raw: str, capsys: pytest.CaptureFixture[str]
):
    place = copy / file
    place.write_text(spell(json.loads(place.read_text()), (key,), raw))
    code = main(["ask", "--model", str(copy), "-q", "one?"])
    told = capsys.readouterr().err
    assert code == 5
    assert file in told
    assert key in told or "NaN" in told


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"mm_vision_select_feature": "cls_patch"}),
        ("config.json", {"use_mm_start_end": True}),
        ("config.json", {"model_max_length": True}),
        ("config.json", {"model_max_length": -5}),
        ("config.json", {"model_max_length": "long"}),
        ("llm/config.json", {"model_type": "llama"}),
        ("llm/config.json", {"use_sliding_window": True}),
        ("llm/config.json", {"num_key_value_heads": 4}),
        ("llm/config.json", {"rope_scaling": {"type": "longrope", "factor": 2}}),
        ("mm_connector/config.json", {"hidden_act": "gelu"}),
        ("mm_connector/config.json", {"resampler_head_dim": 12}),
        ("mm_connector/config.json", {"resampler_n_heads": 8}),
        ("mm_connector/config.json", {"resampler_depth": 3}),
        ("mm_connector/config.json", {"ff_multi": 4}),
        ("mm_connector/config.json", {"projector_type": "mlp3x_gelu"}),
        ("mm_connector/config.json", {"num_output_tokens": 16}),
        ("vision_tower/internvideo2/config.json", {"use_flash_attn": True}),
        ("vision_tower/internvideo2/config.json", {"img_size": 224}),
        ("vision_tower/internvideo2/config.json", {"depth": 3}),
        ("vision_tower/internvideo2/config.json", {"depth": 6}),
        ("vision_tower/internvideo2/preprocessor_config.json", {"CenterCrop": {"size": [96, 96]}}),
        (f"{IMAGE}/config.json", {"num_hidden_layers": 6}),
        (f"{IMAGE}/config.json", {"model_type": "siglip2_vision_model"}),
        (f"{IMAGE}/preprocessor_config.json", {"resample": 2}),
        (f"{IMAGE}/preprocessor_config.json", {"do_rescale": False}),
        (f"{IMAGE}/preprocessor_config.json", {"rescale_factor": 1 / 127.5}),
        (f"{IMAGE}/preprocessor_config.json", {"do_normalize": False}),
        (f"{IMAGE}/preprocessor_config.json", {"do_center_crop": True}),
        (f"{IMAGE}/preprocessor_config.json", {"size": {"height": 384, "width": 384}}),
    ],
)
def test_a_value_that_would_change_the_numbers_is_refused_by_name(
    copy: Path, file: str, changes: dict[str, Any]
):
    edit(copy / file, **changes)
    told = refusal(copy)
    assert file in told
    assert next(iter(changes)) in told or "num_attention_heads" in told


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "hidden_act", "num_attention_heads"])
def test_an_absent_value_of_the_language_model_comes_from_the_copy_or_is_asked_for(
    copy: Path, key: str
):
    edit(copy / "llm" / "config.json", **{key: None})
    assert network(copy) == network(TINY)
    edit(copy / "config.json", llm_cfg=None)
    told = refusal(copy)
    assert "llm/config.json" in told
    assert key in told


def test_sizes_that_the_tensors_tell_need_no_config(copy: Path):
    sizes = ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers")
    edit(copy / "config.json", llm_cfg=None)
    edit(copy / "llm" / "config.json", **dict.fromkeys((*sizes, "num_key_value_heads")))
    assert network(copy) == network(TINY)


def test_the_newer_spelling_of_positions_is_read(copy: Path):
    edit(copy / "config.json", llm_cfg=None)
    newer = {"rope_theta": 1000000.0, "rope_type": "default"}
    edit(copy / "llm" / "config.json", rope_theta=None, rope_parameters=newer)
    assert network(copy) == network(TINY)


@pytest.mark.parametrize(("told", "taken"), [(10**30, 32768), (65536, 32768), (2048, 2048)])
def test_a_context_is_no_longer_than_the_positions(copy: Path, told: int, taken: int):
    edit(copy / "config.json", model_max_length=told)
    config = build_network_config(read_checkpoint(copy))
    assert config.context == taken
    assert any(str(told) in note for note in config.notes) == (told > taken)


@pytest.mark.parametrize(
    ("file", "key"), [(file, key) for file, keys in NULLS.items() for key in keys.split()]
)
def test_null_is_no_value_where_tensors_or_other_files_tell(copy: Path, file: str, key: str):
    path = copy / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: None}))
    assert network(copy) == network(TINY)


@pytest.mark.parametrize(
    ("part", "key"),
    [("mm_connector", "token_input_shape"), ("vision_tower", "token_output_shape")],
)
def test_a_grid_that_a_config_tells_otherwise_is_a_note(copy: Path, part: str, key: str):
    edit(copy / part / "config.json", **{key: [16, 27, 27]})
    assert network(copy) == network(TINY)
    assert any(key in note for note in build_network_config(read_checkpoint(copy)).notes)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ([], "quantization_config"),
        ("8bit", "quantization_config"),
        ({}, "neither"),
        ({"load_in_8bit": "yes"}, "load_in_8bit"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "4bit and 8bit"),
        ({"load_in_8bit": True, "llm_int8_threshold": 3.0}, "llm_int8_threshold"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ],
)
def test_how_weights_are_stored_is_read_or_refused(copy: Path, entry: object, told: str):
    edit(copy / "llm" / "config.json", quantization_config=entry)
    with pytest.raises(WeightsError) as caught:
        stored_kind(read_checkpoint(copy))
    assert "llm/config.json" in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("file", "raw"),
    [
        ("vocab.json", b"{"),
        ("vocab.json", b'{"a": null}'),
        ("added_tokens.json", b'{"a": "b"}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": 3}}'),
        ("merges.txt", b"a b c"),
        ("merges.txt", b""),
        ("merges.txt", b"\xff"),
        ("tokenizer.json", b"{}"),
    ],
)
def test_a_damaged_file_of_the_tokenizer_is_named(copy: Path, file: str, raw: bytes):
    (copy / "llm" / file).write_bytes(raw)
    if file == "tokenizer_config.json":
        (copy / "llm" / "added_tokens.json").unlink()
    with pytest.raises(WeightsError, match=file.replace(".", "[.]")):
        load_tokenizer(copy / "llm")
