"""Runs decoder blocks in one call of the kernels. Knows the order of kernels in a block; knows no network."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_shard.inputs import ForwardInputs
from headrace_shard.kernels.dense import DenseKernels, PackedWeight
from headrace_shard.kernels.paged import cache_shape
from headrace_shard.kernels.rows import FORMATS

_pointer, _int64, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Shape(ctypes.Structure):
    _fields_ = (
        ("format", _int),
        ("num_heads", _int),
        ("num_kv_heads", _int),
        ("head_dim", _int),
        ("hidden_size", _int64),
        ("intermediate_size", _int64),
        ("epsilon", _float),
        ("scale", _float),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        ("attention_norm", _pointer),
        ("qkv", _pointer),
        ("qkv_bias", _pointer),
        ("output", _pointer),
        ("output_bias", _pointer),
        ("mlp_norm", _pointer),
        ("gate_up", _pointer),
        ("down", _pointer),
        ("down_bias", _pointer),
        ("key_cache", _pointer),
        ("value_cache", _pointer),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", _int64),
        ("cos", _pointer),
        ("sin", _pointer),
        ("slots", _pointer),
        ("query_starts", _pointer),
        ("context_lens", _pointer),
        ("block_tables", _pointer),
        ("max_blocks", _int64),
        ("num_sequences", _int64),
        ("num_threads", _int),
        ("min_tokens", _int64),
        ("max_seconds", ctypes.c_double),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTensors:
    """A decoder block: weights, and keys and values of its cache."""

    attention_norm: Tensor
    qkv: PackedWeight
    output: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    key_cache: Tensor
    value_cache: Tensor


class DecoderBlocks:
    """x + attention(norm(x)), then x + mlp(norm(x)), block after block, all of one shape.

    Gives the very bits of the same kernels called one by one. For a step of one token the way through Python
    takes longer than many a kernel.
    """

    def __init__(
        self,
        kernels: DenseKernels,
        blocks: Sequence[BlockTensors],
        *,
        head_dim: int,
        epsilon: float,
        scale: float,
    ) -> None:
        first = blocks[0]
        self._hidden_size, self._dtype = len(first.attention_norm), first.attention_norm.dtype
        self._head_dim = head_dim
        num_heads = first.output.depth // self._head_dim
        for block in blocks:
            self._check(block, first, num_heads)
        self._tensors = tuple(blocks)
        self._blocks = (_Block * len(blocks))(*map(_block, blocks))
        self._shape = _Shape(
            format=FORMATS[self._dtype],
            num_heads=num_heads,
            num_kv_heads=first.key_cache.shape[1],
            head_dim=self._head_dim,
            hidden_size=self._hidden_size,
            intermediate_size=first.down.depth,
            epsilon=epsilon,
            scale=scale,
        )
        self._run = kernels.library.headrace_run_blocks
        self._run.argtypes, self._run.restype = [_pointer, _pointer, _int64, _pointer, _pointer], _int64

    def _check(self, block: BlockTensors, first: BlockTensors, num_heads: int) -> None:
        """A wrong size would be read out of bounds; every caller is our own code, hence assertions."""
        num_blocks, num_kv_heads = first.key_cache.shape[:2]
        head_dim = self._head_dim
        assert head_dim % 2 == 0 and num_heads % num_kv_heads == 0
        assert first.key_cache.shape == cache_shape(num_blocks, num_kv_heads, head_dim)
        sizes = {
            "qkv": (self._hidden_size, (num_heads + 2 * num_kv_heads) * head_dim),
            "output": (num_heads * head_dim, self._hidden_size),
            "gate_up": (self._hidden_size, first.down.depth),
            "down": (first.down.depth, self._hidden_size),
        }
        for name, size in sizes.items():
            weight: PackedWeight = getattr(block, name)
            assert (weight.depth, weight.num_results) == size and weight.panels.dtype == self._dtype
            assert weight.is_gated == (name == "gate_up")
        for norm in (block.attention_norm, block.mlp_norm):
            assert norm.shape == (self._hidden_size,) and norm.dtype == self._dtype and norm.is_contiguous()
        for cache in (block.key_cache, block.value_cache):
            assert cache.shape == first.key_cache.shape and cache.dtype == self._dtype
            assert cache.is_contiguous()

    def run(self, hidden: Tensor, cos: Tensor, sin: Tensor, inputs: ForwardInputs) -> Tensor:
        """hidden [T, hidden_size] through all blocks; overwrites it and gives it back.

        cos and sin [T, 1, D] float32 are those of a `Rotation`. Writes the tokens' keys and values. For the
        sake of `inputs.max_seconds` the last tokens may be missing in what is given back.
        """
        num_tokens = len(hidden)
        assert hidden.shape == (num_tokens, self._hidden_size) and hidden.dtype == self._dtype
        assert hidden.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        assert cos.shape == sin.shape == (num_tokens, 1, self._head_dim)
        assert cos.dtype == sin.dtype == torch.float32
        starts, lens, tables = inputs.query_starts, inputs.context_lens, inputs.block_tables
        assert starts.dtype == lens.dtype == tables.dtype == torch.int32
        assert starts.is_contiguous() and lens.is_contiguous() and tables.is_contiguous()
        # What may be left is of the last sequence, and not all of it.
        assert not inputs.max_seconds or int(starts[-2]) < inputs.min_tokens <= num_tokens
        slots = inputs.slots
        assert slots.dtype == torch.int64 and slots.is_contiguous() and len(slots) == num_tokens
        step = _Step(
            num_tokens=num_tokens,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=slots.data_ptr(),
            query_starts=starts.data_ptr(),
            context_lens=lens.data_ptr(),
            block_tables=tables.data_ptr(),
            max_blocks=tables.shape[1],
            num_sequences=len(lens),
            num_threads=torch.get_num_threads(),
            min_tokens=inputs.min_tokens,
            max_seconds=inputs.max_seconds,
        )
        num_through = self._run(
            ctypes.addressof(self._shape),
            ctypes.addressof(self._blocks),
            len(self._blocks),
            ctypes.addressof(step),
            hidden.data_ptr(),
        )
        return hidden[:num_through]


def _block(block: BlockTensors) -> _Block:
    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return _Block(
        attention_norm=address(block.attention_norm),
        qkv=address(block.qkv.panels),
        qkv_bias=address(block.qkv.bias),
        output=address(block.output.panels),
        output_bias=address(block.output.bias),
        mlp_norm=address(block.mlp_norm),
        gate_up=address(block.gate_up.panels),
        down=address(block.down.panels),
        down_bias=address(block.down.bias),
        key_cache=address(block.key_cache),
        value_cache=address(block.value_cache),
    )
