"""Keeps one shard busy: schedule → send → receive → update → deliver, with two steps under way.

    time ─────────────────────────────────────────────────────►
    shard   │ step 1            │ step 2            │ step 3
    router    deliver 0 … send 2  deliver 1 … send 3

While the shard computes a step the next one is sent, so that it need not wait for us. It is sent late, see
`pace`, for the sake of whoever comes or leaves meanwhile. A step that fails concerns nobody but those in it;
the scheduler says who fails for it, and who is tried again. Knows no settings and no texts, and never
reconnects: an error of the connection ends the pipeline.
"""

import asyncio
import logging
import math
import time
from collections import deque
from dataclasses import dataclass

from headrace_router.delivery import Delivery
from headrace_router.errors import GenerationError, Unavailable, counted
from headrace_router.meter import Meter
from headrace_router.pace import Pace
from headrace_router.scheduling.scheduler import MAX_IN_FLIGHT, Scheduler
from headrace_router.scheduling.step import Step
from headrace_router.shards.client import ShardClient, StepCall

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A step under way."""

    step: Step
    call: StepCall
    sent_at: float
    scheduling_seconds: float
    follows_pause: bool
    """Whether the shard had nothing to do before, because nobody wanted anything."""


class Pipeline:
    """Serves until the shard is lost. Everything happens in one event loop."""

    def __init__(
        self,
        client: ShardClient,
        instance: str,
        scheduler: Scheduler,
        meter: Meter,
        delivery: Delivery,
    ) -> None:
        """The shard is warm, and its process is `instance`."""
        self._client = client
        self._instance = instance
        self._scheduler = scheduler
        self._meter = meter
        self._delivery = delivery
        self._pace = Pace()
        self._flights: deque[_Flight] = deque()
        """The oldest first."""
        self._freed_at = 0.0
        """When the last answer came: from then on the shard could compute the next step."""
        self._has_paused = True
        """Whether nobody has wanted anything since the last step."""
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Somebody came or went."""
        self._wake.set()

    async def run(self) -> None:
        """Step after step. Raises `Unavailable` when the connection or the shard fails as a whole."""
        try:
            while True:
                self._wake.clear()
                slack = self._slack_seconds()
                if slack <= 0 and (flight := self._send()) is not None:
                    try:
                        # Once round the loop, so that the step is on its way before anything else is done,
                        # and whoever has left meanwhile is gone before the next one is chosen.
                        await asyncio.sleep(0)
                    finally:
                        self._count(flight)  # It was sent, also when the shard is given up in this moment.
                    self._delivery.deliver()
                    continue
                self._delivery.deliver()
                if not self._flights:
                    await self._idle()
                elif self._flights[0].call.done():
                    await self._receive()
                else:
                    await self._wait(slack)
        finally:
            for flight in self._flights:
                self._meter.failed(flight.step)

    def _slack_seconds(self) -> float:
        """For how long the next step need not be chosen; infinite while an answer must be taken in first."""
        if not self._flights:
            return 0.0
        flight = self._flights[0]
        if len(self._flights) == MAX_IN_FLIGHT or flight.call.done():
            return math.inf
        return self._began_at(flight) + self._pace.slack_seconds(flight.step) - time.monotonic()

    def _began_at(self, flight: _Flight) -> float:
        """When the shard could begin with the oldest step under way."""
        return max(flight.sent_at, self._freed_at)

    def _send(self) -> _Flight | None:
        """Chooses the next step and hands it to the client; None when nobody can compute anything now."""
        now = time.monotonic()
        step = self._scheduler.schedule(now)
        if step is None:
            return None
        scheduling_seconds = time.monotonic() - now
        call = self._client.send(step, num_ahead=len(self._flights))
        call.add_done_callback(lambda _: self._wake.set())
        flight = _Flight(
            step=step,
            call=call,
            sent_at=now,
            scheduling_seconds=scheduling_seconds,
            follows_pause=self._has_paused,
        )
        self._has_paused = False
        self._flights.append(flight)
        return flight

    def _count(self, flight: _Flight) -> None:
        """Counts a step that was sent just now, and tells those who have joined it for the first time."""
        step, sent_at = flight.step, flight.sent_at
        started = [sequence for sequence in step.admitted if sequence.admitted_at == sent_at]
        self._meter.sent(step, started, self._scheduler, flight.scheduling_seconds)
        self._delivery.start(started, sent_at)

    async def _wait(self, seconds: float) -> None:
        """Until an answer comes, somebody comes or goes, or so many seconds have passed."""
        timer = None
        if 0 < seconds < math.inf:
            timer = asyncio.get_running_loop().call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _receive(self) -> None:
        """Takes in the answer of the oldest step under way, which has come."""
        flight = self._flights[0]
        try:
            result = await self._client.receive(flight.call)
        except GenerationError as error:
            self._flights.popleft()
            self._freed_at = time.monotonic()
            self._meter.failed(flight.step)
            await self._recover(flight.step, error)
            return
        came = time.monotonic()
        self._flights.popleft()
        began_at, self._freed_at = self._began_at(flight), came
        self._pace.measure(flight.step, came - began_at)
        updates = self._scheduler.update(result)
        updated = time.monotonic()
        self._delivery.keep(updates, came)
        num_generated = sum(update.token is not None for update in updates)
        self._meter.came(
            flight.step,
            result,
            self._scheduler,
            num_generated,
            update_seconds=updated - came,
            total_seconds=updated - began_at,
            follows_pause=flight.follows_pause,
        )

    async def _recover(self, step: Step, error: GenerationError) -> None:
        """A step failed, and the shard has forgotten all who were in it: the scheduler says who fails for it.
        Raises `Unavailable` when the shard is not well otherwise."""
        num_sequences = counted(len(step.sequences), "sequence")
        log.error("step %d of %s failed: %s", step.id, num_sequences, error.message)
        try:
            await self._client.health()
            info = await self._client.info()
        except GenerationError as further:
            raise Unavailable(f"the shard is not well after a failed step: {further.message}") from further
        if info.instance != self._instance:
            raise Unavailable("the shard was restarted")
        for sequence in self._scheduler.fail_step():
            self._delivery.fail(sequence, GenerationError(error.message), time.monotonic())
        self._meter.levels(self._scheduler)

    async def _idle(self) -> None:
        """Nobody has anything to compute: the shard forgets what has ended, then we wait for somebody."""
        self._has_paused = True
        if dropped_ids := self._scheduler.take_dropped():
            try:
                self._meter.shard_sequences.set(await self._client.filter(dropped_ids))
            except GenerationError as error:
                raise Unavailable(f"the shard cannot drop sequences: {error.message}") from error
            return
        await self._wake.wait()
