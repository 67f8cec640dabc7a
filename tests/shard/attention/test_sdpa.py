"""The sdpa backend against attention written out in float64, one query at a time."""

import numpy as np
import pytest
import torch
from headrace_shard.attention import sdpa
from headrace_shard.attention.sdpa import SdpaBackend
from headrace_shard.inputs import ForwardInputs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.shard.allocations import Largest
from tests.shard.stepping import Paged

HEAD_DIM = 8
SCALE = 0.3


def one_by_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last Q positions of a sequence: queries [Q, H, D], keys and values [C, KV, D]; gives [Q, H, D]."""
    num_heads, offset = queries.shape[1], len(keys) - len(queries)
    keys, values = (part.repeat_interleave(num_heads // part.shape[1], dim=1) for part in (keys, values))
    outputs = torch.empty_like(queries)
    for row in range(len(queries)):
        for head in range(num_heads):
            seen = slice(0, offset + row + 1)
            weights = (keys[seen, head] @ queries[row, head] * SCALE).softmax(0)
            outputs[row, head] = weights @ values[seen, head]
    return outputs


def attend(
    steps: list[tuple[int, int]], num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What the backend and the definition give for sequences of (tokens before, tokens in the step)."""
    torch.manual_seed(0)
    backend = SdpaBackend()
    paged = Paged(backend.block_size, num_blocks=64)
    shape = backend.cache_shape(64, num_kv_heads, HEAD_DIM)
    # What nobody has written is NaN, so that nothing unwritten can be read unnoticed.
    key_cache, value_cache = (
        torch.full(shape, torch.nan, dtype=dtype),
        torch.full(shape, torch.nan, dtype=dtype),
    )
    keys = [torch.randn(before + count, num_kv_heads, HEAD_DIM).to(dtype) for before, count in steps]
    values = [torch.randn_like(part) for part in keys]

    def write(inputs: ForwardInputs, starts: list[int], ends: list[int]) -> None:
        cuts = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        new_keys = torch.cat([part[cut] for part, cut in zip(keys, cuts, strict=True)])
        new_values = torch.cat([part[cut] for part, cut in zip(values, cuts, strict=True)])
        backend.write(new_keys, new_values, key_cache, value_cache, inputs.slots)

    befores, totals = [before for before, _ in steps], [before + count for before, count in steps]
    for name, total in enumerate(totals):
        paged.add(str(name), [0] * total)
    if any(befores):
        past = {str(name): before for name, before in enumerate(befores) if before}
        write(paged.inputs(past), [0] * len(steps), befores)
    inputs = paged.inputs({str(name): count for name, (_, count) in enumerate(steps)})
    write(inputs, befores, totals)
    queries = [torch.randn(count, num_heads, HEAD_DIM).to(dtype) for _, count in steps]
    outputs = backend.attend(torch.cat(queries), key_cache, value_cache, inputs, SCALE)
    expected = [
        one_by_one(q.double(), k.double(), v.double()) for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return outputs, torch.cat(expected)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    max_bytes=st.sampled_from([1, 1000, 10_000, 10**9]),
)
def test_any_mix_of_chunks_and_decodes(
    steps: list[tuple[int, int]], heads: tuple[int, int], max_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "_MAX_BYTES", max_bytes)
        outputs, expected = attend(steps, *heads, torch.float32)
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(befores=st.lists(st.integers(0, 70), min_size=1, max_size=6))
def test_pure_decode(befores: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "_MIN_GROUP_BLOCKS", 1)
        outputs, expected = attend([(before, 1) for before in befores], 4, 2, torch.float32)
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    outputs, expected = attend([(33, 5), (20, 1), (0, 16)], 4, 2, dtype)
    assert outputs.dtype == dtype
    torch.testing.assert_close(outputs.double(), expected, rtol=tolerance, atol=tolerance)


def test_steps_of_one_backend_are_planned_each_for_itself() -> None:
    backend = SdpaBackend()
    shape = backend.cache_shape(8, 1, HEAD_DIM)
    cache = torch.ones(shape)
    for num_tokens in (3, 5):
        paged = Paged(backend.block_size, num_blocks=8)
        paged.add("a", [0] * num_tokens)
        queries = torch.ones(num_tokens, 1, HEAD_DIM)
        assert (
            backend.attend(queries, cache, cache, paged.inputs({"a": num_tokens}), SCALE).shape
            == queries.shape
        )


def largest_of(steps: list[tuple[int, int]]) -> int:
    """Largest tensor that attention makes for sequences of (tokens before, tokens in the step), 4 heads."""
    backend = SdpaBackend()
    num_blocks = sum(-(-(before + count) // backend.block_size) for before, count in steps)
    paged = Paged(backend.block_size, num_blocks)
    for name, (before, count) in enumerate(steps):
        paged.add(str(name), [0] * (before + count))
    past = {str(name): before for name, (before, _) in enumerate(steps) if before}
    if past:
        paged.inputs(past)
    inputs = paged.inputs({str(name): count for name, (_, count) in enumerate(steps)})
    cache = torch.zeros(backend.cache_shape(num_blocks, 2, HEAD_DIM))
    queries = torch.zeros(len(inputs.token_ids), 4, HEAD_DIM)
    largest = Largest()
    with largest:
        backend.attend(queries, cache, cache, inputs, SCALE)
    return largest.num_bytes


TOKEN_BYTES = 2 * HEAD_DIM * 4
"""Of the keys of one token, and of its values."""


def test_long_context_costs_no_memory_for_the_short_ones_beside_it() -> None:
    alone = largest_of([(4000, 1)])
    assert alone >= 4000 * TOKEN_BYTES
    assert largest_of([(15, 1)] * 31 + [(4000, 1)] + [(15, 1)] * 32) == alone


def test_what_is_gathered_for_several_sequences_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_MAX_BYTES", 2 * 3 * 512 * TOKEN_BYTES)
    assert largest_of([(511, 1)] * 20) == 3 * 512 * TOKEN_BYTES


@pytest.mark.parametrize("before", [0, 1500])
def test_scores_of_a_chunk_are_bounded(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    bound = 2**18
    monkeypatch.setattr(sdpa, "_MAX_BYTES", bound)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        largest = largest_of([(before, 500)])
    assert largest <= max(bound, (before + 500) * TOKEN_BYTES)
    assert bound < 4 * 500 * (before + 500) * 4


def test_groups_hold_everybody_once_and_little_else() -> None:
    num_blocks = np.array([1, 1000, 3, 9, 8, 17, 16, 100, 64, 1])
    groups = sdpa._grouped(np.array([0, 1, 2, 3, 5, 6, 7, 8, 9]), num_blocks, block_bytes=2**20)
    assert [group.tolist() for group in groups] == [[1], [7], [8], [5], [6, 3], [2, 0, 9]]
