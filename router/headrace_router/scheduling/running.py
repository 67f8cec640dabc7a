"""Who runs, and the moves between the states of a sequence. Decides nothing; knows no step.

The only writer of `Sequence.status`, see the diagram in `request.py`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from headrace_router.scheduling.memory import Memory
from headrace_router.scheduling.queue import WaitingQueue
from headrace_router.scheduling.request import FinishReason, Sequence, Status

MAX_PREEMPTIONS = 16
"""Times that a sequence gives way to those of a better rank; then nobody has one. Where memory is so short
that it comes back only to be preempted again, it would never end otherwise."""


class Running:
    """The running sequences by rank: first those that gave way often enough, then by priority; the lowest id
    comes first among equals."""

    def __init__(self, memory: Memory, queue: WaitingQueue) -> None:
        self._memory = memory
        self._queue = queue
        self.sequences: list[Sequence] = []
        """By rank; only to be read. Who is preempted leaves from behind whoever it is preempted for."""
        self.dropped_ids: list[int] = []
        """Sequences the shard holds and has not been told to forget."""
        self.late: dict[int, Sequence] = {}
        """Preempted sequences that steps in flight compute still, by id."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def admit(self, sequence: Sequence, now: float) -> None:
        """WAITING → RUNNING, with what was opened of it."""
        if not sequence.is_begun:
            sequence.is_begun = True
            sequence.num_cached = sequence.num_computed
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            # What is computed again after a preemption is not the tenant's doing.
            self._queue.admit(sequence, sequence.num_pending)
        else:
            self._queue.admit(sequence, 0)
        sequence.leader = None
        sequence.status = Status.RUNNING
        sequence.is_known = True
        insort(self.sequences, sequence, key=_rank)

    def requeue(self, sequence: Sequence, num_late: int = 0) -> None:
        """RUNNING → WAITING, without blocks; `num_late` steps in flight will still bring it something."""
        self._leave(sequence)
        if sequence.is_known:
            self.dropped_ids.append(sequence.id)
            sequence.is_known = False
        self._memory.close(sequence)
        sequence.status = Status.WAITING
        sequence.estimated_at = -1
        sequence.num_late = num_late
        if num_late:
            self.late[sequence.id] = sequence
        self._queue.push_front(sequence)

    def arrived(self, sequence: Sequence) -> None:
        """One of the steps that a late sequence waited for was answered."""
        sequence.num_late -= 1
        if not sequence.num_late:
            del self.late[sequence.id]

    def forsake(self, sequence: Sequence) -> None:
        """Nothing that is on its way to a late sequence will be taken any more."""
        sequence.num_late = 0
        self.late.pop(sequence.id, None)

    def charge(self, sequence: Sequence) -> None:
        """Its tenant has had what it generated since it was charged last."""
        if num_new := len(sequence.output_ids) - sequence.num_charged:
            sequence.num_charged += num_new
            self._queue.served(sequence.request.tenant, num_new)

    def finish(self, sequence: Sequence, reason: FinishReason, *, is_dropped: bool = False) -> None:
        """WAITING or RUNNING → FINISHED. `is_dropped`: the shard has forgotten it by itself."""
        if sequence.status is Status.WAITING:
            self._queue.remove(sequence)
            self.forsake(sequence)
        else:
            self._leave(sequence)
        if reason is FinishReason.FAILED:
            self._memory.discard(sequence)
        else:
            self._memory.close(sequence)
        if sequence.is_known and not is_dropped:
            self.dropped_ids.append(sequence.id)
        sequence.is_known = False
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self.charge(sequence)

    def _leave(self, sequence: Sequence) -> None:
        del self.sequences[bisect_left(self.sequences, _rank(sequence), key=_rank)]


def _rank(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.num_preemptions < MAX_PREEMPTIONS, sequence.request.priority, sequence.id
