"""Reading the released layout: what is found, and each fault named."""

import json
import shutil
from pathlib import Path

import pytest

from apollo_cli.errors import WeightsError
from apollo_cli.weights.checkpoint import encoder_part, read_checkpoint
from apollo_cli.weights.files import read_json
from apollo_cli.weights.shards import list_tensors, read_header

TESTS = Path(__file__).resolve().parents[1]
TINY = TESTS / "golden" / "tiny-checkpoint"
CASES = TESTS / "cases_weights"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


def edit_json(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, data = {}, b""
    for key, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        header[key] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + 4 * count],
        }
        data += bytes(4 * count)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def shard(folder: Path) -> dict[str, str]:
    """Split model.safetensors in two, with an index; returns its weight map."""
    header = read_header(folder / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {key: names[i % 2] for i, key in enumerate(header)}
    for name in names:
        keys = {key: header[key].shape for key, shard in weight_map.items() if shard == name}
        write_safetensors(folder / name, keys)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def faults(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_parts_are_found_with_their_configs_and_tensors():
    checkpoint = read_checkpoint(TINY)
    assert checkpoint.encoder_names == ("internvideo2", "siglip-so400m-patch14-384")
    assert set(checkpoint.tensors) == {
        "llm",
        "mm_connector",
        *map(encoder_part, checkpoint.encoder_names),
    }
    assert checkpoint.llm_config["hidden_size"] == 64
    assert checkpoint.connector_config["num_output_tokens"] == 8
    assert checkpoint.encoder_configs["internvideo2"]["num_heads"] == 4
    assert checkpoint.generation_config["eos_token_id"] == [482, 480]
    assert not checkpoint.tied_head
    info = checkpoint.tensors["mm_connector"]["resampler.latents"]
    assert (info.dtype, info.shape) == ("F32", (8, 64))
    assert info.size_bytes == 8 * 64 * 4
    assert info.file == TINY / "mm_connector" / "model.safetensors"


def test_byte_ranges_are_those_of_the_safetensors_library():
    from safetensors.numpy import load_file

    path = TINY / "mm_connector" / "model.safetensors"
    raw = path.read_bytes()
    for key, array in load_file(path).items():
        info = read_header(path)[key]
        assert raw[info.start : info.end] == array.tobytes()


def test_the_order_of_the_encoders_is_the_one_of_the_config(copy: Path):
    names = ["siglip-so400m-patch14-384", "internvideo2"]
    edit_json(copy / "vision_tower" / "config.json", vision_towers=names)
    assert read_checkpoint(copy).encoder_names == tuple(names)


def test_sharded_weights_are_read_by_their_index(copy: Path):
    whole = {key: info.shape for key, info in read_checkpoint(copy).tensors["llm"].items()}
    shard(copy / "llm")
    tensors = read_checkpoint(copy).tensors["llm"]
    assert {key: info.shape for key, info in tensors.items()} == whole
    assert len({info.file for info in tensors.values()}) == 2


def test_a_copy_in_the_root_config_stands_in_for_a_missing_file_only(copy: Path):
    edit_json(copy / "config.json", llm_cfg={"hidden_size": 1}, mm_connector_cfg={"marker": 1})
    (copy / "mm_connector" / "config.json").unlink()
    checkpoint = read_checkpoint(copy)
    assert checkpoint.llm_config["hidden_size"] == 64
    assert checkpoint.connector_config == {"marker": 1}


def test_a_stale_path_in_place_of_a_config_is_ignored(copy: Path):
    edit_json(copy / "config.json", llm_cfg="/somewhere/else/llm")
    assert read_checkpoint(copy).llm_config["hidden_size"] == 64
    (copy / "llm" / "config.json").unlink()
    assert "llm/config.json is missing" in faults(copy)


def test_a_head_that_is_not_stored_is_tied_to_the_embedding(copy: Path):
    weights = copy / "llm" / "model.safetensors"
    shapes = {k: i.shape for k, i in read_header(weights).items() if k != "lm_head.weight"}
    write_safetensors(weights, shapes)
    assert "the head is not tied" in faults(copy)
    edit_json(copy / "llm" / "config.json", tie_word_embeddings=True)
    assert read_checkpoint(copy).tied_head
    edit_json(copy / "llm" / "config.json", tie_word_embeddings=None)
    assert "the head is not tied" in faults(copy)
    edit_json(copy / "config.json", llm_cfg=None)
    assert read_checkpoint(copy).tied_head


def test_several_faults_are_told_at_once(copy: Path):
    (copy / "llm" / "vocab.json").unlink()
    (copy / "mm_connector" / "model.safetensors").unlink()
    (copy / "vision_tower" / "internvideo2" / "config.json").write_text("{")
    text = faults(copy)
    assert "the tokenizer is missing: llm/tokenizer.json, or llm/vocab.json" in text
    assert "mm_connector/model.safetensors is missing" in text
    assert "vision_tower/internvideo2/config.json is not valid JSON" in text
    assert "apollo models pull" in text


@pytest.mark.parametrize(
    "name", ["llm", "vision_tower", "mm_connector", "vision_tower/internvideo2"]
)
def test_a_missing_part_is_named(copy: Path, name: str):
    shutil.rmtree(copy / name)
    assert f"{name}/" in faults(copy)


def test_a_cut_file_is_told_with_both_sizes(copy: Path):
    path = copy / "llm" / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    assert f"llm/model.safetensors is cut: {size - 100} bytes, its header says {size}" in faults(
        copy
    )


@pytest.mark.parametrize("content", [b"", b"\1", b"\xff" * 8, b"\xff" * 40, b"x" * 4000])
def test_a_file_that_is_no_safetensors_file_is_refused(copy: Path, content: bytes):
    (copy / "llm" / "model.safetensors").write_bytes(content)
    assert "llm/model.safetensors" in faults(copy)


def test_a_git_lfs_pointer_is_named_as_such(copy: Path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (copy / "llm" / "model.safetensors").write_bytes(pointer)
    (copy / "llm" / "config.json").write_bytes(pointer)
    text = faults(copy)
    assert "llm/model.safetensors is a Git LFS pointer" in text
    assert "llm/config.json is a Git LFS pointer" in text


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"shape": [2], "data_offsets": [0, 8]},
        [],
        None,
    ],
)
def test_a_header_that_does_not_add_up_is_refused(tmp_path: Path, entry: object):
    raw = json.dumps({"a": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(12))
    with pytest.raises(WeightsError, match="safetensors"):
        read_header(tmp_path / "x.safetensors")


def test_an_index_that_leads_outside_of_its_folder_is_refused(copy: Path):
    for bad in ("../llm/model.safetensors", "/etc/passwd", "..\\x.safetensors", "C:x", "", 7):
        shutil.rmtree(copy / "llm")
        shutil.copytree(TINY / "llm", copy / "llm")
        weight_map = shard(copy / "llm")
        weight_map[next(iter(weight_map))] = bad  # type: ignore[assignment]
        index = copy / "llm" / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert "points outside of its folder" in faults(copy)


@pytest.mark.parametrize("names", [["../llm"], ["/etc"], "internvideo2", [], [3], ["a", "a"]])
def test_encoder_names_that_are_not_folder_names_are_refused(copy: Path, names: object):
    edit_json(copy / "vision_tower" / "config.json", vision_towers=names)
    assert "vision_tower/config.json" in faults(copy)


def test_the_order_of_encoders_is_asked_for_unless_there_is_only_one(copy: Path):
    edit_json(copy / "vision_tower" / "config.json", vision_towers=None)
    assert read_checkpoint(copy).encoder_names == read_checkpoint(TINY).encoder_names
    edit_json(copy / "config.json", vision_tower_cfg=None)
    assert "has no vision_towers" in faults(copy)
    shutil.rmtree(copy / "vision_tower" / "internvideo2")
    assert read_checkpoint(copy).encoder_names == ("siglip-so400m-patch14-384",)


@pytest.mark.parametrize("content", [b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b"{'a': 1}", b""])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(WeightsError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_no_folder_and_a_file_in_its_place_are_told(tmp_path: Path):
    with pytest.raises(WeightsError, match="does not exist"):
        read_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="is a file"):
        read_checkpoint(tmp_path / "file")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing_shard", "model-00002-of-00002.safetensors is missing"),
        ("cut_shard", "model-00002-of-00002.safetensors is cut: 100 bytes, its header says 120"),
        ("incomplete_left", "a stopped download left an .incomplete file"),
        ("no_config", "config.json is missing"),
        ("no_tokenizer", "llm/vocab.json and llm/merges.txt"),
        ("pickle_only", "is a pickle, which can run code"),
    ],
)
def test_each_broken_folder_of_the_collection_is_told(case: str, message: str):
    text = faults(CASES / case)
    assert message in text
    assert "pull again, which resumes" in text


def test_a_flat_folder_with_an_unstored_head_lists_its_tensors():
    found: list[str] = []
    assert list(list_tensors(CASES / "tied_head", found)) == ["llm.model.embed_tokens.weight"]
    assert found == []
