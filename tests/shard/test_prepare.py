"""Inputs of a forward pass against the ones that a plain loop over sequences and tokens makes."""

from dataclasses import dataclass

import numpy as np
import torch
from headrace_shard.batch import Batch
from headrace_shard.prepare import PreparedStep, prepare
from hypothesis import given
from hypothesis import strategies as st

BLOCK_SIZE = 4


@dataclass
class Case:
    """One sequence of a step."""

    num_tokens: int
    num_computed: int
    count: int
    num_prompt: int
    num_prompt_top: int | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_tokens = draw(st.integers(1, 40))
    num_computed = draw(st.integers(0, num_tokens - 1))
    return Case(
        num_tokens,
        num_computed,
        draw(st.integers(1, num_tokens - num_computed)),
        draw(st.integers(1, num_tokens)),
        draw(st.none() | st.integers(0, 3)),
    )


def make_batch(sequences: list[Case]) -> Batch:
    """Sequence i holds the tokens 1000 i, 1000 i + 1, ... and the blocks 100 i + 10, 100 i + 9, ..."""
    batch = Batch(torch.device("cpu"), BLOCK_SIZE)
    for number, case in enumerate(sequences):
        batch.add(
            number,
            np.arange(case.num_tokens) + 1000 * number,
            num_prompt=case.num_prompt,
            num_computed=case.num_computed,
            num_top=0,
            num_prompt_top=case.num_prompt_top,
        )
        batch.grow_blocks(batch.rows([number]), np.array([10]), 100 * number + np.arange(10, 0, -1))
    return batch


def prepared(sequences: list[Case], order: list[int], *, max_seconds: float = 0.0) -> PreparedStep:
    batch = make_batch(sequences)
    counts = np.array([sequences[number].count for number in order], dtype=np.int64)
    return prepare(batch, batch.rows(order), counts, max_seconds)


@given(st.lists(cases(), min_size=1, max_size=6), st.randoms())
def test_every_tensor_is_what_a_plain_loop_gives(sequences: list[Case], random: object) -> None:
    order = list(range(len(sequences)))
    random.shuffle(order)  # type: ignore[attr-defined]
    step = prepared(sequences, order)
    inputs = step.inputs
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    sampled: list[int] = []
    prompt_rows: list[int] = []
    targets: list[int] = []
    parts: list[tuple[int, int, int]] = []
    for index, number in enumerate(order):
        case = sequences[number]
        end = case.num_computed + case.count
        for position in range(case.num_computed, end):
            token_ids.append(1000 * number + position)
            positions.append(position)
            slots.append((100 * number + 10 - position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(token_ids))
        if end == case.num_tokens:
            sampled.append(index)
        if case.num_prompt_top is not None:
            wanted = [p for p in range(case.num_computed, end) if p + 1 < case.num_prompt]
            prompt_rows += [starts[-2] + p - case.num_computed for p in wanted]
            targets += [1000 * number + p + 1 for p in wanted]
            if wanted:
                parts.append((index, wanted[0] + 1, len(wanted)))
    assert inputs.token_ids.tolist() == token_ids
    assert inputs.positions.tolist() == positions
    assert inputs.slots.tolist() == slots
    assert step.blocks.tolist() == [slot // BLOCK_SIZE for slot in slots]
    assert inputs.query_starts.tolist() == starts
    lens = [sequences[number].num_computed + sequences[number].count for number in order]
    assert inputs.context_lens.tolist() == lens
    assert inputs.host_context_lens.tolist() == lens
    assert inputs.host_query_lens.tolist() == [sequences[number].count for number in order]
    assert inputs.logit_rows.tolist() == [starts[index + 1] - 1 for index in sampled] + prompt_rows
    assert step.sampled.tolist() == sampled
    assert step.sampled_columns.tolist() == [sequences[order[index]].num_tokens for index in sampled]
    assert step.prompt_targets.tolist() == targets
    assert [(part.index, part.start, part.count) for part in step.prompt_parts] == parts
    for index, number in enumerate(order):
        used = -(-lens[index] // BLOCK_SIZE)
        expected = [100 * number + 10 - block for block in range(used)]
        assert inputs.block_tables[index, :used].tolist() == expected


@given(st.lists(cases(), min_size=1, max_size=6))
def test_only_what_nobody_wants_of_the_last_sequence_may_be_left(sequences: list[Case]) -> None:
    order = list(range(len(sequences)))
    inputs = prepared(sequences, order, max_seconds=0.25).inputs
    last = sequences[-1]
    samples = last.num_computed + last.count == last.num_tokens
    may_be_left = not samples and last.num_prompt_top is None
    assert inputs.max_seconds == (0.25 if may_be_left else 0.0)
    assert inputs.min_tokens == sum(case.count for case in sequences[:-1]) + min(last.count, BLOCK_SIZE)
    if may_be_left:
        assert all(row < inputs.min_tokens for row in inputs.logit_rows.tolist())
    assert prepared(sequences, order).inputs.max_seconds == 0


def test_dtypes_and_layout_are_those_of_forward_inputs() -> None:
    step = prepared([Case(9, 3, 2, 9, 0), Case(5, 4, 1, 5, None)], [1, 0])
    inputs = step.inputs
    for wide in (inputs.token_ids, inputs.positions, inputs.slots, inputs.logit_rows, step.prompt_targets):
        assert wide.dtype == torch.int64
    for narrow in (inputs.query_starts, inputs.context_lens, inputs.block_tables):
        assert narrow.dtype == torch.int32
    assert inputs.block_tables.is_contiguous()


def test_last_row_of_a_chunk_speaks_of_the_first_token_of_the_next() -> None:
    first = prepared([Case(8, 0, 5, 8, 0)], [0])
    second = prepared([Case(8, 5, 3, 8, 0)], [0])
    assert [(part.start, part.count) for part in first.prompt_parts] == [(1, 5)]
    assert [(part.start, part.count) for part in second.prompt_parts] == [(6, 2)]
    assert first.prompt_targets.tolist() + second.prompt_targets.tolist() == [1, 2, 3, 4, 5, 6, 7]
