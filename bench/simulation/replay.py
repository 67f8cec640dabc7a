"""Plays a trace against a policy and a GPU: the clock, the wire and the device. Knows no policy's inside.

    router   make step 2 │ digest answer 1, make step 3 │ …
    wire              └──►                           └──►
    device   │ step 1          │ step 2          │ step 3

The router makes a step when the policy wants it made: at once when nothing is in flight, and shortly before
the device runs dry when a step is. The device executes steps in the order in which they were sent. Answers
travel as long as steps do. Everything happens at events, so idle time costs a replay nothing.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.simulation.cost import Gpu
from bench.simulation.jobs import Job, Policy
from bench.simulation.record import Record
from bench.simulation.traces import Trace

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step under way."""

    begin: float
    """When the device begins it."""
    end: float


class Replay:
    """One policy, one trace, once."""

    def __init__(
        self, policy: Policy, trace: Trace, gpu: Gpu, *, num_slots: int, max_concurrent: int | None = None
    ) -> None:
        """`num_slots`: tokens of the policy's KV pool. Who comes while `max_concurrent` are under way is
        turned away."""
        self._policy, self._trace, self._gpu = policy, trace, gpu
        self._max_concurrent = max_concurrent
        self.record = Record(gpu=gpu, pool_slots=num_slots)
        arrivals = trace.arrivals
        self._coming = [(arrival.at, index) for index, arrival in enumerate(arrivals) if arrival.follows < 0]
        heapq.heapify(self._coming)
        self._followers: dict[int, list[int]] = {}
        for index, arrival in enumerate(arrivals):
            if arrival.follows >= 0:
                self._followers.setdefault(arrival.follows, []).append(index)
        self._flights: deque[_Flight] = deque()
        self._num_under_way = 0
        self._is_idle = False
        """Whether the policy has nothing to compute until somebody comes or an answer does."""
        self._now = 0.0
        self._router_free_at = 0.0

    def run(self, on_end: Callable[[int], None] = lambda count: None) -> Record:
        """To the end of the last request; `on_end` is told how many have ended since it was last told."""
        record, policy, flights = self.record, self._policy, self._flights
        record.begin = self._coming[0][0] if self._coming else 0.0
        record.end = record.begin
        num_told = 0
        while True:
            arrival_at = self._coming[0][0] if self._coming else _NEVER
            answer_at = flights[0].end + self._gpu.overheads.wire_seconds if flights else _NEVER
            making_at = self._making_at()
            self._now = at = min(arrival_at, answer_at, making_at)
            if at == _NEVER:
                break
            # Who comes while a step is made is too late for it; an answer that is there is read first.
            if answer_at == at:
                self._answer(at)
                num_done = record.num_answered + record.num_refused + record.num_turned_away
                if num_done - num_told >= 100:
                    on_end(num_done - num_told)
                    num_told = num_done
            elif arrival_at == at:
                _, index = heapq.heappop(self._coming)
                self._arrive(index, at)
            else:
                self._make(at)
        record.num_stuck = policy.num_waiting + policy.num_running
        on_end(len(self._trace.arrivals) - num_told)
        return record

    def _making_at(self) -> float:
        """When the router makes the next step, should nothing happen before."""
        if self._is_idle or len(self._flights) >= self._policy.max_in_flight:
            return _NEVER
        earliest = max(self._now, self._router_free_at)
        if not self._flights:
            return earliest
        return max(earliest, self._flights[-1].begin + self._policy.slack_seconds)

    def _arrive(self, index: int, now: float) -> None:
        if self._max_concurrent is not None and self._num_under_way >= self._max_concurrent:
            self.record.num_turned_away += 1
            self._drop_followers(index)
            return
        arrival = self._trace.arrivals[index]
        output = arrival.output_ids()
        job = Job(index=index, arrival=arrival, arrived_at=now, output=output, num_left=len(output))
        if not self._policy.add(job, now):
            self.record.num_refused += 1
            self._drop_followers(index)
            return
        self._num_under_way += 1
        self._is_idle = False

    def _drop_followers(self, index: int) -> None:
        """Nobody follows what was not answered."""
        for follower in self._followers.pop(index, ()):
            self.record.num_refused += 1
            self._drop_followers(follower)

    def _make(self, now: float) -> None:
        work = self._policy.schedule(now)
        if work is None:
            self._is_idle = True
            return
        sent_at = now + self._gpu.router_seconds(work.num_rows)
        begin = sent_at + self._gpu.overheads.wire_seconds
        if self._flights:
            begin = max(begin, self._flights[-1].end)
        seconds = self._gpu.seconds(work)
        self._flights.append(_Flight(begin, begin + seconds))
        self.record.step(work, begin, seconds, self._policy)
        self._router_free_at = sent_at

    def _answer(self, now: float) -> None:
        flight = self._flights.popleft()
        self._is_idle = False
        gained = self._policy.answer(flight.end - flight.begin)
        for job in self.record.tokens(gained, now):
            self._num_under_way -= 1
            for follower in self._followers.pop(job.index, ()):
                pause = self._trace.arrivals[follower].pause_seconds
                heapq.heappush(self._coming, (now + pause, follower))
