"""BlockPool: every block is free or held, never both."""

import pytest
from headrace_router.scheduling.blocks import BlockPool
from hypothesis import given
from hypothesis import strategies as st


def test_takes_the_lowest_first_and_refuses_more_than_there_are() -> None:
    pool = BlockPool(4, 16)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(0) == []
    with pytest.raises(ValueError, match="2 blocks wanted, 1 are free"):
        pool.take(2)
    assert (pool.num_free, pool.num_used) == (1, 3)


def test_counts_blocks_for_tokens() -> None:
    pool = BlockPool(4, 16)
    assert [pool.num_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_block_is_lost_or_held_twice(moves: list[tuple[bool, int]]) -> None:
    pool, held = BlockPool(16, 4), list[list[int]]()
    for takes, number in moves:
        if takes and number <= pool.num_free:
            held.append(pool.take(number))
        elif held:
            pool.give(held.pop(number % len(held)))
        out = [block for blocks in held for block in blocks]
        assert len(out) == len(set(out)) == pool.num_used
        assert pool.num_free == 16 - len(out)
    for blocks in held:
        pool.give(blocks)
    assert sorted(pool.take(16)) == list(range(16))
