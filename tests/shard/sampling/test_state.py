"""What a sequence keeps, and takes from batch to batch."""

import numpy as np
import pytest
import torch
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.state import Penalties, lay_progress

from tests.shard.sampling.rows import sequence

_ALL = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2)
_COUNTS = SamplingParams(frequency_penalty=0.2)
_REPETITION = SamplingParams(repetition_penalty=1.1)


def test_only_what_penalties_need_is_kept() -> None:
    plain = sequence(SamplingParams(), 10, [1, 2], [3])
    assert plain.counts is None and plain.history is None
    repeating = sequence(_REPETITION, 10, [1, 2], [3])
    assert repeating.counts is None
    assert repeating.history is not None and repeating.history.tolist() == [1, 2, 3]
    counting = sequence(_COUNTS, 10, [1, 2], [3, 3])
    assert counting.history is not None and counting.history.tolist() == [3, 3]
    assert counting.counts is not None and counting.counts.tolist() == [0, 0, 0, 2] + [0] * 6
    assert counting.counts.dtype == torch.int32


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
    ids, counts = penalties.touched()
    touched = [{(int(a), int(b)) for a, b in zip(*row, strict=True)} for row in zip(ids, counts, strict=True)]
    assert touched[0] == {(1, 0), (2, 0), (4, 200)}
    assert touched[1] == {(5, 201)}
    assert touched[2] == {(token_id, 0) for token_id in range(10)}
    assert [s.num_generated for s in sequences] == [200, 201, 200]


def test_a_sequence_takes_its_state_to_the_next_batch() -> None:
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
    assert set(ids[0].tolist()) == {9, 6}
    assert dict(zip(ids[1].tolist(), counts[1].tolist(), strict=True)) == {1: 0, 2: 0, 3: 2}
    assert ids.shape[1] == 4
    assert first.num_generated == 2
    assert second.num_generated == 1
