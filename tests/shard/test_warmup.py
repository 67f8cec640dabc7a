"""The largest step: within its limits, as large as they allow, mixed."""

import pytest
from headrace_shard.errors import OutOfMemory
from headrace_shard.warmup import largest_step, num_blocks_for
from hypothesis import given
from hypothesis import strategies as st

limits = st.integers(1, 300)


@given(limits, limits, st.integers(2, 100))
def test_step_is_as_large_as_the_limits_allow(
    num_tokens: int, num_sequences: int, max_positions: int
) -> None:
    step = largest_step(
        max_step_tokens=num_tokens,
        max_step_sequences=num_sequences,
        max_positions=max_positions,
        vocab_size=50,
        block_size=16,
    )
    lengths = step.num_tokens.tolist()
    assert sum(lengths) == min(num_tokens, num_sequences * max_positions)
    assert len(lengths) == min(num_tokens, num_sequences)
    assert all(1 <= length <= max_positions for length in lengths)
    assert [len(sequence.token_ids) for sequence in step.new_sequences] == lengths
    assert all(
        0 <= sequence.token_ids.min() <= sequence.token_ids.max() < 50 for sequence in step.new_sequences
    )
    assert step.num_new_blocks.tolist() == [-(-length // 16) for length in lengths]
    assert step.new_blocks.tolist() == list(range(sum(step.num_new_blocks.tolist())))


def test_blocks_are_capped_by_the_tokens_that_are_wanted() -> None:
    common = {"available_bytes": 1000, "block_bytes": 10, "block_size": 16}
    assert num_blocks_for(**common, max_total_tokens=0) == 100
    assert num_blocks_for(**common, max_total_tokens=161) == 11
    assert num_blocks_for(**common, max_total_tokens=10**9) == 100


def test_no_block_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"may take 0\.0 MiB, but one block of 16 tokens takes 2\.0 MiB"):
        num_blocks_for(available_bytes=5000, block_bytes=2 * 2**20, block_size=16, max_total_tokens=0)
