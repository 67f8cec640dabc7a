"""The largest step: within its limits, as large as they allow, mixed."""

import pytest
from headrace_shard.engine import Engine
from headrace_shard.errors import OutOfMemory
from headrace_shard.warmup import largest_step, longest_decode, num_blocks_for
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


@pytest.mark.parametrize(
    ("max_context_len", "num_sequences"), [(1, 32), (400, 32), (2**13, 16), (2**16, 2), (2**17 + 5, 1)]
)
def test_longest_decode_looks_back_at_what_fits_its_tokens(max_context_len: int, num_sequences: int) -> None:
    step = longest_decode(
        max_step_sequences=32, max_context_len=max_context_len, vocab_size=50, block_size=16, num_blocks=33
    )
    assert [len(sequence.token_ids) for sequence in step.new_sequences] == [max_context_len] * num_sequences
    assert all(sequence.num_computed_tokens == max_context_len - 1 for sequence in step.new_sequences)
    assert step.num_tokens.tolist() == [1] * num_sequences
    assert step.num_new_blocks.sum() == len(step.new_blocks) == num_sequences * -(-max_context_len // 16)
    assert max(step.new_blocks) < 33
    # Nobody else holds the block that is written to.
    tables = step.new_blocks.reshape(num_sequences, -1)
    assert not set(tables[:, -1]) & set(tables[:, :-1].flat)
    assert len(set(tables[:, -1])) == num_sequences


def test_longest_decode_can_be_executed(engine: Engine) -> None:
    step = longest_decode(
        max_step_sequences=32, max_context_len=512, vocab_size=384, block_size=16, num_blocks=64
    )
    result = engine.step(step)
    assert not result.errors
    assert len(result.token_ids) == 32


def test_blocks_are_capped_by_the_tokens_that_are_wanted() -> None:
    common = {"available_bytes": 1000, "block_bytes": 10, "block_size": 16}
    assert num_blocks_for(**common, max_total_tokens=0) == 100
    assert num_blocks_for(**common, max_total_tokens=161) == 11
    assert num_blocks_for(**common, max_total_tokens=10**9) == 100


def test_no_block_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"may take 0\.0 MiB, but one block of 16 tokens takes 2\.0 MiB"):
        num_blocks_for(available_bytes=5000, block_bytes=2 * 2**20, block_size=16, max_total_tokens=0)
