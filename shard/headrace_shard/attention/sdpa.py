"""Paged attention in plain torch: the reference for every other backend, and the one that runs anywhere.

It reads a gathered copy of the cache. Sequences with one token are computed together in groups of like
context lengths, sequences with more tokens one after the other, in tiles of queries; so that copies and
scores stay within `_MAX_BYTES`, or what one sequence's own context takes. How a step is divided follows from
lengths the host knows: nothing waits for the device. Made to be right and plain, not to be fast.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from headrace_shard.config import ShardSettings
from headrace_shard.inputs import ForwardInputs

IntArray = npt.NDArray[np.int64]

_MAX_BYTES = 64 * 2**20
"""Of the keys and values that are gathered at once for several sequences, and of the scores of one tile."""

_MIN_GROUP_BLOCKS = 8
"""Contexts up to this length go together: little is copied in vain, and few groups are quicker than many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Sequences with one token in the step and contexts of like length, in numbers on the device."""

    rows: Tensor
    """[N] int64: their query rows."""
    rows_of_cache: Tensor
    """[N, KV, B] int64: their blocks, head by head, in a cache seen as [num_blocks * KV, block_size, D]."""
    is_seen: Tensor
    """[N, B * block_size] bool: which of these slots hold the sequence's own context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A sequence with more than one token in the step."""

    start: int
    """First row of its queries."""
    query_len: int
    context_len: int
    rows_of_cache: Tensor
    """[1, KV, B] int64, as in a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How a step is divided; made once and used by every layer."""

    inputs: ForwardInputs
    groups: tuple[_Group, ...]
    chunks: tuple[_Chunk, ...]


def create(settings: ShardSettings) -> "SdpaBackend":
    """It needs no setting."""
    return SdpaBackend()


class SdpaBackend:
    """Cache layout [num_blocks, num_kv_heads, block_size, head_dim], for keys and for values."""

    name = "sdpa"
    means = "plain torch"
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
        plan = self._plan
        if plan is None or plan.inputs is not inputs:
            plan = self._plan = _divide(inputs, key_cache)
        outputs = torch.empty_like(queries)
        for group in plan.groups:
            keys, values = _gather(key_cache, group.rows_of_cache), _gather(value_cache, group.rows_of_cache)
            outputs[group.rows] = _attend_single(queries[group.rows], keys, values, group.is_seen, scale)
        for chunk in plan.chunks:
            rows = slice(chunk.start, chunk.start + chunk.query_len)
            keys = _gather(key_cache, chunk.rows_of_cache)[:, :, : chunk.context_len]
            values = _gather(value_cache, chunk.rows_of_cache)[:, :, : chunk.context_len]
            outputs[rows] = _attend_chunk(queries[rows], keys, values, scale)
        return outputs


def _divide(inputs: ForwardInputs, cache: Tensor) -> _Plan:
    query_lens, context_lens = inputs.host_query_lens, inputs.host_context_lens
    _, num_kv_heads, block_size, head_dim = cache.shape
    num_blocks = -(-context_lens // block_size)
    first_rows = torch.arange(num_kv_heads, device=cache.device)[:, None]

    def rows_of_cache(block_tables: Tensor) -> Tensor:
        return block_tables[:, None].long() * num_kv_heads + first_rows

    def group(members: Tensor, longest: int) -> _Group:
        positions = torch.arange(longest * block_size, device=cache.device)
        return _Group(
            rows=inputs.query_starts[members].long(),
            rows_of_cache=rows_of_cache(inputs.block_tables[members, :longest]),
            is_seen=positions < inputs.context_lens[members, None],
        )

    def chunk(sequence: int, start: int) -> _Chunk:
        return _Chunk(
            start=start,
            query_len=int(query_lens[sequence]),
            context_len=int(context_lens[sequence]),
            rows_of_cache=rows_of_cache(inputs.block_tables[sequence, : num_blocks[sequence]][None]),
        )

    block_bytes = 2 * num_kv_heads * block_size * head_dim * cache.itemsize
    groups = _grouped(np.flatnonzero(query_lens == 1), num_blocks, block_bytes)
    starts = np.cumsum(query_lens) - query_lens
    return _Plan(
        inputs=inputs,
        groups=tuple(
            group(members, int(num_blocks[sequences[0]]))
            for sequences, members in zip(groups, _on_device(groups, cache.device), strict=True)
        ),
        chunks=tuple(
            chunk(sequence, int(starts[sequence])) for sequence in np.flatnonzero(query_lens > 1).tolist()
        ),
    )


def _grouped(sequences: IntArray, num_blocks: IntArray, block_bytes: int) -> list[IntArray]:
    """Sequences [N] in groups, longest first; at most half of what a group copies lies behind contexts."""
    ordered = sequences[np.argsort(-num_blocks[sequences], kind="stable")]
    doublings = np.ceil(np.log2(np.maximum(num_blocks[ordered], _MIN_GROUP_BLOCKS)))
    groups: list[IntArray] = []
    for alike in np.split(ordered, np.flatnonzero(np.diff(doublings)) + 1) if len(ordered) else ():
        num_at_once = max(1, _MAX_BYTES // (int(num_blocks[alike[0]]) * block_bytes))
        groups += np.split(alike, range(num_at_once, len(alike), num_at_once))
    return groups


def _on_device(groups: list[IntArray], device: torch.device) -> tuple[Tensor, ...]:
    """The same as tensors, by one copy that nobody waits for."""
    if not groups:
        return ()
    joined = torch.from_numpy(np.concatenate(groups))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return torch.split(joined, [len(sequences) for sequences in groups])


def _gather(cache: Tensor, rows_of_cache: Tensor) -> Tensor:
    """Blocks [N, KV, B] of a cache as [N, KV, B * block_size, D], a copy."""
    return cache.view(-1, *cache.shape[2:])[rows_of_cache].flatten(2, 3)


def _attend_single(queries: Tensor, keys: Tensor, values: Tensor, is_seen: Tensor, scale: float) -> Tensor:
    """Queries [N, H, D], one of each sequence, over its own keys [N, KV, C, D] where they are seen [N, C]."""
    # What lies behind a context belongs to others: even a NaN of theirs must not get through the mask.
    is_unseen = ~is_seen[:, None, :, None]
    keys.masked_fill_(is_unseen, 0)
    values.masked_fill_(is_unseen, 0)
    # Query heads that share a key head become the rows of one product, so keys are not repeated.
    grouped = queries.view(len(queries), keys.shape[1], -1, queries.shape[2])
    outputs = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=is_seen[:, None, None, :], scale=scale
    )
    return outputs.flatten(1, 2)


def _attend_chunk(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The last Q positions of one sequence: queries [Q, H, D] over keys [1, KV, C, D]; gives [Q, H, D]."""
    query_len, num_heads, head_dim = queries.shape
    num_kv_heads, context_len = keys.shape[1:3]
    num_at_once = max(1, _MAX_BYTES // (num_heads * context_len * torch.float32.itemsize))
    if query_len == context_len:
        whole = queries.transpose(0, 1)[None]
        # It keeps no scores.
        is_flash = can_use_flash_attention(SDPAParams(whole, keys, values, None, 0.0, True, True))
        if is_flash or query_len <= num_at_once:
            outputs = scaled_dot_product_attention(
                whole, keys, values, is_causal=True, scale=scale, enable_gqa=True
            )
            return outputs[0].transpose(0, 1)
    positions = torch.arange(context_len, device=queries.device)
    outputs = torch.empty_like(queries)
    for start in range(0, query_len, num_at_once):
        tile = queries[start : start + num_at_once]
        num_seen = context_len - query_len + start + len(tile)
        is_seen = positions[:num_seen] <= positions[num_seen - len(tile) : num_seen, None]
        # As with single tokens, but each of the tile's tokens is a row for each of these heads.
        rows = tile.view(len(tile), num_kv_heads, -1, head_dim).transpose(0, 1)
        mixed = scaled_dot_product_attention(
            rows.flatten(1, 2)[None],
            keys[:, :, :num_seen],
            values[:, :, :num_seen],
            attn_mask=is_seen.repeat_interleave(rows.shape[2], dim=0),
            scale=scale,
        )
        outputs[start : start + len(tile)] = mixed[0].view(rows.shape).transpose(0, 1).flatten(1, 2)
    return outputs
