"""Shapes and sizes of the KV cache."""

from pathlib import Path

import pytest
import torch
from headrace_shard.attention.sdpa import SdpaBackend
from headrace_shard.checkpoint.config import ModelConfig, load_config
from headrace_shard.errors import OutOfMemory
from headrace_shard.kv_cache import KVCache, block_bytes
from headrace_shard.models import NETWORKS

from tests.tiny import make_checkpoint


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return load_config(make_checkpoint(tmp_path, num_layers=3, num_kv_heads=2, head_dim=8), NETWORKS)


def test_block_bytes_are_what_the_tensors_take(config: ModelConfig) -> None:
    cache = KVCache(config, 5, SdpaBackend(), torch.bfloat16, torch.device("cpu"))
    tensors = [*cache.keys, *cache.values]
    assert len(cache.keys) == len(cache.values) == 3
    assert {tuple(tensor.shape) for tensor in tensors} == {(5, 2, 16, 8)}
    total = sum(tensor.nbytes for tensor in tensors)
    assert total == 5 * block_bytes(config, SdpaBackend(), torch.bfloat16)


def test_a_fresh_cache_holds_zeros(config: ModelConfig) -> None:
    cache = KVCache(config, 2, SdpaBackend(), torch.float32, torch.device("cpu"))
    assert not any(tensor.any() for tensor in (*cache.keys, *cache.values))


def test_too_large_a_cache_is_one_clear_error(config: ModelConfig) -> None:
    with pytest.raises(OutOfMemory, match=r"KV cache of 1000000000000 blocks .*--kv-cache-memory"):
        KVCache(config, 10**12, SdpaBackend(), torch.float32, torch.device("cpu"))


def test_copied_blocks_are_equal_in_all_layers_and_others_stay(config: ModelConfig) -> None:
    cache = KVCache(config, 6, SdpaBackend(), torch.float32, torch.device("cpu"))
    tensors = [*cache.keys, *cache.values]
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    cache.copy_blocks(torch.tensor([4, 0, 4]), torch.tensor([1, 5, 3]))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[[0, 4, 2, 4, 4, 0]])
