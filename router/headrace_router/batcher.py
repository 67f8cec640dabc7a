"""The loop: schedule → shard → update → deliver. The only place where decisions meet the wire and the clock.

States of the connection, moved by `Batcher.run` alone:

    CONNECTING ──answers and is warm──► READY ──gone, frozen or another process──► CONNECTING
         └────────── limits cannot be met at the first start, or `run` is cancelled ──► STOPPED

While the shard is lost, what ran has failed (or, without a token yet, waits once more), what waits goes on
waiting. A step that fails takes the requests in it with it, and only those. Knows no text: what happens to a
sequence is told to its `Sink`.
"""

import asyncio
import enum
import itertools
import logging
import time
from typing import Protocol

from headrace_proto import __version__

from headrace_router.config import RouterConfig
from headrace_router.errors import (
    GenerationError,
    HeadraceError,
    LimitsError,
    Unavailable,
    context_length_exceeded,
    counted,
)
from headrace_router.meter import Meter
from headrace_router.metrics import METHODS, Metrics
from headrace_router.scheduling.limits import Limits, Row, ShardInfo, Wanted, derive, plan
from headrace_router.scheduling.request import FinishReason, Request, Sequence, Status
from headrace_router.scheduling.scheduler import Scheduler
from headrace_router.scheduling.step import Step, Update
from headrace_router.shards.client import ShardClient

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
"""Between two attempts to reach a shard."""

REFUSED_SECONDS = 5.0
"""After a shard that came back with too little memory."""

SLOWEST_STEP = 10.0
"""No shard is given up before a step takes so many times what the largest one took at warm-up: that one has
short contexts, and a machine of its own."""


class ShardState(enum.Enum):
    """Where the connection is in its life; see the diagram above."""

    CONNECTING = "connecting"
    READY = "ready"
    STOPPED = "stopped"


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


class Batcher:
    """Owns the scheduler and the connection. Everything happens in one event loop."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._config = config
        self._wanted = Wanted(
            model_id=config.model_id or config.tokenizer_name,
            max_input_tokens=config.max_input_tokens,
            max_total_tokens=config.max_total_tokens,
            max_step_tokens=config.max_batch_prefill_tokens,
            max_cache_tokens=config.max_batch_total_tokens,
            max_batch_size=config.max_batch_size,
            max_concurrent_requests=config.max_concurrent_requests,
        )
        self._meter = Meter(metrics, backpressure=config.waiting_served_ratio > 0)
        self._ids = itertools.count(1)
        self._sinks: dict[int, Sink] = {}
        self._scheduler: Scheduler | None = None
        self._undelivered: tuple[list[Update], float] = ([], 0.0)
        self._wake = asyncio.Event()
        self._loss: Unavailable | None = None
        """Why the watch has given the shard up."""
        self.settled = asyncio.Event()
        """Set once the shard has been ready, or never will be."""
        self.failure: LimitsError | None = None
        """Why it never will be."""
        self.state = ShardState.CONNECTING
        self.info: ShardInfo | None = None
        self.limits: Limits | None = None
        self.rows: tuple[Row, ...] = ()
        """The start-up table."""

    # ---- for the engine

    def submit(self, request: Request, sink: Sink, now: float) -> Sequence:
        """Queues a request. Raises `Unavailable` before the first shard was ready and after the end, and
        `ContextLengthExceeded` for one that could never run."""
        if self._scheduler is None or self.state is ShardState.STOPPED:
            raise Unavailable("the server is not ready")
        sequence = Sequence(id=next(self._ids), request=request, arrived_at=now)
        if not self._scheduler.can_hold(sequence):
            raise self._too_long(request)
        self._sinks[sequence.id] = sink
        self._scheduler.add(sequence)
        self._changed()
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence before the next step; its sink hears nothing more. No error when it has ended."""
        self._sinks.pop(sequence.id, None)
        if self._scheduler is not None and self._scheduler.finish(sequence, reason):
            self._changed()

    async def run(self) -> None:
        """Connects, serves, and connects again when the shard was lost; returns when limits cannot be met."""
        try:
            while self.failure is None:
                pause_seconds = POLL_SECONDS
                client = ShardClient(self._config.shard, step_timeout_seconds=self._config.shard_timeout)
                try:
                    await self._connect(client)
                    await self._serve(client)
                except Unavailable as error:
                    self._lose(self._loss or error)
                except LimitsError as error:
                    self._refuse(error)
                    pause_seconds = REFUSED_SECONDS
                finally:
                    await client.close()
                if self.failure is None:
                    await asyncio.sleep(pause_seconds)
        finally:
            self.state = ShardState.STOPPED
            self._meter.shard_up.set(0)
            for sink in list(self._sinks.values()):
                sink.fail(Unavailable("the server has stopped"), time.monotonic())
            self._sinks.clear()
            self.settled.set()

    # ---- connecting

    async def _connect(self, client: ShardClient) -> None:
        """Waits for a shard, warms it up and takes over what waits. Raises `Unavailable`, `LimitsError`."""
        info = await self._find(client)
        planned = plan(self._wanted, info)
        log.info("the shard warms up: measuring a step of %s", counted(planned.max_step_tokens, "token"))
        try:
            capacity = await client.warmup(planned)
        except GenerationError as error:
            raise LimitsError(f"the shard could not warm up: {error.message}") from error
        self.limits, self.rows = derive(self._wanted, info, capacity)
        client.step_timeout_seconds = max(self._config.shard_timeout, SLOWEST_STEP * capacity.step_seconds)
        self.info = info
        scheduler = Scheduler(
            self.limits,
            waiting_served_ratio=self._config.waiting_served_ratio,
            max_waiting_tokens=self._config.max_waiting_tokens,
        )
        waiting = self._scheduler.waiting if self._scheduler is not None else []
        self._scheduler = scheduler
        for sequence in waiting:
            if scheduler.can_hold(sequence):
                scheduler.add(sequence)
            else:
                self._fail(sequence, self._too_long(sequence.request))
        self._loss = None
        self.state = ShardState.READY
        self._meter.ready(self.limits)
        self._changed()
        self.settled.set()
        log.info("the shard is warm: %s in %s on %s", info.model_type, info.dtype, info.device)

    async def _find(self, client: ShardClient) -> ShardInfo:
        """Asks until a shard answers; one of another version is named in a warning."""
        log.info("waiting for the shard at %s", self._config.shard)
        told = None
        while True:
            try:
                info = await client.info()
                break
            except Unavailable:
                pass  # It is still starting.
            except GenerationError as error:
                if error.message != told:
                    log.error("who answers at %s is no shard: %s", self._config.shard, error.message)
                told = error.message
            await asyncio.sleep(POLL_SECONDS)
        if info.version != __version__:
            log.warning("the shard runs headrace %s, and this router %s", info.version, __version__)
        return info

    def _lose(self, error: Unavailable) -> None:
        was_ready, self.state = self.state is ShardState.READY, ShardState.CONNECTING
        self._meter.lost()
        if self._scheduler is None or not was_ready:
            return
        self._deliver()
        failed = self._scheduler.lose_shard()
        for sequence in failed:
            self._fail(sequence, Unavailable("The model's process was lost during generation, try again"))
        self._changed()
        log.error(
            "%s: %s failed; waiting for it to come back: %d",
            error.message,
            counted(len(failed), "request"),
            self._scheduler.num_waiting,
        )

    def _refuse(self, error: LimitsError) -> None:
        """At the first start it is the process's end, which its owner tells. Later nobody knows when a shard
        will fit again: whoever waits for one is told."""
        if self._scheduler is None:
            self.failure = error
            return
        log.error("%s", error)
        for sequence in self._scheduler.waiting:
            self._scheduler.finish(sequence, FinishReason.FAILED)
            self._fail(sequence, Unavailable("The model's process cannot serve any more, try again later"))
        self._changed()

    async def _watch(self, client: ShardClient, instance: str) -> None:
        self._loss = await client.lost(instance)
        self._wake.set()
        await client.close()

    # ---- serving

    async def _serve(self, client: ShardClient) -> None:
        """Step after step until the shard is lost. Raises `Unavailable`."""
        assert self._scheduler is not None and self.info is not None
        scheduler = self._scheduler
        watch = asyncio.create_task(self._watch(client, self.info.instance))
        try:
            while self._loss is None:
                began = time.monotonic()
                step = scheduler.schedule(began)
                if step is None:
                    self._deliver()
                    await self._idle(client, scheduler)
                    continue
                self._started(step, began)
                await self._step(client, scheduler, step)
            raise self._loss
        finally:
            watch.cancel()
            await asyncio.wait([watch])

    async def _step(self, client: ShardClient, scheduler: Scheduler, step: Step) -> None:
        meter, method = self._meter, METHODS[0 if step.is_prefill else 1]
        sent = time.monotonic()
        call = client.send(step)
        # Once round the loop, so that the step is on its way before the readers of the last one wake up.
        await asyncio.sleep(0)
        self._deliver()
        try:
            result = await client.receive(call)
        except HeadraceError as error:
            meter.inference_failure[method].inc()
            if isinstance(error, Unavailable):
                raise
            await self._recover(client, scheduler, step, error)
            return
        came = time.monotonic()
        updates = scheduler.update(result)
        self._undelivered = (updates, came)
        meter.stepped(method, result, sum(update.token is not None for update in updates))
        meter.levels(scheduler)
        now = time.monotonic()
        meter.filter_duration[method].observe(now - came)
        meter.inference_duration[method].observe(now - sent)

    async def _recover(
        self, client: ShardClient, scheduler: Scheduler, step: Step, error: HeadraceError
    ) -> None:
        """A step failed: so do the requests in it; the shard forgets everybody, the others come back."""
        num_failed = counted(len(step.scheduled), "sequence")
        log.error("step %d of %s failed: %s", step.id, num_failed, error.message)
        for sequence in scheduler.fail_step(step):
            self._fail(sequence, GenerationError(error.message))
        self._changed()
        try:
            await client.clear()
            await client.health()
            info = await client.info()
        except GenerationError as further:
            raise Unavailable(f"the shard is not well after a failed step: {further.message}") from further
        assert self.info is not None
        if info.instance != self.info.instance:
            raise Unavailable("the shard was restarted")

    async def _idle(self, client: ShardClient, scheduler: Scheduler) -> None:
        """Nobody has anything to compute: the shard forgets what has ended, then we wait for somebody."""
        if dropped_ids := scheduler.take_dropped():
            try:
                self._meter.shard_sequences.set(await client.filter(dropped_ids))
            except GenerationError as error:
                raise Unavailable(f"the shard cannot drop sequences: {error.message}") from error
            return
        self._wake.clear()
        if self._loss is None:
            await self._wake.wait()

    def _started(self, step: Step, began: float) -> None:
        """Counts a step, and tells those who join it for the first time."""
        assert self._scheduler is not None
        self._meter.started(step, self._scheduler, time.monotonic() - began)
        for sequence in step.admitted:
            if sequence.admitted_at == began:
                self._meter.prompt_tokens.inc(len(sequence.request.prompt_ids))
                self._sinks[sequence.id].start(began)

    # ---- delivering

    def _deliver(self) -> None:
        """Tells the sinks what the last step brought."""
        (updates, now), self._undelivered = self._undelivered, ([], 0.0)
        for update in updates:
            sequence = update.sequence
            if update.error is not None:
                self._fail(sequence, GenerationError(f"Request failed during generation: {update.error}"))
                continue
            sink = self._sinks.get(sequence.id)
            if sink is None:
                continue  # Its reader has left meanwhile.
            if sequence.status is Status.FINISHED:
                del self._sinks[sequence.id]
            sink.deliver(update, now)

    def _too_long(self, request: Request) -> HeadraceError:
        assert self.limits is not None
        return context_length_exceeded(
            num_prompt=len(request.prompt_ids),
            num_new=request.max_new_tokens,
            most=self.limits.max_total_tokens,
        )

    def _fail(self, sequence: Sequence, error: HeadraceError) -> None:
        if (sink := self._sinks.pop(sequence.id, None)) is not None:
            sink.fail(error, time.monotonic())

    def _changed(self) -> None:
        """Somebody came or went: the gauges follow at once, and an idle loop looks again."""
        assert self._scheduler is not None
        self._meter.levels(self._scheduler)
        self._wake.set()
