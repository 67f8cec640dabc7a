"""WaitingQueue: first in, first out, preempted ones in front, anybody may leave."""

import pytest
from headrace_router.scheduling.queue import WaitingQueue
from headrace_router.scheduling.request import Request, SamplingParams, Sequence


def _sequence(number: int) -> Sequence:
    request = Request(prompt_ids=(1,), sampling=SamplingParams(), max_new_tokens=1)
    return Sequence(id=number, request=request, arrived_at=0.0)


def test_order() -> None:
    queue, sequences = WaitingQueue(), [_sequence(number) for number in range(5)]
    for sequence in sequences[2:]:
        queue.push(sequence)
    queue.push_front(sequences[1])
    queue.push_front(sequences[0])
    assert [sequence.id for sequence in queue] == [0, 1, 2, 3, 4]
    queue.remove(sequences[2])
    assert [sequence.id for sequence in queue] == [0, 1, 3, 4]
    assert len(queue) == 4
    with pytest.raises(KeyError):
        queue.remove(sequences[2])
