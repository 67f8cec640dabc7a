"""Who waits, and whose turn it is. Knows nothing of blocks, budgets or why somebody waits.

The order, first to last:

1. Whoever was passed by `MAX_PASSED` of a better priority that began to wait after it.
2. By priority, lower first, and within a priority:
   a. preempted sequences, the oldest first: their readers wait in the middle of a text;
   b. a tenant that has had no turn while the others had `MAX_PASSED` each, on the average;
   c. the others by a fair turn between tenants: the one that was served the fewest tokens comes next.
   Those of one tenant come first in, first out.

The fair turn is the virtual token counter of Sheng et al. 2024, "Fairness in Serving Large Language Models":
a count for each tenant of the tokens it was served. A tenant that begins to wait is lifted to the least count
of those who wait already, so that nobody saves up turns while it is away.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, heappushpop, merge, nlargest
from operator import attrgetter, itemgetter

from headrace_router.scheduling.request import Sequence

MAX_PASSED = 64
"""Admissions that may pass one that waits, for the sake of priority or of the fair turn."""

MAX_ABSENT_TENANTS = 4096
"""Tenants without a waiting sequence whose counts are remembered, at most."""

_by_age = attrgetter("id")
_by_turn = attrgetter("turn")
_by_ticket = itemgetter(0)


@dataclass(slots=True, eq=False, kw_only=True)
class _Line:
    """The sequences of one tenant and one priority, first in, first out."""

    turn: tuple[int, int]
    """(tokens the tenant was served, number of the line): the least comes next."""
    num_turns_before: int
    """Turns that the priority had given out when this line had its last, or began."""
    sequences: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)


class _Class:
    """Those of one priority."""

    def __init__(self) -> None:
        self.tickets: OrderedDict[int, tuple[int, Sequence]] = OrderedDict()
        """(ticket, sequence) of all by sequence id, in the order in which they began to wait."""
        self.preempted: list[Sequence] = []
        """By age."""
        self.lines: OrderedDict[str, _Line] = OrderedDict()
        """By tenant; the one whose last turn was longest ago stands first."""
        self.turns: list[_Line] = []
        """The same, whose turn is next stands first."""
        self.num_turns = 0
        self._overtakers: list[int] = []
        """A heap of the `MAX_PASSED` highest tickets that were admitted from better priorities."""

    def pass_by(self, ticket: int) -> None:
        """Somebody of a better priority is admitted."""
        if len(self._overtakers) < MAX_PASSED:
            heappush(self._overtakers, ticket)
        else:
            heappushpop(self._overtakers, ticket)

    @property
    def first_patient(self) -> int:
        """Whoever has a lower ticket was passed `MAX_PASSED` times by those who came later."""
        return self._overtakers[0] if len(self._overtakers) == MAX_PASSED else 0

    def passed(self) -> Iterator[tuple[int, Sequence]]:
        """(ticket, sequence) of those that were passed so often, by ticket."""
        first_patient = self.first_patient
        for ticket, sequence in self.tickets.values():
            if ticket >= first_patient:
                return
            yield ticket, sequence

    def in_turn(self) -> Iterator[Sequence]:
        """All, as they would come if each was admitted at once and served its tokens."""
        yield from self.preempted
        # Lines that had a turn here, with what is left of them.
        again: list[tuple[tuple[int, int], Iterator[Sequence]]] = []
        left_out = next(iter(self.lines.values()), None)
        if left_out and self.num_turns - left_out.num_turns_before >= MAX_PASSED * len(self.lines):
            sequences = iter(left_out.sequences.values())
            sequence = next(sequences)
            yield sequence
            again.append(((left_out.turn[0] + sequence.num_tokens, left_out.turn[1]), sequences))
        else:
            left_out = None
        lines = ((line.turn, iter(line.sequences.values())) for line in self.turns if line is not left_out)
        first = next(lines, None)
        while first or again:
            if first and (not again or first[0] < again[0][0]):
                turn, sequences = first
                first = next(lines, None)
            else:
                turn, sequences = heappop(again)
            for sequence in sequences:
                yield sequence
                heappush(again, ((turn[0] + sequence.num_tokens, turn[1]), sequences))
                break


class WaitingQueue:
    """Everybody who waits; anybody may leave from anywhere."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Prompt tokens of those who wait."""
        self._classes: dict[int, _Class] = {}
        """By priority; none is empty."""
        self._priorities: list[int] = []
        """The same, best first."""
        self._counts: dict[str, int] = {}
        """Tokens that each tenant was served, or was lifted to."""
        self._num_lines: dict[str, int] = {}
        """Priorities at which each tenant waits for a turn."""
        self._last_to_leave = ""
        """The tenant whose last line ended last."""
        self._next_ticket = 1
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they should be admitted now, as far as it is asked for. The queue must not
        change meanwhile."""
        classes = [self._classes[priority] for priority in self._priorities]
        for _, sequence in merge(*(waiting.passed() for waiting in classes), key=_by_ticket):
            yield sequence
        for waiting in classes:
            first_patient = waiting.first_patient
            for sequence in waiting.in_turn():
                if waiting.tickets[sequence.id][0] >= first_patient:
                    yield sequence

    def push(self, sequence: Sequence) -> None:
        """A new sequence begins to wait."""
        waiting, tenant = self._enter(sequence), sequence.request.tenant
        line = waiting.lines.get(tenant)
        if line is None:
            # Tickets rise: of equal counts the line that began first comes first.
            turn = (self._lifted(tenant), self._next_ticket)
            line = waiting.lines[tenant] = _Line(turn=turn, num_turns_before=waiting.num_turns)
            insort(waiting.turns, line, key=_by_turn)
            self._num_lines[tenant] = self._num_lines.get(tenant, 0) + 1
        line.sequences[sequence.id] = sequence

    def push_front(self, sequence: Sequence) -> None:
        """A sequence that was admitted before has to wait again."""
        insort(self._enter(sequence).preempted, sequence, key=_by_age)

    def remove(self, sequence: Sequence) -> None:
        """Leaves from wherever it stands, and not because it is admitted. Raises `KeyError` when it does not
        wait."""
        request = sequence.request
        waiting = self._classes[request.priority]
        del waiting.tickets[sequence.id]
        self.num_tokens -= len(request.prompt_ids)
        self._len -= 1
        line = waiting.lines.get(request.tenant)
        if line is None or line.sequences.pop(sequence.id, None) is None:
            del waiting.preempted[bisect_left(waiting.preempted, sequence.id, key=_by_age)]
        elif not line.sequences:
            self._end(line, request.tenant, waiting)
        if not waiting.tickets:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """Leaves because it is admitted: it passes those who stay, and its tenant is served so many tokens.
        Raises `KeyError` when it does not wait."""
        priority, tenant = sequence.request.priority, sequence.request.tenant
        waiting = self._classes[priority]
        ticket, _ = waiting.tickets[sequence.id]
        for worse in self._priorities[bisect_left(self._priorities, priority) + 1 :]:
            self._classes[worse].pass_by(ticket)
        line = waiting.lines.get(tenant)
        if line is not None and sequence.id in line.sequences:
            waiting.num_turns += 1
            line.num_turns_before = waiting.num_turns
            waiting.lines.move_to_end(tenant)
        self.remove(sequence)
        self.served(tenant, num_tokens)

    def served(self, tenant: str, num_tokens: int) -> None:
        """A tenant was served so many tokens, computed or generated."""
        count = self._counts[tenant] = self._counts.get(tenant, self._least()) + num_tokens
        if tenant in self._num_lines:
            for waiting in self._classes.values():
                if (line := waiting.lines.get(tenant)) is not None:
                    del waiting.turns[bisect_left(waiting.turns, line.turn, key=_by_turn)]
                    line.turn = (count, line.turn[1])
                    insort(waiting.turns, line, key=_by_turn)
        else:
            self._forget_some()

    # ---- counts of tokens

    def _least(self) -> int:
        """What a tenant is lifted to: the least count of those who wait, or that of the last who did."""
        counts = [waiting.turns[0].turn[0] for waiting in self._classes.values() if waiting.turns]
        return min(counts, default=self._counts.get(self._last_to_leave, 0))

    def _lifted(self, tenant: str) -> int:
        count = self._counts.get(tenant, 0)
        if tenant not in self._num_lines:
            count = max(count, self._least())
        self._counts[tenant] = count
        return count

    def _forget_some(self) -> None:
        """When too many absent tenants are remembered, forgets those who would be lifted anyway, and of the
        others all but the half of what is allowed that was served most."""
        if len(self._counts) - len(self._num_lines) <= MAX_ABSENT_TENANTS:
            return
        least, last = self._least(), self._last_to_leave
        counts, present = self._counts, self._num_lines
        absent = [name for name, count in counts.items() if name not in present and count > least]
        remembered = {*present, *nlargest(MAX_ABSENT_TENANTS // 2, absent, key=counts.__getitem__), last}
        self._counts = {name: counts[name] for name in remembered if name in counts}

    # ---- who stands where

    def _enter(self, sequence: Sequence) -> _Class:
        priority = sequence.request.priority
        waiting = self._classes.get(priority)
        if waiting is None:
            waiting = self._classes[priority] = _Class()
            insort(self._priorities, priority)
        waiting.tickets[sequence.id] = (self._next_ticket, sequence)
        self._next_ticket += 1
        self._len += 1
        self.num_tokens += len(sequence.request.prompt_ids)
        return waiting

    def _end(self, line: _Line, tenant: str, waiting: _Class) -> None:
        del waiting.lines[tenant]
        del waiting.turns[bisect_left(waiting.turns, line.turn, key=_by_turn)]
        self._num_lines[tenant] -= 1
        if not self._num_lines[tenant]:
            del self._num_lines[tenant]
            self._last_to_leave = tenant
            self._forget_some()
