"""The connection to a shard, and the door to the scheduler behind which requests wait for their steps.

States of the connection, moved by `Batcher.run` alone:

    CONNECTING ──answers and is warm──► READY ──gone, frozen or another process──► CONNECTING
         └────────── limits cannot be met at the first start, or `run` is cancelled ──► STOPPED

While the shard is lost, what ran has failed (or, without a token yet, waits once more), what waits goes on
waiting. While it is there, `pipeline` serves. Knows no text: what happens to a sequence is told to its
`Sink`.
"""

import asyncio
import enum
import itertools
import logging
import time

from headrace_proto import __version__

from headrace_router.config import RouterConfig
from headrace_router.delivery import Delivery, Sink
from headrace_router.errors import (
    GenerationError,
    HeadraceError,
    LimitsError,
    Overloaded,
    Unavailable,
    context_length_exceeded,
    counted,
)
from headrace_router.meter import Meter
from headrace_router.metrics import Metrics
from headrace_router.pipeline import Pipeline
from headrace_router.scheduling.limits import Limits, Row, ShardInfo, Wanted, derive, plan
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.request import FinishReason, Request, Sequence
from headrace_router.scheduling.scheduler import Scheduler
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


class Batcher:
    """Owns the scheduler and the connection. Everything happens in one event loop."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._config = config
        self._policy = Policy(
            waiting_served_ratio=config.waiting_served_ratio,
            max_waiting_tokens=config.max_waiting_tokens,
            prefix_caching=config.prefix_caching,
            max_step_slowdown=config.max_step_slowdown,
        )
        self._wanted = Wanted(
            model_id=config.model_id or config.tokenizer_name,
            max_input_tokens=config.max_input_tokens,
            max_total_tokens=config.max_total_tokens,
            max_step_tokens=config.max_batch_prefill_tokens,
            max_cache_tokens=config.max_batch_total_tokens,
            max_batch_size=config.max_batch_size,
            max_concurrent_requests=config.max_concurrent_requests,
            policy=self._policy,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            request_timeout=config.request_timeout,
        )
        self._meter = Meter(metrics, backpressure=config.waiting_served_ratio > 0)
        self._ids = itertools.count(1)
        self._delivery = Delivery()
        self._scheduler: Scheduler | None = None
        self._pipeline: Pipeline | None = None
        """Serves, while the shard is ready."""
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

    def submit(self, request: Request, sink: Sink, now: float, *, num_companions: int = 0) -> Sequence:
        """Queues a request. Raises `Unavailable` before the first shard was ready and after the end,
        `ContextLengthExceeded` for one that could never run, and `Overloaded` when the queue is full.

        `num_companions`: how many have joined the queue just now for the same HTTP request.
        """
        if self._scheduler is None or self.state is ShardState.STOPPED:
            raise Unavailable("the server is not ready")
        sequence = Sequence(id=next(self._ids), request=request, arrived_at=now)
        if not self._scheduler.can_hold(sequence):
            raise self._too_long(request)
        if self._scheduler.num_waiting > num_companions:
            self._check_queue(self._scheduler, request)
        self._delivery.join(sequence, sink)
        self._scheduler.add(sequence)
        self._changed()
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence before the next step; its sink hears nothing more. No error when it has ended."""
        self._delivery.leave(sequence)
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
                    self._lose(error)
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
            self._delivery.fail_all(Unavailable("the server has stopped"), time.monotonic())
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
        former, self._scheduler = self._scheduler, Scheduler(self.limits, self._policy, capacity.step_costs)
        if former is not None:
            self._take_over(former, self._scheduler)
        self.state = ShardState.READY
        self._meter.ready(self.limits)
        self._changed()
        self.settled.set()
        log.info("the shard is warm: %s in %s on %s", info.model_type, info.dtype, info.device)

    def _take_over(self, former: Scheduler, scheduler: Scheduler) -> None:
        """Those who wait go on waiting, but for those whom the shard that came back could never hold."""
        for sequence in former.waiting:
            if scheduler.can_hold(sequence):
                scheduler.add(sequence)
            else:
                self._turn_away(former, sequence, self._too_long(sequence.request))

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
        self._delivery.deliver()
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
            told = Unavailable("The model's process cannot serve any more, try again later")
            self._turn_away(self._scheduler, sequence, told)
        self._changed()

    # ---- serving

    async def _serve(self, client: ShardClient) -> None:
        """Step after step until the shard is lost. Raises `Unavailable`."""
        assert self._scheduler is not None and self.info is not None
        instance = self.info.instance
        self._pipeline = Pipeline(client, instance, self._scheduler, self._meter, self._delivery)
        steps = asyncio.create_task(self._pipeline.run())
        watch = asyncio.create_task(client.lost(instance))
        try:
            await asyncio.wait([steps, watch], return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                raise watch.result()
            await steps
        finally:
            self._pipeline = None
            for task in (steps, watch):
                task.cancel()
            await asyncio.gather(steps, watch, return_exceptions=True)

    def _check_queue(self, scheduler: Scheduler, request: Request) -> None:
        """Raises `Overloaded` when one more would exceed what may wait.

        Asked only when others wait. Who finds nobody waiting is let in with all companions, however many and
        long they are: else they could never come in.
        """
        num_waiting, most = scheduler.num_waiting, self._config.max_queued_requests
        if most is not None and num_waiting >= most:
            raise Overloaded(
                f"Model is overloaded: {counted(num_waiting, 'answer')} waiting, and --max-queued-requests "
                f"is {most}; try again later"
            )
        num_tokens, most = len(request.prompt_ids), self._config.max_queued_tokens
        if most is not None and scheduler.num_waiting_tokens + num_tokens > most:
            raise Overloaded(
                f"Model is overloaded: {counted(scheduler.num_waiting_tokens, 'prompt token')} waiting and "
                f"{num_tokens} more asked for, and --max-queued-tokens is {most}; try again later"
            )

    def _too_long(self, request: Request) -> HeadraceError:
        assert self.limits is not None
        return context_length_exceeded(
            num_prompt=len(request.prompt_ids),
            num_new=request.max_new_tokens,
            most=self.limits.max_total_tokens,
        )

    def _turn_away(self, scheduler: Scheduler, sequence: Sequence, error: HeadraceError) -> None:
        """Ends one that waits in `scheduler`: its reader, who will leave, finds that it has ended."""
        scheduler.finish(sequence, FinishReason.FAILED)
        self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: HeadraceError) -> None:
        self._delivery.fail(sequence, error, time.monotonic())

    def _changed(self) -> None:
        """Somebody came or went: the gauges follow at once, and an idle pipeline looks again."""
        assert self._scheduler is not None
        self._meter.levels(self._scheduler)
        if self._pipeline is not None:
            self._pipeline.wake()
