"""What the API works with: permits, submitting, health, draining. Everything happens in one event loop.

Knows no text and no scheduling: a `Generation` has the one, the batcher the other.
"""

import asyncio
import time
from types import TracebackType
from typing import Self

from headrace_router.batcher import Batcher, ShardState
from headrace_router.config import RouterConfig
from headrace_router.errors import Overloaded, Unavailable
from headrace_router.generation import (
    Finish,
    Generation,
    Output,
    OutputToken,
    PromptToken,
    Timings,
    TopToken,
)
from headrace_router.metrics import Metrics
from headrace_router.scheduling.limits import Limits, Row, ShardInfo
from headrace_router.scheduling.request import Request
from headrace_router.shards.client import target_of
from headrace_router.text.output import OutputOptions
from headrace_router.text.tokenizer import Tokenizer

__all__ = [
    "Engine",
    "Finish",
    "Generation",
    "Output",
    "OutputToken",
    "Permit",
    "PromptToken",
    "Timings",
    "TopToken",
]


class Permit:
    """Room for some sequences in the server, from validation to the end of the answer. A context manager."""

    def __init__(self, engine: "Engine", num_sequences: int) -> None:
        self._engine = engine
        self._num_sequences = num_sequences

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Gives the room back; idempotent."""
        num_sequences, self._num_sequences = self._num_sequences, 0
        self._engine._release(num_sequences)


class Engine:
    """What the API works with. Raises `SettingsError` when the shard's address is malformed."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, metrics: Metrics) -> None:
        target_of(config.shard)
        self._config = config
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._batcher = Batcher(config, metrics)
        self._task: asyncio.Task[None] | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.num_active = 0
        """Sequences with a permit."""
        self.is_draining = False

    async def start(self) -> None:
        """Begins connecting in the background; returns at once."""
        self._task = asyncio.create_task(self._batcher.run(), name="batcher")

    async def settled(self) -> None:
        """Returns once the shard has been ready. Raises `LimitsError`, one line, when the settings forbid it,
        and `Unavailable` when the end came first."""
        await self._batcher.settled.wait()
        if self._batcher.failure is not None:
            raise self._batcher.failure
        if self._batcher.limits is None:
            raise Unavailable("the server has ended before the shard was ready")

    async def ended(self) -> None:
        """Returns once nothing is served any more: after `stop`, or when limits cannot be met. Raises the
        fault of its own that has ended the loop, if one has."""
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()

    async def stop(self) -> None:
        """Whatever still runs fails with `Unavailable`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def limits(self) -> Limits | None:
        """None until a shard was warm for the first time."""
        return self._batcher.limits

    @property
    def info(self) -> ShardInfo | None:
        """What the shard says of itself; None until a shard was warm for the first time."""
        return self._batcher.info

    @property
    def rows(self) -> tuple[Row, ...]:
        """The start-up table; empty until a shard was warm for the first time."""
        return self._batcher.rows

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be served."""
        return self._batcher.state is ShardState.READY and not self.is_draining

    async def check_health(self) -> None:
        """Raises `Unavailable` unless the shard is well. Asks nobody: the batcher looks every second."""
        if self._batcher.state is not ShardState.READY:
            raise Unavailable("unhealthy")

    # ---- requests

    def admit(self, num_sequences: int = 1) -> Permit:
        """Room for so many sequences, or `Overloaded`, or `Unavailable` (no shard, draining)."""
        if self.is_draining:
            raise Unavailable("the server is shutting down")
        if not self.is_ready:
            raise Unavailable("the server is not ready: the shard is starting or gone")
        if self.num_active + num_sequences > self._config.max_concurrent_requests:
            raise Overloaded("Model is overloaded")
        self.num_active += num_sequences
        self._is_idle.clear()
        return Permit(self, num_sequences)

    def _release(self, num_sequences: int) -> None:
        self.num_active -= num_sequences
        if self.num_active == 0:
            self._is_idle.set()

    def submit(
        self, request: Request, options: OutputOptions, *, arrived: float, num_companions: int = 0
    ) -> Generation:
        """Queues a request under a permit. Arguments and errors as of `Batcher.submit`."""
        timings = Timings(arrived=arrived, queued=time.monotonic())
        generation = Generation(self._batcher, self._tokenizer, self._metrics, request, options, timings)
        generation.begin(num_companions)
        self._metrics.request_input_length.observe(len(request.prompt_ids))
        self._metrics.request_max_new_tokens.observe(request.max_new_tokens)
        return generation

    # ---- the end

    def drain(self) -> None:
        """From now on nobody is admitted; who is in may end."""
        self.is_draining = True

    async def drained(self, timeout_seconds: float) -> bool:
        """Waits until nobody is in; False when the time is up before."""
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True
