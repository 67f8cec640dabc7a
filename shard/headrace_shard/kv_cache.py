"""The tensors that hold keys and values of all layers. Knows no sequences and does not choose blocks.

The attention backend fixes the layout; the router says which blocks are whose.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from headrace_shard.errors import OutOfMemory
from headrace_shard.machine import small_pages


class CacheLayout(Protocol):
    """What the cache asks of an attention backend."""

    def cache_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's keys, and of its values; blocks are its first dimension."""
        ...


class CacheDimensions(Protocol):
    """What the cache asks of a `ModelConfig`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class KVCache:
    """`keys[layer]` and `values[layer]`, each of the backend's shape for `num_blocks` blocks."""

    def __init__(
        self,
        config: CacheDimensions,
        num_blocks: int,
        backend: CacheLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises OutOfMemory when the device cannot hold so many blocks."""
        self.num_blocks = num_blocks
        shape = backend.cache_shape(num_blocks, config.num_kv_heads, config.head_dim)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        try:
            for _ in range(config.num_layers):
                self.keys.append(_zeros(shape, dtype, device))
                self.values.append(_zeros(shape, dtype, device))
        except (RuntimeError, MemoryError) as error:
            num_bytes = num_blocks * block_bytes(config, backend, dtype)
            raise OutOfMemory(
                f"no memory on {device} for a KV cache of {num_blocks} blocks ({num_bytes / 2**30:.2f} GiB); "
                "lower --kv-cache-memory or --max-batch-total-tokens"
            ) from error

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy all layers' keys and values of blocks `sources` [C] int64 to blocks `targets` [C] int64.

        No block is a target twice, or both a source and a target. Does not wait for a GPU.
        """
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, for a slot never written may be read behind a mask, and 0 times NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch would write every page, seconds for a large cache.
    return small_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def block_bytes(config: CacheDimensions, backend: CacheLayout, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    numbers = math.prod(backend.cache_shape(1, config.num_kv_heads, config.head_dim))
    return 2 * config.num_layers * numbers * dtype.itemsize
