"""Quantised loading: which layers, how close, saved and read again, and clear where it fails."""

from __future__ import annotations

import importlib.util
import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from apollo_cli.errors import DeviceError, UsageError, WeightsError
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.weights.checkpoint import KINDS, QuantKind, read_checkpoint
from apollo_cli.weights.load import load_model
from apollo_cli.weights.quantize import place_layers, report_of
from apollo_cli.weights.repack import save_quantized
from tests import tiny
from tests.finetune.test_checkpoints import full_disk
from tests.tiny import Tiny

BITSANDBYTES = pytest.importorskip("bitsandbytes", reason="the extra [quant] is not installed")
IDS = [5, 9, 300, 17, 44, 2, 511]
# The tiny model is 32 wide inside, so of its layers only down_proj has rows of whole 4-bit blocks.
DOWN = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("quant") / "source", Tiny(dtype=torch.bfloat16))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> QuantKind:
    return request.param


@pytest.fixture(scope="module")
def saved(source: Path, kind: QuantKind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("saved") / kind
    return save_quantized(source, target, kind).folder


def load(
    path: Path, quant: QuantKind | None = None, dtype: torch.dtype = torch.float32
) -> ApolloModel:
    return load_model(path, quant=quant, dtype=dtype)[0]


@torch.inference_mode()
def logits(model: ApolloModel, ids: list[int] = IDS) -> torch.Tensor:
    return model.llm(inputs_embeds=model.embed(ids, None)).logits


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_only_linear_layers_of_the_language_model_are_quantised(source: Path):
    model = load(source, "8bit", torch.bfloat16)
    report = report_of(model.llm)
    assert report is not None
    assert len(report.layers) == 14
    assert report.whole == ()
    assert type(model.llm.lm_head) is nn.Linear
    assert model.llm.get_input_embeddings().weight.dtype == torch.bfloat16
    others = [*model.encoders.modules(), *model.connector.modules()]
    assert not any(type(module).__name__.startswith("Linear8") for module in others)


def test_shapes_that_cannot_be_quantised_stay_whole_and_are_listed(source: Path):
    report = report_of(load(source, "4bit").llm)
    assert report is not None
    assert report.layers == DOWN
    assert len(report.whole) == 12
    assert "model.layers.0.self_attn.q_proj" in report.whole


def test_a_model_without_quantisation_has_no_report(source: Path):
    assert report_of(load(source).llm) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_answers_are_close_and_in_the_dtype_of_the_model(
    source: Path, kind: QuantKind, dtype: torch.dtype
):
    found = logits(load(source, kind, dtype))
    assert found.dtype == dtype
    assert distance(found.float(), logits(load(source))) < (0.15 if kind == "4bit" else 0.05)


def test_the_packed_cpu_path_is_off_so_that_a_weight_outlives_an_answer(source: Path):
    model = load(source, "4bit")
    layer: Any = model.llm.get_submodule(DOWN[0])
    before = layer.weight.data.clone()
    logits(model)
    assert layer.support_avx512bf16_for_cpu is False
    assert torch.equal(layer.weight.data, before)
    dense = BITSANDBYTES.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    whole: Any = load(source).llm.get_submodule(DOWN[0])
    assert distance(dense, whole.weight) < 0.12


def test_a_model_can_be_trained_after_it_has_answered(source: Path):
    model = load(source, "4bit")
    logits(model)
    embeddings = model.embed(IDS, None).requires_grad_()
    network: Any = model.llm.train()
    network(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad is not None
    assert bool(embeddings.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_checkpoint_gives_the_same_bits_as_quantising_while_loading(
    source: Path, saved: Path, kind: QuantKind, dtype: torch.dtype
):
    again = load(saved, dtype=dtype)
    assert report_of(again.llm) == report_of(load(source, kind).llm)
    assert torch.equal(logits(again), logits(load(source, kind, dtype)))


def test_encoders_and_connector_of_a_saved_checkpoint_are_those_of_the_source(
    source: Path, saved: Path
):
    pixels = {
        tiny.VIDEO: torch.full((1, 4, 3, 24, 24), 90, dtype=torch.uint8),
        tiny.IMAGE: torch.full((1, 4, 3, 30, 30), 90, dtype=torch.uint8),
    }
    with torch.inference_mode():
        assert torch.equal(load(saved).encode_clips(pixels), load(source).encode_clips(pixels))


def test_a_saved_checkpoint_is_smaller_and_holds_no_pickle(saved: Path, source: Path):
    before, after = read_checkpoint(source), read_checkpoint(saved)
    assert after.size_bytes < before.size_bytes
    suffixes = {path.suffix for path in saved.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors", ".txt"}


def test_a_saved_checkpoint_can_be_read_by_other_users(saved: Path):
    mode = (saved / "llm" / "model.safetensors").stat().st_mode
    assert stat.S_IMODE(mode) == stat.S_IMODE((saved / "llm" / "config.json").stat().st_mode)


def test_shards_keep_the_tensors_of_a_layer_together(
    source: Path, kind: QuantKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("apollo_cli.weights.repack.SHARD_BYTES", 20_000)
    target = save_quantized(source, tmp_path / "shards", kind).folder
    index = json.loads((target / "llm" / "model.safetensors.index.json").read_text())
    files = {name for key, name in index["weight_map"].items() if key.startswith(DOWN[0])}
    assert len(files) == 1
    assert len(set(index["weight_map"].values())) > 2
    assert torch.equal(logits(load(target)), logits(load(source, kind)))


def test_transformers_reads_the_same_files(saved: Path):
    pytest.importorskip("accelerate", reason="transformers wants accelerate for quantised weights")
    from transformers import Qwen2ForCausalLM

    theirs = Qwen2ForCausalLM.from_pretrained(saved / "llm", dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits
    # Theirs takes the packed path, which multiplies in another order.
    assert distance(expected, logits(load(saved, dtype=torch.bfloat16))) < 0.03


def test_a_tied_head_stays_one_with_the_embedding(kind: QuantKind, tmp_path: Path):
    source = tiny.save(tmp_path / "tied", Tiny(tied=True))
    target = save_quantized(source, tmp_path / "saved", kind).folder
    model = load(target)
    assert model.llm.lm_head.weight is model.llm.get_input_embeddings().weight
    assert torch.equal(logits(model), logits(load(source, kind)))


def test_a_checkpoint_is_not_quantised_twice_or_otherwise(saved: Path, kind: QuantKind, tmp_path):
    other = "8bit" if kind == "4bit" else "4bit"
    with pytest.raises(WeightsError, match=f"is stored in {kind}.*leave --quant out"):
        load(saved, other)
    with pytest.raises(WeightsError, match="already"):
        save_quantized(saved, tmp_path / "again", kind)
    assert report_of(load(saved, kind).llm) is not None


def test_a_target_that_exists_is_left_alone(source: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="exists"):
        save_quantized(source, tmp_path, "8bit")


def test_a_failed_save_leaves_nothing_behind(source: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightsError, match="cannot be written"):
        save_quantized(source, tmp_path / "file" / "target", "8bit")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_of_the_user_beside_the_target_stays(source: Path, tmp_path: Path):
    own = tmp_path / "target.unfinished"
    own.mkdir()
    (own / "mine.txt").write_text("mine")
    save_quantized(source, tmp_path / "target", "4bit")
    assert (own / "mine.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "target.unfinished"]


def test_a_disk_that_is_full_while_layers_are_written_is_one_clear_error(
    source: Path, kind: QuantKind, tmp_path: Path
):
    with (
        full_disk(limit_bytes=8192),
        pytest.raises(WeightsError, match=r"cannot be written .*make room"),
    ):
        save_quantized(source, tmp_path / "target", kind)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quant_method": "bitsandbytes"}, "read are 4-bit and 8-bit"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, config: dict, message: str):
    source = tiny.save(tmp_path / "other")
    path = source / "llm" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(WeightsError, match=message):
        load(source)


def test_a_damaged_quantised_checkpoint_is_one_clear_error(saved: Path, tmp_path: Path):
    from shutil import copytree

    from safetensors.torch import save_file

    broken = copytree(saved, tmp_path / "broken")
    path = broken / "llm" / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    scales = next(key for key in tensors if key.endswith((".SCB", ".absmax")))
    save_file({key: value for key, value in tensors.items() if key != scales}, path)
    with pytest.raises(WeightsError, match="does not fit the network"):
        load(broken)


def test_bitsandbytes_says_nothing_while_a_model_loads_and_answers(
    source: Path, kind: QuantKind, caplog: pytest.LogCaptureFixture, capfd
):
    with caplog.at_level(logging.WARNING):
        logits(load(source, kind, torch.bfloat16))
    assert [r for r in caplog.records if r.name.startswith("bitsandbytes")] == []
    assert capfd.readouterr().err == ""


def test_a_device_without_bitsandbytes_is_one_clear_error(source: Path):
    llm = load(source).llm
    with pytest.raises(DeviceError, match=r"quantised weights on mps.*add --device cpu"):
        place_layers(llm, "8bit", torch.float32, device="mps")


def test_without_bitsandbytes_the_extra_is_named(source: Path, monkeypatch: pytest.MonkeyPatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "bitsandbytes" else real(name, *rest),
    )
    with pytest.raises(DeviceError, match=r"bitsandbytes is not installed.*\[quant\]"):
        load_model(source, quant="4bit")
