"""Which sequences may be the ones that make steps fail, and who of them is tried next. Knows no step.

A step that fails as a whole names nobody. Its sequences are tried again in halves, a half alone in a step,
until each has got past the point where the step had failed; a half that fails is halved again. So one
sequence that no step survives is found in as many failing steps as the others can be halved, and fails alone.
"""

from collections import deque
from collections.abc import Callable, Iterable

from headrace_router.scheduling.request import Sequence, Status


class Suspects:
    """Groups of sequences, to be tried one group after the other."""

    def __init__(self) -> None:
        self._groups: deque[list[Sequence]] = deque()
        self._points: dict[int, int] = {}
        """By id: tokens that have to be computed for certain before a sequence is cleared."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def accuse(self, sequences: Iterable[tuple[Sequence, int]]) -> None:
        """A step of these failed; it would have computed so many tokens of each. They are tried next."""
        accused: list[Sequence] = []
        for sequence, num_tokens in sequences:
            accused.append(sequence)
            self._points[sequence.id] = max(num_tokens, self._points.get(sequence.id, 0))
        ids = {sequence.id for sequence in accused}
        others = ([s for s in group if s.id not in ids] for group in self._groups)
        self._groups = deque(group for group in others if group)
        middle = (len(accused) + 1) // 2
        for half in accused[middle:], accused[:middle]:
            if half:
                self._groups.appendleft(half)

    def next_group(self, num_certain: Callable[[Sequence], int]) -> list[Sequence]:
        """Who is tried in the next step, the others of the same group that are cleared left out; empty when
        everybody is cleared. `num_certain` says how many tokens of a sequence are computed for certain."""
        points = self._points
        while self._groups:
            group = self._groups[0] = [
                sequence
                for sequence in self._groups[0]
                if sequence.status is not Status.FINISHED and num_certain(sequence) < points[sequence.id]
            ]
            if group:
                return group
            self._groups.popleft()
        points.clear()
        return []

    def clear(self) -> None:
        """Nobody is suspected any more."""
        self._groups.clear()
        self._points.clear()
