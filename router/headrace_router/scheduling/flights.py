"""The steps that are sent and not answered, oldest first, and whose results will be taken from them."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace_router.scheduling.request import Sequence, Status
from headrace_router.scheduling.step import Step


@dataclass(slots=True, kw_only=True)
class Flight:
    """A step in flight."""

    step: Step
    num_decodes: int
    """The first so many of its sequences are decoded, the others compute a part of their prefill."""
    ignored_ids: set[int] = field(default_factory=set)
    """Sequences that a step before it took with it when it failed: whatever it says of them is void."""

    def concerns(self, sequence: Sequence) -> bool:
        """Whether what it says of one of its sequences is to be taken."""
        return sequence.status is not Status.FINISHED and sequence.id not in self.ignored_ids

    def shorten(self, sequence: Sequence, num_left: int) -> None:
        """It gets so many tokens less far with the prefill of `sequence`, if at all it computes a part of it;
        no token is sampled then. (A decode of it cannot be in a step already: that would be the second after
        the one that was cut short.)"""
        step = self.step
        for index, (other, end) in enumerate(step.chunks):
            if other is sequence:
                step.chunks[index] = sequence, end - num_left
                step.samplers = [sampler for sampler in step.samplers if sampler is not sequence]


class Flights:
    """At most as many as the scheduler allows."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def append(self, flight: Flight) -> None:
        self._flights.append(flight)

    def pop_oldest(self) -> Flight:
        """The one that is answered now. Raises `IndexError` when there is none."""
        return self._flights.popleft()

    def clear(self) -> None:
        self._flights.clear()

    def ignore(self, sequences: Iterable[Sequence]) -> None:
        """Nothing will be taken of what they say of these."""
        ids = [sequence.id for sequence in sequences]
        for flight in self._flights:
            flight.ignored_ids.update(ids)

    def shorten(self, sequence: Sequence, num_left: int) -> None:
        """A step before them has left so many tokens of its prefill: they get that much less far with it."""
        for flight in self._flights:
            flight.shorten(sequence, num_left)

    def count(self, sequence: Sequence) -> int:
        """Those that compute it and from which it will be taken."""
        return sum(
            sequence in flight.step.sequences and flight.concerns(sequence) for flight in self._flights
        )

    def prefilling(self) -> list[Sequence]:
        """Running sequences of whose prefill they compute a part."""
        chunks = (chunk for flight in self._flights for chunk in flight.step.chunks)
        return [sequence for sequence, _ in chunks if sequence.status is Status.RUNNING]
