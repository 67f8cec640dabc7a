"""Weights that do not fit the network that config.json describes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from headrace_shard.attention.sdpa import SdpaBackend
from headrace_shard.checkpoint.config import load_config
from headrace_shard.errors import CheckpointError
from headrace_shard.models import NETWORKS, CausalLM, load_model
from safetensors.torch import load_file, save_file

from tests.tiny import make_checkpoint, random_weights, write_weights


def load(folder: Path) -> CausalLM:
    return load_model(
        folder, load_config(folder, NETWORKS), torch.float32, torch.device("cpu"), SdpaBackend()
    )


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_joined_products_hold_their_parts_in_order(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path))
    weights = random_weights(read_config(tmp_path))
    prefix = "model.layers.1.self_attn."
    joined = np.concatenate([weights[f"{prefix}{part}_proj.weight"] for part in "qkv"])
    assert np.array_equal(model.get_parameter(f"{prefix}qkv_proj.weight").numpy(), joined)


def test_every_parameter_is_filled_and_a_tied_table_is_one_tensor(tmp_path: Path) -> None:
    config = read_config(make_checkpoint(tmp_path))
    num_numbers = sum(array.size for array in random_weights(config).values())
    parameters = list(load(tmp_path).parameters())
    assert sum(parameter.numel() for parameter in parameters) == num_numbers
    assert not any(parameter.is_meta or parameter.isnan().any() for parameter in parameters)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = random_weights(read_config(make_checkpoint(tmp_path)))
    del weights["model.layers.0.self_attn.k_proj.weight"], weights["model.norm.weight"]
    write_weights(tmp_path, weights)
    message = r"lack tensors: model\.layers\.0\.self_attn\.k_proj\.weight, model\.norm\.weight"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_tensors_beyond_the_network_are_named(tmp_path: Path) -> None:
    """A bias that config.json denies would be lost in silence and make every answer wrong."""
    weights = random_weights(read_config(make_checkpoint(tmp_path)))
    weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, dtype=np.float32)
    write_weights(tmp_path, weights)
    with pytest.raises(
        CheckpointError, match=r"does not account for: model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        load(tmp_path)


def test_redundant_tensors_of_older_checkpoints_are_passed_over(tmp_path: Path) -> None:
    weights = random_weights(read_config(make_checkpoint(tmp_path)))
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, dtype=np.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    write_weights(tmp_path, weights)
    load(tmp_path)


def test_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    weights = random_weights(read_config(make_checkpoint(tmp_path)))
    weights["model.layers.1.mlp.up_proj.weight"] = np.zeros((100, 64), dtype=np.float32)
    write_weights(tmp_path, weights)
    message = (
        r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[100, 64\], config.json makes it \[128, 64\]"
    )
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype="bfloat16")
    model = load_model(
        folder, load_config(folder, NETWORKS), torch.float16, torch.device("cpu"), SdpaBackend()
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path)
    with pytest.raises(CheckpointError, match=rf"{name} holds torch\.int8"):
        load(tmp_path)
