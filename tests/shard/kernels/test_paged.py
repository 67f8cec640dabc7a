"""The kernels against attention written out in float64, on every path of their sources."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from headrace_shard.kernels.build import BLOCK_SIZE
from headrace_shard.kernels.paged import PagedKernels, cache_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.kernels.dense import Step, laid_out, make_step

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# Decodes, chunks at offsets, a first chunk; lengths around the borders of blocks and tiles.
MIXED = [(0, 1), (319, 1), (511, 1), (512, 1), (0, 40), (506, 13), (1024, 5), (37, 70), (15, 1)]


def assert_right(step: Step, kernels: PagedKernels) -> None:
    outputs = step.attend(kernels)
    assert outputs.dtype == step.queries.dtype
    tolerance = TOLERANCES[outputs.dtype]
    torch.testing.assert_close(outputs.double(), step.dense(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 20, 7])
def test_every_format_and_head_size(any_kernels: PagedKernels, dtype: torch.dtype, head_dim: int) -> None:
    assert_right(make_step(MIXED, dtype=dtype, num_kv_heads=2, group=3, head_dim=head_dim), any_kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(3, 1), (3, 3), (2, 4), (1, 8), (1, 100)])
def test_every_group_of_heads(
    any_kernels: PagedKernels, dtype: torch.dtype, num_kv_heads: int, group: int
) -> None:
    assert_right(make_step(MIXED, dtype=dtype, num_kv_heads=num_kv_heads, group=group), any_kernels)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 60)), min_size=1, max_size=6),
    group=st.integers(1, 9),
    head_dim=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
)
def test_any_step(
    built: Callable[[str], PagedKernels],
    steps: list[tuple[int, int]],
    group: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    assert_right(make_step(steps, dtype=dtype, group=group, head_dim=head_dim), built("native"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strong_scores_and_far_outliers(kernels: PagedKernels, dtype: torch.dtype) -> None:
    step = make_step([(700, 1), (300, 20)], dtype=dtype, group=3)
    assert_right(replace(step, scale=0.0), kernels)
    # Scores in the hundreds keep fewer digits behind the point.
    strong = replace(step, scale=4.0)
    tolerance = 20 * TOLERANCES[dtype]
    torch.testing.assert_close(
        strong.attend(kernels).double(), strong.dense(), rtol=tolerance, atol=tolerance
    )


def test_nan_of_one_sequence_stays_in_it(kernels: PagedKernels) -> None:
    step = make_step([(300, 1), (300, 1)], dtype=torch.bfloat16, group=3)
    step.key_cache[step.block_tables[0, 2]] = torch.nan
    outputs = step.attend(kernels)
    assert outputs[0].isnan().all()
    torch.testing.assert_close(outputs[1].double(), step.dense()[1], rtol=2e-2, atol=2e-2)


def alone(step: Step, sequence: int, first: int, end: int, context_len: int) -> Step:
    """Tokens first to end - 1 of one sequence of a step, as a step of their own."""
    start = int(step.query_starts[sequence])
    return replace(
        step,
        queries=step.queries[start + first : start + end],
        query_starts=torch.tensor([0, end - first], dtype=torch.int32),
        context_lens=torch.tensor([context_len], dtype=torch.int32),
        block_tables=step.block_tables[sequence : sequence + 1].contiguous(),
    )


def chunks(step: Step, sequence: int, size: int) -> list[Step]:
    """The tokens of one sequence of a step, so many at a time."""
    start, end = step.query_starts[sequence : sequence + 2].tolist()
    count, num_before = end - start, int(step.context_lens[sequence]) - (end - start)
    borders = [*range(0, count, size), count]
    return [alone(step, sequence, first, last, num_before + last) for first, last in pairwise(borders)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_batch_chunks_or_threads(
    kernels: PagedKernels, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    step = make_step([(1500, 1), (230, 61), (0, 9), (777, 1)], dtype=dtype, num_kv_heads=2, group=3)
    set_threads(1)
    together = step.attend(kernels)
    for num_threads in (1, 2, 5):
        set_threads(num_threads)
        assert torch.equal(step.attend(kernels), together)
        for sequence, (start, end) in enumerate(pairwise(step.query_starts.tolist())):
            for size in (1, 7, end - start):
                outputs = torch.cat([piece.attend(kernels) for piece in chunks(step, sequence, size)])
                assert torch.equal(outputs, together[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(16, 1), (80, 8), (20, 5), (7, 4), (2, 40), (48, 16)])
def test_no_bit_depends_on_chunks_of_any_head_size(
    any_kernels: PagedKernels,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    set_threads: Callable[[int], None],
) -> None:
    """Heads that fill no matrix register, and chunks around its 16 rows and the 32 of a group.

    The contexts have one block, an odd number of them, or an odd number behind a tile of 512 tokens; they
    grow past borders of blocks within the step, so that rows of one group see unlike numbers of blocks.
    """
    steps = [(0, 1), (0, 70), (38, 9), (500, 33), (1030, 1)]
    step = make_step(steps, dtype=dtype, num_kv_heads=2, group=group, head_dim=head_dim)
    set_threads(1)
    together = step.attend(any_kernels)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(together.double(), step.dense(), rtol=tolerance, atol=tolerance)
    for num_threads, sizes in ((1, (1, 2, 4, 11, 16, 17, 32, 33)), (3, (1, 5, 70))):
        set_threads(num_threads)
        assert torch.equal(step.attend(any_kernels), together)
        for sequence, (start, end) in enumerate(pairwise(step.query_starts.tolist())):
            for size in sizes:
                pieces = chunks(step, sequence, size)
                outputs = torch.cat([piece.attend(any_kernels) for piece in pieces])
                assert torch.equal(outputs, together[start:end])


def test_queries_may_be_a_slice_of_a_fused_projection(kernels: PagedKernels) -> None:
    step = make_step(MIXED, dtype=torch.bfloat16, num_kv_heads=2, group=3)
    num_tokens, num_heads, head_dim = step.queries.shape
    fused = torch.full((num_tokens, num_heads + 4, head_dim), torch.nan, dtype=torch.bfloat16)
    fused[:, :num_heads] = step.queries
    outputs = replace(step, queries=fused[:, :num_heads]).attend(kernels)
    assert torch.equal(outputs, step.attend(kernels))
    transposed = step.queries.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(replace(step, queries=transposed).attend(kernels), outputs)


def test_no_sequences(kernels: PagedKernels) -> None:
    step = make_step([(3, 1)])
    empty = replace(
        step,
        queries=step.queries[:0],
        query_starts=step.query_starts[:1],
        context_lens=step.context_lens[:0],
        block_tables=step.block_tables[:0],
    )
    assert empty.attend(kernels).shape == (0, 1, 64)


def test_wrong_cache_is_caught(kernels: PagedKernels) -> None:
    step = make_step([(3, 1)])
    with pytest.raises(AssertionError):
        replace(step, key_cache=step.key_cache.half()).attend(kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(0, 20), (1, 64), (37, 20), (37, 7), (3000, 20)])
def test_write(any_kernels: PagedKernels, dtype: torch.dtype, num_tokens: int, head_dim: int) -> None:
    num_kv_heads, num_blocks = 3, num_tokens // BLOCK_SIZE + 3
    fused = torch.randn(num_tokens, 11, head_dim).to(dtype)
    keys, values = fused[:, 5:8], torch.randn(num_tokens, num_kv_heads, head_dim).to(dtype)
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[:num_tokens]
    shape = cache_shape(num_blocks, num_kv_heads, head_dim)
    assert shape == (num_blocks, num_kv_heads, BLOCK_SIZE, -(-head_dim // 16) * 16)
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    expected = [torch.zeros(*shape[:3], head_dim, dtype=dtype) for _ in range(2)]
    for cache, rows in zip(expected, (keys, values), strict=True):
        cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = rows
    any_kernels.write(keys, values, caches[0], caches[1], slots)
    for cache, wanted in zip(caches, laid_out(any_kernels, *expected), strict=True):
        assert torch.equal(cache, wanted.nan_to_num())


def test_every_half_is_read_and_written_exactly(any_kernels: PagedKernels) -> None:
    """A context of one token has weight 1: its value comes back through float32 as it was."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    halves = halves[~halves.isnan()].view(-1, 1, 10)
    step = make_step([(0, 1)] * len(halves), dtype=torch.float16, head_dim=10)
    step.value_cache[step.block_tables[:, 0].long(), 0, 0] = halves[:, 0]
    assert torch.equal(step.attend(any_kernels), halves)
