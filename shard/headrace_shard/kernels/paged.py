"""Calls the kernels on torch tensors. Knows the C interface of kernels.cpp; knows no steps and no models."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from headrace_shard.kernels import build
from headrace_shard.kernels.rows import FORMATS, with_whole_rows

_pointer, _int64, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
# fmt: off
_WRITE: list[Any] = [
    _int, _pointer, _int64, _int64,  # format, keys and their strides
    _pointer, _int64, _int64,  # values and their strides
    _pointer, _pointer, _pointer,  # caches, slots
    _int64, _int, _int, _int,  # tokens, heads, head_dim, threads
]
_ATTEND: list[Any] = [
    _int, _pointer, _int64, _int64, _pointer,  # format, queries and their strides, outputs
    _pointer, _pointer,  # caches
    _pointer, _pointer, _pointer, _int64, _int64,  # starts, lengths, blocks, their width, sequences
    _int, _int, _int, ctypes.c_float, _int,  # heads, key heads, head_dim, scale, threads
]
# fmt: on


def cache_shape(num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of the keys of a layer, and of its values: a row of a token is filled up to whole vectors."""
    row = -(-head_dim // build.BLOCK_SIZE) * build.BLOCK_SIZE
    return (num_blocks, num_kv_heads, build.BLOCK_SIZE, row)


class PagedKernels:
    """Keys and values by slot, and attention over them.

    T tokens, H query heads, KV heads of keys and values, D numbers per head. A cache has the shape
    `cache_shape`, is contiguous, and of float32, bfloat16 or float16, as are keys, values and queries. Within
    a block of a head its numbers lie in an order of the kernels' own (cache.h). Sums are float32. A row's
    result depends on its query and its context alone: on no other row of the call, on no chunking and on no
    number of threads. (Values that are not finite may spread to earlier rows of their own sequence.)
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.headrace_instructions.restype = ctypes.c_char_p
        self.instructions: str = library.headrace_instructions().decode()
        """What bfloat16 is multiplied with; other formats use vectors of the same processor."""
        self._write = library.headrace_write
        self._write.argtypes, self._write.restype = _WRITE, None
        self._attend = library.headrace_attend
        self._attend.argtypes, self._attend.restype = _ATTEND, None

    def write(
        self, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Copy keys and values [T, KV, D], of any strides between tokens and heads, to `slots` [T] int64."""
        keys, values = with_whole_rows(keys), with_whole_rows(values)
        num_tokens, num_kv_heads, head_dim = keys.shape
        _check_cache(key_cache, value_cache, keys.dtype, num_kv_heads, head_dim)
        assert values.dtype == keys.dtype and values.shape == keys.shape
        assert slots.dtype == torch.int64 and slots.is_contiguous() and len(slots) == num_tokens
        self._write(
            FORMATS[keys.dtype],
            keys.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            values.data_ptr(),
            values.stride(0),
            values.stride(1),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            num_tokens,
            num_kv_heads,
            head_dim,
            torch.get_num_threads(),
        )

    def attend(
        self,
        queries: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        scale: float,
    ) -> Tensor:
        """Causal attention of queries [T, H, D] over the cache; gives [T, H, D], contiguous.

        query_starts [S + 1], context_lens [S] and block_tables [S, max_blocks] are int32 as in
        `ForwardInputs`. Algorithm: tiles with online softmax (Dao et al. 2022), merged in order.
        """
        queries = with_whole_rows(queries)
        num_tokens, num_heads, head_dim = queries.shape
        num_kv_heads = key_cache.shape[1]
        _check_cache(key_cache, value_cache, queries.dtype, num_kv_heads, head_dim)
        assert num_heads % num_kv_heads == 0
        assert query_starts.dtype == context_lens.dtype == block_tables.dtype == torch.int32
        assert query_starts.is_contiguous() and context_lens.is_contiguous() and block_tables.is_contiguous()
        outputs = torch.empty((num_tokens, num_heads, head_dim), dtype=queries.dtype)
        self._attend(
            FORMATS[queries.dtype],
            queries.data_ptr(),
            queries.stride(0),
            queries.stride(1),
            outputs.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            block_tables.data_ptr(),
            block_tables.shape[1],
            len(context_lens),
            num_heads,
            num_kv_heads,
            head_dim,
            scale,
            torch.get_num_threads(),
        )
        return outputs


def _check_cache(
    key_cache: Tensor, value_cache: Tensor, dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> None:
    """A wrong cache would be read out of bounds; every caller is our own code, hence assertions."""
    assert key_cache.dtype == value_cache.dtype == dtype
    assert key_cache.shape == value_cache.shape
    assert key_cache.shape == cache_shape(len(key_cache), num_kv_heads, head_dim)
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
