"""Who is told what happens to which sequence. Knows no steps and no clock, and decides nothing.

What a step brought is kept until the loop has nothing more urgent to do, so that whoever reads a text never
delays the shard.
"""

from collections.abc import Iterable
from typing import Protocol

from headrace_router.errors import GenerationError, HeadraceError
from headrace_router.scheduling.request import Sequence, Status
from headrace_router.scheduling.step import Update


class Sink(Protocol):
    """Who is told what happens to one sequence. Called in the loop between two steps, so: quickly.

    `now` is in seconds of `time.monotonic()`.
    """

    def start(self, now: float) -> None:
        """It was admitted for the first time."""

    def deliver(self, update: Update, now: float) -> None:
        """It gained a token or a part of its prompt's log-probabilities; perhaps it ended."""

    def fail(self, error: HeadraceError, now: float) -> None:
        """It ended without a result."""


class Delivery:
    """The sinks of all sequences that have not ended, and what they have not been told yet."""

    def __init__(self) -> None:
        self._sinks: dict[int, Sink] = {}
        self._kept: list[tuple[list[Update], float]] = []

    def join(self, sequence: Sequence, sink: Sink) -> None:
        self._sinks[sequence.id] = sink

    def leave(self, sequence: Sequence) -> None:
        """Its sink hears nothing more."""
        self._sinks.pop(sequence.id, None)

    def start(self, sequences: Iterable[Sequence], now: float) -> None:
        for sequence in sequences:
            if (sink := self._sinks.get(sequence.id)) is not None:
                sink.start(now)

    def keep(self, updates: list[Update], came: float) -> None:
        """What a step brought, for the next `deliver`."""
        self._kept.append((updates, came))

    def deliver(self) -> None:
        """Tells the sinks what was kept, in the order in which it came."""
        kept, self._kept = self._kept, []
        for updates, came in kept:
            for update in updates:
                self._tell(update, came)

    def _tell(self, update: Update, came: float) -> None:
        sequence = update.sequence
        if update.error is not None:
            error = GenerationError(f"Request failed during generation: {update.error}")
            self.fail(sequence, error, came)
            return
        sink = self._sinks.get(sequence.id)
        if sink is None:
            return  # Its reader has left meanwhile.
        if sequence.status is Status.FINISHED:
            del self._sinks[sequence.id]
        sink.deliver(update, came)

    def fail(self, sequence: Sequence, error: HeadraceError, now: float) -> None:
        """It has ended without a result."""
        if (sink := self._sinks.pop(sequence.id, None)) is not None:
            sink.fail(error, now)

    def fail_all(self, error: HeadraceError, now: float) -> None:
        """No sequence will go on."""
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(error, now)
