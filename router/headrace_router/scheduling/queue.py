"""Who waits, and whose turn it is. Knows nothing of blocks, budgets or why somebody waits.

The order, first to last:

1. Whoever was passed by `MAX_PASSED` of a better priority that began to wait after it. Priorities beyond
   `NUM_SINGLE` are counted in groups, ever wider ones, and in a group of which several priorities wait
   whoever is admitted counts for all that began to wait before it.
2. By priority, lower first, and within a priority:
   a. preempted sequences, the oldest first: their readers wait in the middle of a text;
   b. a tenant that has had no turn while the others had `MAX_PASSED` each, on the average;
   c. the others by a fair turn between tenants: the one that was served the fewest tokens comes next.
   Those of one tenant come first in, first out.

The fair turn is the virtual token counter of Sheng et al. 2024, "Fairness in Serving Large Language Models":
a count for each tenant of the tokens it was served. A tenant that begins to wait is lifted to the least count
of those who wait already, so that nobody saves up turns while it is away.

However many priorities and tenants wait, an admission costs as much as there are groups, a charge next to
nothing, and a look as much as it is asked for: a priority learns of charges when it is looked at.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, merge, nlargest
from itertools import filterfalse, islice
from operator import attrgetter, itemgetter

from headrace_router.scheduling.request import Sequence

MAX_PASSED = 64
"""Admissions that may pass one that waits, for the sake of priority or of the fair turn."""

MAX_ABSENT_TENANTS = 4096
"""Tenants without a waiting sequence whose counts are remembered, at most."""

NUM_SINGLE = 10
"""Priorities from minus this to this are counted each for itself, those beyond in groups of 1, 2, 4, 8 and so
on."""

MAX_CHARGES = 256
"""Charges that a priority catches up with one by one; after more it sorts its tenants anew."""

Skips = Callable[[Sequence], bool]
"""Whether a waiting sequence is passed over in this step."""

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


class _Group:
    """Those of some neighbouring priorities, or of one: who of them was passed how often."""

    def __init__(self) -> None:
        self.tickets: OrderedDict[int, tuple[int, Sequence]] = OrderedDict()
        """(ticket, sequence) of all by sequence id, in the order in which they began to wait."""
        self.num_classes = 0
        self._overtakers: list[int] = []
        """A heap of the `MAX_PASSED` highest tickets that were admitted past these."""

    def pass_by(self, ticket: int) -> None:
        """Somebody is admitted past these."""
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


class _Class:
    """Those of one priority."""

    def __init__(self, group: _Group, num_charges: int) -> None:
        self.group = group
        self.preempted: list[Sequence] = []
        """By age."""
        self.lines: OrderedDict[str, _Line] = OrderedDict()
        """By tenant; the one whose last turn was longest ago stands first."""
        self.turns: list[_Line] = []
        """The same, whose turn is next stands first."""
        self.num_turns = 0
        self.num_charges = num_charges
        """Of all charges, those that `turns` knows."""

    def in_turn(self, skips: Skips | None) -> Iterator[Sequence]:
        """All that are not skipped, as they would come if each was admitted at once and served its tokens."""
        yield from _others(self.preempted, skips)
        # Lines that had a turn here, with what is left of them.
        again: list[tuple[tuple[int, int], Iterator[Sequence]]] = []
        left_out = next(iter(self.lines.values()), None)
        if left_out and self.num_turns - left_out.num_turns_before >= MAX_PASSED * len(self.lines):
            sequences = _others(left_out.sequences.values(), skips)
            for sequence in sequences:
                yield sequence
                again.append(((left_out.turn[0] + sequence.num_tokens, left_out.turn[1]), sequences))
                break
        else:
            left_out = None
        lines = (
            (line.turn, _others(line.sequences.values(), skips))
            for line in self.turns
            if line is not left_out
        )
        first = next(lines, None)
        while first or again:
            if first and (not again or first[0] < again[0][0]):
                turn, sequences = first
                first = next(lines, None)
            else:
                turn, sequences = heappop(again)
            if not first and not again:
                yield from sequences
                return
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
        self._groups: dict[int, _Group] = {}
        """By their numbers, lower for better priorities; none is empty."""
        self._counts: dict[str, int] = {}
        """Tokens that each tenant was served, or was lifted to."""
        self._num_lines: dict[str, int] = {}
        """Priorities at which each tenant waits for a turn."""
        self._least_counts: list[tuple[int, str]] = []
        """A heap of (count, tenant) with every tenant that waits for a turn. Counts may have risen since, and
        tenants may have gone."""
        self._charged: deque[str] = deque(maxlen=MAX_CHARGES)
        """The tenants charged last that waited for a turn."""
        self._num_charges = 0
        """All such charges."""
        self._last_to_leave = ""
        """The tenant whose last line ended last."""
        self._next_ticket = 1
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they should be admitted now, as far as it is asked for. The queue must not
        change meanwhile."""
        return self.in_order(None)

    def in_order(self, skips: Skips | None) -> Iterator[Sequence]:
        """The same without those for which `skips` is true: their tenants do not lose a turn for them."""
        groups = (group.passed() for group in self._groups.values() if group.first_patient)
        yield from _others((sequence for _, sequence in merge(*groups, key=_by_ticket)), skips)
        for priority in self._priorities:
            waiting = self._classes[priority]
            self._catch_up(waiting)
            tickets, first_patient = waiting.group.tickets, waiting.group.first_patient
            for sequence in waiting.in_turn(skips):
                if tickets[sequence.id][0] >= first_patient:
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
            self._begin(tenant)
        line.sequences[sequence.id] = sequence

    def push_front(self, sequence: Sequence) -> None:
        """A sequence that was admitted before has to wait again."""
        insort(self._enter(sequence).preempted, sequence, key=_by_age)

    def remove(self, sequence: Sequence) -> None:
        """Leaves from wherever it stands, and not because it is admitted. Raises `KeyError` when it does not
        wait."""
        request = sequence.request
        waiting = self._classes[request.priority]
        del waiting.group.tickets[sequence.id]
        self.num_tokens -= len(request.prompt_ids)
        self._len -= 1
        line = waiting.lines.get(request.tenant)
        if line is None or line.sequences.pop(sequence.id, None) is None:
            del waiting.preempted[bisect_left(waiting.preempted, sequence.id, key=_by_age)]
        elif not line.sequences:
            self._end(line, request.tenant, waiting)
        if not waiting.lines and not waiting.preempted:
            self._dissolve(request.priority, waiting)

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """Leaves because it is admitted: it passes those who stay, and its tenant is served so many tokens.
        Raises `KeyError` when it does not wait."""
        priority, tenant = sequence.request.priority, sequence.request.tenant
        waiting = self._classes[priority]
        ticket, _ = waiting.group.tickets[sequence.id]
        number = _group_of(priority)
        for other, group in self._groups.items():
            if other > number or (other == number and group.num_classes > 1):
                group.pass_by(ticket)
        line = waiting.lines.get(tenant)
        if line is not None and sequence.id in line.sequences:
            waiting.num_turns += 1
            line.num_turns_before = waiting.num_turns
            waiting.lines.move_to_end(tenant)
        self.remove(sequence)
        self.served(tenant, num_tokens)

    def served(self, tenant: str, num_tokens: int) -> None:
        """A tenant was served so many tokens, computed or generated."""
        count = self._counts.get(tenant)
        self._counts[tenant] = (self._least() if count is None else count) + num_tokens
        if tenant in self._num_lines:
            self._charged.append(tenant)
            self._num_charges += 1
        else:
            self._forget_some()

    # ---- counts of tokens

    def _least(self) -> int:
        """What a tenant is lifted to: the least count of those who wait, or that of the last who did."""
        heap = self._least_counts
        while heap:
            count, tenant = heap[0]
            if tenant not in self._num_lines:
                heappop(heap)
            elif count != self._counts[tenant]:
                heapreplace(heap, (self._counts[tenant], tenant))
            else:
                return count
        return self._counts.get(self._last_to_leave, 0)

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
            group = self._groups.setdefault(_group_of(priority), _Group())
            group.num_classes += 1
            waiting = self._classes[priority] = _Class(group, self._num_charges)
            insort(self._priorities, priority)
        waiting.group.tickets[sequence.id] = (self._next_ticket, sequence)
        self._next_ticket += 1
        self._len += 1
        self.num_tokens += len(sequence.request.prompt_ids)
        return waiting

    def _dissolve(self, priority: int, waiting: _Class) -> None:
        """Nobody of a priority waits any more."""
        del self._classes[priority]
        del self._priorities[bisect_left(self._priorities, priority)]
        waiting.group.num_classes -= 1
        if not waiting.group.num_classes:
            del self._groups[_group_of(priority)]

    def _catch_up(self, waiting: _Class) -> None:
        """A priority learns what tenants were charged since it was looked at last."""
        num_new, waiting.num_charges = self._num_charges - waiting.num_charges, self._num_charges
        if num_new > MAX_CHARGES:
            for tenant, each in waiting.lines.items():
                each.turn = (self._counts[tenant], each.turn[1])
            waiting.turns.sort(key=_by_turn)
            return
        for tenant in {*islice(reversed(self._charged), num_new)}:
            if (line := waiting.lines.get(tenant)) is not None:
                del waiting.turns[bisect_left(waiting.turns, line.turn, key=_by_turn)]
                line.turn = (self._counts[tenant], line.turn[1])
                insort(waiting.turns, line, key=_by_turn)

    def _begin(self, tenant: str) -> None:
        """A tenant waits for a turn at one more priority."""
        self._num_lines[tenant] = self._num_lines.get(tenant, 0) + 1
        if self._num_lines[tenant] == 1:
            heappush(self._least_counts, (self._counts[tenant], tenant))
            if len(self._least_counts) > 2 * len(self._num_lines) + MAX_CHARGES:
                # Tenants that have gone since, whom nobody came by.
                self._least_counts = [(self._counts[name], name) for name in self._num_lines]
                heapify(self._least_counts)

    def _end(self, line: _Line, tenant: str, waiting: _Class) -> None:
        del waiting.lines[tenant]
        del waiting.turns[bisect_left(waiting.turns, line.turn, key=_by_turn)]
        self._num_lines[tenant] -= 1
        if not self._num_lines[tenant]:
            del self._num_lines[tenant]
            self._last_to_leave = tenant
            self._forget_some()


def _others(sequences: Iterable[Sequence], skips: Skips | None) -> Iterator[Sequence]:
    return filterfalse(skips, sequences) if skips else iter(sequences)


def _group_of(priority: int) -> int:
    """The number of its group: -10 to 10 each have one, then follow those of 1, 2, 4, 8 … priorities."""
    beyond = abs(priority) - NUM_SINGLE
    if beyond <= 0:
        return priority
    number = NUM_SINGLE + beyond.bit_length()
    return number if priority > 0 else -number
