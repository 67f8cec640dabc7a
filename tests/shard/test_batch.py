"""Rows, block tables and lengths of a batch against a plain model of dicts and lists."""

import numpy as np
import torch
from headrace_shard.batch import Batch
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")


def make_batch() -> Batch:
    return Batch(CPU, block_size=16)


def add(batch: Batch, sequence_id: int, tokens: list[int], *, num_computed: int = 0) -> None:
    batch.add(
        sequence_id,
        np.array(tokens, dtype=np.int64),
        num_prompt=len(tokens),
        num_computed=num_computed,
        num_top=0,
        num_prompt_top=None,
    )


def tokens_of(batch: Batch, sequence_id: int) -> list[int]:
    row = batch.row_of[sequence_id]
    ids: list[int] = batch.tokens[row, : int(batch.num_tokens[row])].tolist()
    return ids


def test_added_sequence_is_kept() -> None:
    batch = make_batch()
    add(batch, 2**63 + 1, [5, 6, 7], num_computed=2)
    row = batch.rows([2**63 + 1])
    assert tokens_of(batch, 2**63 + 1) == [5, 6, 7]
    assert batch.num_tokens[row].tolist() == [3]
    assert batch.num_computed[row].tolist() == [2]
    assert batch.num_blocks[row].tolist() == [0]
    assert batch.num_prompt_top[row].tolist() == [-1]
    assert len(batch) == 1


def test_rows_are_reused() -> None:
    batch = make_batch()
    for number in range(1000):
        add(batch, number, [1])
        batch.drop([number])
    assert len(batch.num_tokens) == 16


def test_dropping_unknown_ids_is_no_error() -> None:
    batch = make_batch()
    add(batch, 1, [1])
    assert batch.drop([1, 2, 1]) == 1
    assert batch.drop([1]) == 0


def test_growing_rows_and_tokens_keeps_what_is_there() -> None:
    batch = make_batch()
    for number in range(40):
        add(batch, number, list(range(number, number + 1 + 20 * number)))
        rows = batch.rows([number])
        batch.grow_blocks(rows, np.array([number]), np.arange(number))
    for number in range(40):
        assert tokens_of(batch, number) == list(range(number, number + 1 + 20 * number))
        row = batch.row_of[number]
        assert batch.block_table[row, :number].tolist() == list(range(number))


def test_appended_tokens_follow_the_others() -> None:
    batch = make_batch()
    add(batch, 1, list(range(300)))
    add(batch, 2, [9])
    for new in range(700):
        rows = batch.rows([2, 1])
        columns = torch.from_numpy(batch.num_tokens[rows])
        batch.append(torch.from_numpy(rows), columns, torch.tensor([new, new + 1]))
        batch.advance(rows, np.array([1, 1]), rows)
    assert tokens_of(batch, 1) == [*range(300), *range(1, 701)]
    assert tokens_of(batch, 2) == [9, *range(700)]
    assert batch.num_computed[batch.rows([1, 2])].tolist() == [700, 700]


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 7), st.integers(0, 5)), min_size=1, max_size=8, unique_by=lambda g: g[0]
        )
    )
)
def test_block_tables_hold_what_was_granted(grants: list[list[tuple[int, int]]]) -> None:
    batch = make_batch()
    held: dict[int, list[int]] = {number: [] for number in range(8)}
    for number in held:
        add(batch, number, [1])
    next_block = 0
    for step in grants:
        new = list(range(next_block, next_block + sum(count for _, count in step)))
        next_block += len(new)
        rows = batch.rows([number for number, _ in step])
        batch.grow_blocks(rows, np.array([count for _, count in step]), np.array(new, dtype=np.int64))
        for number, count in step:
            held[number] += new[:count]
            new = new[count:]
    for number, blocks in held.items():
        row = batch.row_of[number]
        assert batch.block_table[row, : len(blocks)].tolist() == blocks
        assert batch.num_blocks[row] == len(blocks)


@given(
    st.lists(st.tuples(st.integers(0, 7), st.lists(st.integers(0, 200), max_size=6) | st.none()), max_size=30)
)
def test_holders_of_blocks_are_counted(events: list[tuple[int, list[int] | None]]) -> None:
    batch = make_batch()
    held: dict[int, list[int]] = {}
    for number, blocks in events:
        if blocks is None:
            batch.drop([number, 99])
            held.pop(number, None)
            continue
        if number not in held:
            add(batch, number, [1])
            held[number] = []
        batch.grow_blocks(batch.rows([number]), np.array([len(blocks)]), np.array(blocks, dtype=np.int64))
        held[number] += blocks
    everything = [block for blocks in held.values() for block in blocks]
    counts = batch.num_holders(np.arange(300))
    assert counts.tolist() == [everything.count(block) for block in range(300)]
