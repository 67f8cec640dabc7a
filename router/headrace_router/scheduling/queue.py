"""Who waits, and in which order. Knows nothing of blocks, budgets or why somebody waits."""

from collections import OrderedDict
from collections.abc import Iterator

from headrace_router.scheduling.request import Sequence


class WaitingQueue:
    """First in, first out. Preempted sequences come back to the front; anybody may leave from anywhere."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """From the front; the queue must not change meanwhile."""
        return iter(self._sequences.values())

    def push(self, sequence: Sequence) -> None:
        """Joins at the back."""
        self._sequences[sequence.id] = sequence

    def push_front(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence
        self._sequences.move_to_end(sequence.id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Leaves from wherever it stands. Raises `KeyError` when it does not wait."""
        del self._sequences[sequence.id]
