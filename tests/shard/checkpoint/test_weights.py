"""Safetensors of a folder, single or indexed, and files that are wrong."""

import json
from pathlib import Path

import pytest
import torch
from headrace_shard.checkpoint.weights import Checkpoint, listed, stored_dtype
from headrace_shard.errors import CheckpointError

from tests.tiny import make_checkpoint


def test_one_file_and_several_hold_the_same(tmp_path: Path) -> None:
    one = Checkpoint(make_checkpoint(tmp_path / "one"))
    three = Checkpoint(make_checkpoint(tmp_path / "three", num_files=3))
    assert one.names == three.names
    assert all(torch.equal(one.tensor(name), three.tensor(name)) for name in one.names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_dtype(tmp_path: Path, dtype: str) -> None:
    assert stored_dtype(make_checkpoint(tmp_path, dtype=dtype)) == getattr(torch, dtype)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing"):
        Checkpoint(make_checkpoint(tmp_path)).tensor("lm_head.weight")


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no weights: neither model\.safetensors nor"):
        Checkpoint(tmp_path)


def test_folder_with_pickled_weights_only(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which is not read"):
        Checkpoint(tmp_path)


def test_file_of_the_index_is_missing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_files=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        Checkpoint(tmp_path)


def test_index_that_names_a_tensor_no_file_holds(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_files=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="that no file holds: ghost"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": [1]}', '{"a":' * 100_000])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    make_checkpoint(tmp_path, num_files=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        Checkpoint(tmp_path)


def test_empty_index(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_files=2)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match=r"index\.json names no tensor"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 5, 300, 50_000])
def test_truncated_file(tmp_path: Path, kept_bytes: int) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match="is damaged or not fully downloaded"):
        Checkpoint(tmp_path)


def test_listed_shows_the_first_few() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
