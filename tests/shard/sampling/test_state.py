"""What a sequence keeps from batch to batch."""

import numpy as np
import pytest
import torch
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.sampler import SamplingBatch
from headrace_shard.sampling.state import Penalties, lay_progress

from tests.shard.allocations import Largest
from tests.shard.sampling.rows import sequence, table

_ALL = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2)
_COUNTS = SamplingParams(frequency_penalty=0.2)
_REPETITION = SamplingParams(repetition_penalty=1.1)


def test_only_what_penalties_need_is_kept() -> None:
    plain = sequence(SamplingParams(), 10, [1, 2], [3])
    assert plain.row is None
    repeating = sequence(_REPETITION, 10, [1, 2], [3])
    counting = sequence(_COUNTS, 10, [1, 2], [3, 3])
    assert repeating.num_history == 3 and counting.num_history == 2
    assert table(10).history[repeating.row, :3].tolist() == [1, 2, 3]
    assert table(10).history[counting.row, :2].tolist() == [3, 3]
    assert table(10).counts[counting.row].tolist() == [0, 0, 0, 2] + [0] * 6


def test_row_of_a_closed_sequence_serves_the_next_one() -> None:
    first = sequence(_ALL, 10, [1, 2], [3] * 300)
    second = sequence(_ALL, 10, [4], [5])
    first.close()
    third = sequence(_ALL, 10, [6], [7])
    assert third.row == first.row != second.row
    penalties = Penalties([third, second])
    penalties.append(torch.tensor([8, 9]))
    assert touched(penalties) == [{(6, 0), (7, 1), (8, 1)}, {(4, 0), (5, 1), (9, 1)}]
    sequence(SamplingParams(), 10).close()


def test_tables_grow_with_what_they_hold() -> None:
    sequences = [sequence(_ALL, 10, [number % 10], [2] * number) for number in range(1000)]
    expected = [{(number % 10, number if number % 10 == 2 else 0), (2, number)} for number in range(1000)]
    assert touched(Penalties(sequences[1:])) == expected[1:]


def test_building_a_batch_moves_no_counts_and_no_history() -> None:
    vocab_size = 50_000
    sequences = [sequence(_ALL, vocab_size, [1] * 2000) for _ in range(8)]
    largest = Largest()
    with largest:
        SamplingBatch(sequences)
    assert largest.num_bytes < vocab_size


def touched(penalties: Penalties) -> list[set[tuple[int, int]]]:
    """Token ids and counts of each row."""
    ids, counts = penalties.touched()
    return [set(zip(*row, strict=True)) for row in zip(ids.tolist(), counts.tolist(), strict=True)]


def test_arrays_are_taken_too() -> None:
    made = sequence(_ALL, 10, np.array([1, 2]), np.array([3]))  # type: ignore[arg-type]
    assert made.num_generated == 1
    assert made.num_history == 3


@pytest.mark.parametrize(
    ("params", "prompt", "output", "message"),
    [
        (_ALL, [], [], "no token"),
        (_ALL, [10], [], "prompt has token id 10"),
        (_ALL, [-1], [], "prompt has token id -1"),
        (_ALL, [1], [11], "output has token id 11"),
        (SamplingParams(logit_bias=((12, 1.0),)), [1], [], "logit_bias has token id 12; .* 0 to 9"),
        (SamplingParams(suppressed_token_ids=(13,)), [1], [], "suppressed_token_ids has token id 13"),
    ],
)
def test_refuses_ids_outside_the_vocabulary(
    params: SamplingParams, prompt: list[int], output: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sequence(params, 10, prompt, output)


def test_appended_tokens_are_counted_and_touched() -> None:
    sequences = [
        sequence(_ALL, 10, [1, 2]),
        sequence(_COUNTS, 10, [1, 2], [5]),
        sequence(_REPETITION, 10, [7]),
    ]
    progress = lay_progress(sequences)
    penalties = Penalties(sequences)
    for step in range(200):
        penalties.append(torch.tensor([4, 5, step % 10]))
        progress += 1
    assert touched(penalties)[0] == {(1, 0), (2, 0), (4, 200)}
    assert touched(penalties)[1] == {(5, 201)}
    assert {token_id for token_id, _ in touched(penalties)[2]} == set(range(10))
    assert [s.num_generated for s in sequences] == [200, 201, 200]


def test_next_batch_goes_on_where_the_last_one_was() -> None:
    first, second = sequence(_ALL, 10, [1, 2]), sequence(_COUNTS, 10, [8] * 300)
    progress = lay_progress([first, second])
    Penalties([first, second]).append(torch.tensor([3, 4]))
    progress += 1
    third = sequence(_ALL, 10, [9])
    progress = lay_progress([third, first])
    penalties = Penalties([third, first])
    penalties.append(torch.tensor([6, 3]))
    progress += 1
    ids, counts = penalties.touched()
    assert touched(penalties)[0] == {(9, 0), (6, 1)}
    assert dict(zip(ids[1].tolist(), counts[1].tolist(), strict=True)) == {1: 0, 2: 0, 3: 2}
    assert ids.shape[1] == 4
    assert first.num_generated == 2
    assert second.num_generated == 1
