"""The rules of the waiting queue's order, each told the long way."""

from dataclasses import dataclass, field

from headrace_router.scheduling.request import Sequence

Place = tuple[int, str]
"""(priority, tenant)."""


def place_of(sequence: Sequence) -> Place:
    return sequence.request.priority, sequence.request.tenant


@dataclass
class Rules:
    """Who waits, and everything that ever happened to them."""

    max_passed: int
    waiting: list[Sequence] = field(default_factory=list)
    """In the order in which they began to wait."""
    preempted: set[int] = field(default_factory=set)
    began: dict[int, int] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    last_to_leave: str = ""
    time: int = 0
    turns: dict[int, int] = field(default_factory=dict)
    """Turns given out at each priority since somebody waits there."""
    line_began: dict[Place, int] = field(default_factory=dict)
    last_turn: dict[Place, tuple[int, int]] = field(default_factory=dict)
    """(turns given out, time) when a line began or had a turn."""

    def line(self, place: Place) -> list[Sequence]:
        return [s for s in self.waiting if place_of(s) == place and s.id not in self.preempted]

    def least(self) -> int:
        tenants = {s.request.tenant for s in self.waiting if s.id not in self.preempted}
        return min((self.counts[t] for t in tenants), default=self.counts.get(self.last_to_leave, 0))

    def push(self, sequence: Sequence, *, is_preempted: bool = False) -> None:
        self.time += 1
        place = priority, tenant = place_of(sequence)
        if not any(other.request.priority == priority for other in self.waiting):
            self.turns[priority] = 0
        if is_preempted:
            self.preempted.add(sequence.id)
        elif not self.line(place):
            if not any(t == tenant and self.line((p, t)) for p, t in map(place_of, self.waiting)):
                self.counts[tenant] = max(self.counts.get(tenant, 0), self.least())
            self.line_began[place] = self.time
            self.last_turn[place] = (self.turns[priority], self.time)
        self.waiting.append(sequence)
        self.began[sequence.id], self.passed[sequence.id] = self.time, 0

    def leave(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        tenant = sequence.request.tenant
        if sequence.id in self.preempted:
            self.preempted.remove(sequence.id)
        elif not any(self.line((priority, tenant)) for priority in self.turns):
            self.last_to_leave = tenant

    def admit(self, sequence: Sequence) -> None:
        self.time += 1
        place = priority, tenant = place_of(sequence)
        for other in self.waiting:
            if other.request.priority > priority and self.began[other.id] < self.began[sequence.id]:
                self.passed[other.id] += 1
        if sequence.id not in self.preempted:
            self.turns[priority] += 1
            self.last_turn[place] = (self.turns[priority], self.time)
        self.leave(sequence)
        self.served(tenant, sequence.num_tokens)

    def served(self, tenant: str, num_tokens: int) -> None:
        self.counts[tenant] = self.counts.get(tenant, self.least()) + num_tokens

    def order(self) -> list[Sequence]:
        patient = [s for s in self.waiting if self.passed[s.id] >= self.max_passed]
        order = list(patient)
        for priority in sorted({s.request.priority for s in self.waiting}):
            order += [s for s in self.order_of(priority) if s not in patient]
        return order

    def order_of(self, priority: int) -> list[Sequence]:
        """Those of a priority, as if nobody there had lost patience."""
        of_priority = [s for s in self.waiting if s.request.priority == priority]
        order = sorted((s for s in of_priority if s.id in self.preempted), key=lambda s: s.id)
        places = {place_of(s) for s in of_priority}
        lines = {place: line for place in places if (line := self.line(place))}
        counts = dict(self.counts)

        def take(place: Place) -> None:
            sequence = lines[place].pop(0)
            counts[place[1]] += sequence.num_tokens
            order.append(sequence)

        if lines:
            oldest = min(lines, key=lambda place: self.last_turn[place][1])
            if self.turns[priority] - self.last_turn[oldest][0] >= self.max_passed * len(lines):
                take(oldest)
        while left := [place for place in lines if lines[place]]:
            take(min(left, key=lambda place: (counts[place[1]], self.line_began[place])))
        return order
