"""A batcher at work over a scripted shard, for tests: submit, wait, look at the gauges."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from headrace_router.batcher import Batcher, ShardState
from headrace_router.config import RouterConfig
from headrace_router.errors import HeadraceError
from headrace_router.metrics import Metrics
from headrace_router.scheduling.request import FinishReason, Request, SamplingParams, Sequence
from headrace_router.scheduling.step import Update

from tests.fake_shard import FakeShard, made_up, serving

WAIT_SECONDS = 20.0
"""A bound, not an expectation."""


class RecordingSink:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.error: HeadraceError | None = None
        self.num_starts = 0
        self.over = asyncio.Event()
        self.sequence: Sequence | None = None

    def start(self, now: float) -> None:
        self.num_starts += 1

    def deliver(self, update: Update, now: float) -> None:
        assert not self.over.is_set()
        if update.token is not None:
            self.tokens.append(update.token.token_id)
        self.reason = update.sequence.finish_reason
        if self.reason is not None:
            self.over.set()

    def fail(self, error: HeadraceError, now: float) -> None:
        assert not self.over.is_set()
        self.error = error
        self.over.set()


class Harness:
    """A batcher at work and its metrics."""

    def __init__(self, address: str, **settings: Any) -> None:
        self.metrics = Metrics()
        config = RouterConfig(shard=address, tokenizer_name="unused", **settings)
        self.batcher = Batcher(config, self.metrics)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Harness"]:
        task = asyncio.create_task(self.batcher.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def ready(self) -> None:
        await self.until(lambda: self.batcher.state is ShardState.READY)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                await asyncio.sleep(0.005)

    def submit(self, num_prompt: int = 5, max_new: int = 4, *, salt: int = 0, **fields: Any) -> RecordingSink:
        sink = RecordingSink()
        sink.sequence = self.batcher.submit(request_of(num_prompt, max_new, salt, **fields), sink, 0.0)
        return sink

    def value(self, name: str, **labels: str) -> float:
        # The library's registry adds `_total` to counters; the page that we show does not.
        found = [self.metrics.registry.get_sample_value(name + end, labels) for end in ("", "_total")]
        return next(value for value in found if value is not None)

    async def until_idle(self, num_blocks: int) -> None:
        """Nothing runs or waits, and the shard has been told to forget everybody."""
        await self.until(lambda: self.value("headrace_shard_sequences") == 0)
        self.check_levels(running=0, waiting=0, used=0, num_blocks=num_blocks)
        assert self.value("headrace_kv_unused_slots") == self.value("headrace_kv_waste_ratio") == 0

    def check_levels(self, *, running: int, waiting: int, used: int, num_blocks: int) -> None:
        """Every block is used, cached or free."""
        assert self.value("tgi_queue_size") == self.value("headrace_requests", state="waiting") == waiting
        assert (self.value("headrace_queue_tokens") > 0) == (waiting > 0)
        assert self.value("tgi_batch_current_size") == running
        assert self.value("headrace_requests", state="running") == running
        blocks = {s: self.value("headrace_kv_blocks", state=s) for s in ("used", "cached", "free")}
        assert blocks["used"] == used and sum(blocks.values()) == num_blocks, blocks
        assert self.value("tgi_batch_current_max_tokens") == used * 16


def settle(
    address: str, shard: FakeShard, main: Callable[[Harness], Awaitable[Any]], **settings: Any
) -> None:
    """Runs `main` with a batcher that is ready; at the end the shard must have nothing to complain of."""

    async def run() -> None:
        async with serving(shard, address), Harness(address, **settings).running() as harness:
            await harness.ready()
            async with asyncio.timeout(WAIT_SECONDS):
                await main(harness)
            assert shard.violations == []

    asyncio.run(run())


def request_of(num_prompt: int, max_new: int, salt: int = 0, **fields: Any) -> Request:
    """Requests of different salts have no beginning in common."""
    values: dict[str, Any] = {"sampling": SamplingParams(temperature=0), "max_new_tokens": max_new}
    prompt_ids = tuple(3 + (salt + i) % 300 for i in range(num_prompt))
    return Request(prompt_ids=prompt_ids, **(values | fields))


def expected(num_prompt: int, max_new: int, salt: int = 0) -> list[int]:
    """What the fake answers, however the work is cut into steps."""
    token_ids = list(request_of(num_prompt, max_new, salt).prompt_ids)
    for _ in range(max_new):
        # `made_up` looks at nothing but these.
        fake = type("Fake", (), {"token_ids": token_ids, "new": type("New", (), {"sampling": _GREEDY})})
        token_ids.append(made_up(384)(fake))  # type: ignore[arg-type]
    return token_ids[num_prompt:]


_GREEDY = SamplingParams(temperature=0)
