"""Paged attention in plain torch: the reference for every other backend, and the one that runs anywhere.

Sequences with one token are computed together over a gathered, masked copy of their cache, with no copy to
the host, so that a pure decode can be captured in a CUDA graph. Sequences with more tokens are computed one
after the other. Made to be right and plain, not to be fast: the gathered copy costs memory of the size of the
context.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace_shard.inputs import ForwardInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A sequence with more than one token in the step, in numbers the host knows."""

    sequence: int
    start: int
    """First row of its queries."""
    query_len: int
    context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How a step with prompts is divided; made once and used by every layer."""

    inputs: ForwardInputs
    single_rows: Tensor
    """[N] int64: query rows of the sequences with one token."""
    single_sequences: Tensor
    """[N] int64: which sequences these are."""
    chunks: tuple[_Chunk, ...]


class SdpaBackend:
    """Cache layout [num_blocks, num_kv_heads, block_size, head_dim], for keys and for values."""

    name = "sdpa"
    block_size = 16

    def __init__(self) -> None:
        self._plan: _Plan | None = None

    def cache_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's keys, and of its values."""
        return (num_blocks, num_kv_heads, self.block_size, head_dim)

    def write(
        self, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Store keys and values [T, KV, D] at `slots` [T]."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        key_cache[blocks, :, offsets] = keys
        value_cache[blocks, :, offsets] = values

    def attend(
        self, queries: Tensor, key_cache: Tensor, value_cache: Tensor, inputs: ForwardInputs, scale: float
    ) -> Tensor:
        """Causal attention of queries [T, H, D] over their sequences' cache; gives [T, H, D]."""
        if inputs.max_query_len == 1:
            return _attend_single(
                queries, key_cache, value_cache, inputs.block_tables, inputs.context_lens, scale
            )
        plan = self._plan
        if plan is None or plan.inputs is not inputs:
            plan = self._plan = _divide(inputs)
        outputs = torch.empty_like(queries)
        if len(plan.single_rows):
            outputs[plan.single_rows] = _attend_single(
                queries[plan.single_rows],
                key_cache,
                value_cache,
                inputs.block_tables[plan.single_sequences],
                inputs.context_lens[plan.single_sequences],
                scale,
            )
        for chunk in plan.chunks:
            rows = slice(chunk.start, chunk.start + chunk.query_len)
            num_blocks = -(-chunk.context_len // self.block_size)
            table = inputs.block_tables[chunk.sequence, :num_blocks]
            keys = _gather(key_cache, table[None])[:, :, : chunk.context_len]
            values = _gather(value_cache, table[None])[:, :, : chunk.context_len]
            outputs[rows] = _attend_chunk(queries[rows], keys, values, scale)
        return outputs


def _divide(inputs: ForwardInputs) -> _Plan:
    starts, context_lens = inputs.query_starts.tolist(), inputs.context_lens.tolist()
    lens = [end - start for start, end in pairwise(starts)]
    device = inputs.query_starts.device
    singles = [sequence for sequence, length in enumerate(lens) if length == 1]
    return _Plan(
        inputs=inputs,
        single_rows=torch.tensor(
            [starts[sequence] for sequence in singles], dtype=torch.int64, device=device
        ),
        single_sequences=torch.tensor(singles, dtype=torch.int64, device=device),
        chunks=tuple(
            _Chunk(
                sequence=sequence,
                start=starts[sequence],
                query_len=length,
                context_len=context_lens[sequence],
            )
            for sequence, length in enumerate(lens)
            if length > 1
        ),
    )


def _gather(cache: Tensor, block_tables: Tensor) -> Tensor:
    """Blocks [S, B] of a cache as [S, KV, B * block_size, D], a copy."""
    gathered = cache[block_tables.long()].transpose(1, 2)
    num_sequences, num_kv_heads, num_blocks, block_size, head_dim = gathered.shape
    return gathered.reshape(num_sequences, num_kv_heads, num_blocks * block_size, head_dim)


def _attend_single(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Queries [S, H, D], one of each sequence, which sees all of its context; gives [S, H, D]."""
    num_sequences, num_heads, head_dim = queries.shape
    num_kv_heads = key_cache.shape[1]
    keys, values = _gather(key_cache, block_tables), _gather(value_cache, block_tables)
    positions = torch.arange(keys.shape[2], device=queries.device)
    is_seen = positions < context_lens[:, None]
    # What lies behind a context belongs to others: even a NaN of theirs must not get through the mask.
    is_unseen = ~is_seen[:, None, :, None]
    keys.masked_fill_(is_unseen, 0)
    values.masked_fill_(is_unseen, 0)
    # Query heads that share a key head become the rows of one product, so keys are not repeated.
    grouped = queries.view(num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
    outputs = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=is_seen[:, None, None, :], scale=scale
    )
    return outputs.reshape(num_sequences, num_heads, head_dim)


def _attend_chunk(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The last Q positions of one sequence: queries [Q, H, D] over keys [1, KV, C, D]; gives [Q, H, D]."""
    query_len, context_len = queries.shape[0], keys.shape[2]
    mask = None
    if query_len < context_len:
        ones = torch.ones(query_len, context_len, dtype=torch.bool, device=queries.device)
        mask = ones.tril_(context_len - query_len)
    outputs = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return outputs[0].transpose(0, 1)
