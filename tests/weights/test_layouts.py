"""Files of other layouts give the same numbers, or are refused by name: never other numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from apollo_cli.cli import main
from apollo_cli.errors import WeightsError
from apollo_cli.weights.adapter import base_identity
from apollo_cli.weights.checkpoint import read_checkpoint
from apollo_cli.weights.load import load_model
from tests import tiny
from tests.tiny import IMAGE, VIDEO, Tiny

Tensors = dict[str, torch.Tensor]
LLM, CONNECTOR = "llm", "mm_connector"
VIDEO_PART, IMAGE_PART = f"vision_tower/{VIDEO}", f"vision_tower/{IMAGE}"
PARTS = (LLM, CONNECTOR, VIDEO_PART, IMAGE_PART)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("layouts") / "checkpoint", Tiny())


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


def change(folder: Path, part: str, edit: Callable[[Tensors], Tensors]) -> None:
    path = folder / part / "model.safetensors"
    save_file({k: v.contiguous() for k, v in edit(load_file(path)).items()}, path)


def configure(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def logits(folder: Path) -> torch.Tensor:
    model, _ = load_model(folder)
    generator = torch.Generator().manual_seed(0)
    clips = {
        name: torch.randint(0, 256, (1, 4, 3, size, size), generator=generator).byte()
        for name, size in ((VIDEO, 24), (IMAGE, 30))
    }
    with torch.inference_mode():
        tokens = model.encode_clips(clips).flatten(0, 1)
        embeddings = model.embed([5, 6, *[-200] * len(tokens), 7], tokens)
        return model.llm(inputs_embeds=embeddings).logits[0]


def refusal(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def without(*begins: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if not k.startswith(begins)}


def behind(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + k: v for k, v in tensors.items()}


def bare(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k.removeprefix(prefix): v for k, v in tensors.items()}


@pytest.mark.parametrize(
    ("part", "last"), [(VIDEO_PART, "blocks.2."), (IMAGE_PART, "vision_model.encoder.layers.2.")]
)
def test_a_last_layer_that_is_never_run_may_be_left_out(
    original: Path, copy: Path, part: str, last: str
):
    change(copy, part, without(last))
    assert torch.equal(logits(copy), logits(original))
    change(copy, part, without(last.replace("2", "1")))
    assert f"{part}/config.json" in refusal(copy)


def test_a_config_that_says_fewer_layers_than_the_file_is_refused(copy: Path):
    configure(copy / IMAGE_PART / "config.json", num_hidden_layers=2)
    assert "num_hidden_layers is 2" in refusal(copy)
    configure(copy / IMAGE_PART / "config.json", num_hidden_layers=None)
    assert "num_hidden_layers is missing" in refusal(copy)


@pytest.mark.parametrize(
    ("part", "edit", "told"),
    [
        (LLM, behind("module."), "module."),
        (LLM, behind("model."), "model."),
        (LLM, bare("model."), "model."),
        (CONNECTOR, behind("model.mm_connector."), "model.mm_connector."),
        (VIDEO_PART, behind("vision_tower."), "vision_tower."),
        (IMAGE_PART, behind("module."), "module."),
        (IMAGE_PART, bare("vision_model."), "vision_model."),
        (IMAGE_PART, lambda t: behind("vision_tower.")(bare("vision_model.")(t)), "vision_model."),
    ],
)
def test_one_prefix_more_or_less_gives_the_same_numbers_and_a_note(
    original: Path, copy: Path, part: str, edit: Callable[[Tensors], Tensors], told: str
):
    change(copy, part, edit)
    checkpoint = read_checkpoint(copy)
    assert any(part in note and told in note for note in checkpoint.notes)
    assert torch.equal(logits(copy), logits(original))
    assert base_identity(checkpoint) == base_identity(read_checkpoint(original))


def test_other_prefixes_are_named(copy: Path):
    change(copy, CONNECTOR, lambda t: {f"a.b.{k}x": v for k, v in t.items()})
    assert "all its keys begin with 'a.b.'" in refusal(copy)


def test_a_prefix_of_some_keys_only_is_refused(copy: Path):
    change(copy, VIDEO_PART, lambda t: {f"module.{k}" if "blocks" not in k else k: t[k] for k in t})
    assert "not all keys begin with 'module.'" in refusal(copy)


@pytest.mark.parametrize("begin", ["", "model."])
def test_one_file_for_all_parts_gives_the_same_numbers_and_a_note(
    original: Path, copy: Path, begin: str
):
    whole: Tensors = {}
    for part in PARTS:
        file = copy / part / "model.safetensors"
        whole |= behind(f"{begin}{part.replace('/', '.')}.")(load_file(file))
        file.unlink()
    save_file(whole, copy / "model.safetensors")
    notes = read_checkpoint(copy).notes
    assert any("one file" in note for note in notes)
    assert torch.equal(logits(copy), logits(original))


def test_one_file_with_all_configs_in_the_root_needs_no_folders(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flat = tmp_path / "flat"
    flat.mkdir()
    configs = {p: json.loads((original / p / "config.json").read_text()) for p in PARTS}
    tower = json.loads((original / "vision_tower" / "config.json").read_text())
    tower["configs"] = {VIDEO: configs[VIDEO_PART], IMAGE: configs[IMAGE_PART]}
    root = json.loads((original / "config.json").read_text())
    root |= {"llm_cfg": configs[LLM], "mm_connector_cfg": configs[CONNECTOR]}
    (flat / "config.json").write_text(json.dumps(root | {"vision_tower_cfg": tower}))
    whole: Tensors = {"lm_head.weight": torch.zeros(3)}
    for part in PARTS:
        whole |= behind(f"{part}.".replace("/", "."))(
            load_file(original / part / "model.safetensors")
        )
    save_file(whole, flat / "model.safetensors")
    for name in ("vocab.json", "merges.txt", "added_tokens.json"):
        shutil.copy(original / "llm" / name, flat / name)
    assert torch.equal(logits(flat), logits(original))
    assert any("1 tensors belong to no part" in note for note in read_checkpoint(flat).notes)
    assert main(["ask", "--model", str(flat), "-q", "one?", "--max-new-tokens", "2"]) == 0
    assert "one file" in capsys.readouterr().err


@pytest.mark.parametrize("name", [None, "", "my_resampler", "flamingo_perciver"])
def test_the_tensors_of_the_perceiver_make_it_one_whatever_it_is_called(
    original: Path, copy: Path, name: str | None
):
    configure(copy / CONNECTOR / "config.json", resampler_type=name)
    model, _ = load_model(copy)
    assert any("resampler_type" in note for note in model.config.notes)
    assert torch.equal(logits(copy), logits(original))
    change(copy, CONNECTOR, without("resampler."))
    assert "resampler" in refusal(copy)


@pytest.mark.parametrize(
    ("part", "key", "like"),
    [
        (VIDEO_PART, "blocks.0.attn.qkv.bias", "blocks.0.attn.qkv.weight"),
        (VIDEO_PART, "blocks.0.attn.q_bias", "blocks.0.ls1.gamma"),
        (VIDEO_PART, "blocks.1.norm1.bias", "blocks.0.ls1.gamma"),
        (IMAGE_PART, "vision_model.embeddings.class_embedding", "vision_model.head.probe"),
    ],
)
def test_a_tensor_that_a_layer_would_have_used_is_refused(
    copy: Path, part: str, key: str, like: str
):
    change(copy, part, lambda tensors: tensors | {key: tensors[like].clone()})
    told = refusal(copy)
    assert part in told
    assert key in told


@pytest.mark.parametrize("part", PARTS)
def test_whole_numbers_without_scales_are_refused(copy: Path, part: str):
    ends = ("q_proj.weight", "attn.qkv.weight")
    change(copy, part, lambda t: {k: v.char() if k.endswith(ends) else v for k, v in t.items()})
    told = refusal(copy)
    assert part in told
    assert "I8" in told
