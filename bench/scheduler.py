"""What the scheduler itself costs: `python -m bench.scheduler`. Nothing is computed and nothing is sent.

A step is one `schedule` and one `update`, with two steps in flight as in a server. It has to be small beside
a step of the device, and must not grow with the queue. What is measured is the processor time of the thread:
others on the machine do not count, but for what they leave in its caches.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace_router.scheduling.blocks import KVBlocks, block_keys
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.request import Request, SamplingParams, Sequence
from headrace_router.scheduling.scheduler import Scheduler
from headrace_router.scheduling.step import SampledToken, Step, StepResult
from rich import box
from rich.table import Table

from bench.screen import screen

BLOCK_SIZE = 16
NUM_RUNNING = 512
MAX_STEP_TOKENS = 4096
NUM_PROMPT_TOKENS = 256
LONG_PROMPT_TOKENS = 200_000
STEP_SECONDS = 0.010
MAX_PRIORITY = 1000

TAIL = 4
"""Python's garbage collector, and many that end at once, lengthen single steps."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the table."""

    name: str
    p50_seconds: float
    p99_seconds: float
    limit_seconds: float | None = None

    @property
    def holds(self) -> bool:
        """The limit is one for the usual step; one in a hundred may take `TAIL` times as long."""
        if self.limit_seconds is None:
            return True
        return self.p50_seconds <= self.limit_seconds and self.p99_seconds <= TAIL * self.limit_seconds


class Load:
    """A scheduler with `NUM_RUNNING` running sequences, and more that wait."""

    def __init__(
        self,
        num_waiting: int,
        *,
        new_tokens: range,
        num_places: int = 0,
        token_seconds: float = 0.0,
        num_priorities: int = 1,
    ) -> None:
        """`num_places` beyond those that run at first; how much a request generates is taken from
        `new_tokens` in turn, and its priority from `num_priorities`. A prompt token makes a step longer by
        `token_seconds`, a decode by nothing."""
        num_blocks = (NUM_RUNNING + num_places) * (NUM_PROMPT_TOKENS + new_tokens[-1]) // BLOCK_SIZE * 5 // 4
        limits = Limits(
            max_input_tokens=num_blocks * BLOCK_SIZE - 1,
            max_total_tokens=num_blocks * BLOCK_SIZE,
            max_step_tokens=MAX_STEP_TOKENS,
            max_step_sequences=NUM_RUNNING + num_places,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=1 << 20,
            eos_token_ids=frozenset(),
        )
        self.scheduler = Scheduler(
            limits,
            step_costs=(
                (1, STEP_SECONDS * 0.99),
                (NUM_RUNNING, STEP_SECONDS),
                (2 * NUM_RUNNING, STEP_SECONDS + NUM_RUNNING * token_seconds),
            ),
        )
        self._new_tokens = new_tokens
        self._token_seconds = token_seconds
        self._num_priorities = num_priorities
        self._num_added = 0
        self._in_flight: deque[Step] = deque()
        self.refill(NUM_RUNNING)
        while self.scheduler.num_waiting:
            self.step()
        self.refill(num_waiting)

    def _add(self) -> None:
        self._num_added += 1
        number = self._num_added
        request = Request(
            prompt_ids=tuple(range(number * 7, number * 7 + NUM_PROMPT_TOKENS)),
            sampling=SamplingParams(),
            max_new_tokens=self._new_tokens[number * 31 % len(self._new_tokens)],
            eos_token_ids=frozenset({1}),
            priority=number * 7919 % self._num_priorities - self._num_priorities // 2,
            tenant=str(number % 8),
        )
        self.scheduler.add(Sequence(id=number, request=request, arrived_at=0.0))

    def refill(self, num_requests: int) -> None:
        """So many more wait."""
        for _ in range(num_requests):
            self._add()

    def step(self) -> tuple[float, int]:
        """Schedules a step and takes in the answer to the one before; gives what both took, in seconds, and
        how many sequences finished."""
        begin = time.thread_time()
        step = self.scheduler.schedule(0.0)
        seconds = time.thread_time() - begin
        if step is not None:
            self._in_flight.append(step)
        num_finished = 0
        if len(self._in_flight) == 2 or (step is None and self._in_flight):
            result = self._answer(self._in_flight.popleft())
            begin = time.thread_time()
            updates = self.scheduler.update(result)
            seconds += time.thread_time() - begin
            num_finished = sum(update.sequence.finish_reason is not None for update in updates)
        return seconds, num_finished

    def _answer(self, step: Step) -> StepResult:
        num_chunk_tokens = step.total_tokens - len(step.sequences)
        return StepResult(
            tokens=[SampledToken(sequence_id=s.id, token_id=7, logprob=-1.0) for s in step.samplers],
            prompt_logprobs=[],
            errors=[],
            forward_seconds=STEP_SECONDS + num_chunk_tokens * self._token_seconds,
            sample_seconds=0.0,
            idle_seconds=0.0,
            num_sequences=len(step.sequences),
        )


def _figure(name: str, seconds: list[float], limit_seconds: float | None = None) -> Figure:
    seconds = sorted(seconds)
    return Figure(
        name=name,
        p50_seconds=seconds[len(seconds) // 2],
        p99_seconds=seconds[int(len(seconds) * 0.99)],
        limit_seconds=limit_seconds,
    )


def _decoding(num_waiting: int, num_steps: int) -> Figure:
    """Everybody who runs decodes, nobody can join."""
    num_tokens = num_steps + NUM_RUNNING
    load = Load(num_waiting, new_tokens=range(num_tokens, num_tokens + 1))
    name = f"{NUM_RUNNING} decode, {num_waiting:,} wait"
    return _figure(name, [load.step()[0] for _ in range(num_steps)], 0.001)


def _turning_over(num_waiting: int, num_steps: int) -> Figure:
    """Some end and others join in nearly every step, as under load."""
    load = Load(num_waiting, new_tokens=range(64, 320))
    return _figure(
        f"{NUM_RUNNING} run, some end and others join, {num_waiting:,} wait", _run(load, num_steps), 0.001
    )


def _many_priorities(num_waiting: int, num_steps: int) -> Figure:
    """As many priorities as the API lets in."""
    num_priorities = 2 * MAX_PRIORITY + 1
    load = Load(num_waiting, new_tokens=range(64, 320), num_priorities=num_priorities)
    name = f"the same with {num_priorities:,} priorities, {num_waiting:,} wait"
    return _figure(name, _run(load, num_steps), 0.001)


def _held_up(num_waiting: int, num_steps: int) -> Figure:
    """There are places, but the decodes bear few prompt tokens beside them: many could join, few may."""
    load = Load(num_waiting, new_tokens=range(1024, 2048), num_places=NUM_RUNNING, token_seconds=0.0005)
    return _figure(
        f"{NUM_RUNNING} run, few prompt tokens a step, {num_waiting:,} wait", _run(load, num_steps), 0.001
    )


def _run(load: Load, num_steps: int) -> list[float]:
    seconds: list[float] = []
    for _ in range(num_steps):
        taken, num_finished = load.step()
        load.refill(num_finished)
        seconds.append(taken)
    return seconds


def _looking_up(num_lookups: int) -> Iterator[Figure]:
    """A prompt of `LONG_PROMPT_TOKENS`, all of it cached."""
    token_ids = tuple(range(LONG_PROMPT_TOKENS))
    num_blocks = LONG_PROMPT_TOKENS // BLOCK_SIZE
    blocks = KVBlocks(num_blocks + 1, BLOCK_SIZE)
    keys = block_keys(token_ids, BLOCK_SIZE)
    holding = blocks.open("", [], 0)
    blocks.grow(holding, num_blocks)
    blocks.commit(holding, keys, num_blocks)
    blocks.close(holding)

    def look_up() -> None:
        blocks.close(blocks.open("", block_keys(token_ids, BLOCK_SIZE), num_blocks))

    name = f"keys of a prompt of {LONG_PROMPT_TOKENS:,} tokens"
    yield _figure(name, [_timed(lambda: block_keys(token_ids, BLOCK_SIZE)) for _ in range(num_lookups)])
    name = f"keys and look-up of a prompt of {LONG_PROMPT_TOKENS:,} tokens"
    yield _figure(name, [_timed(look_up) for _ in range(num_lookups)], 0.010)


def _timed(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def main() -> int:
    """Prints the table; gives 1 when a figure is over its limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each row (%(default)s)")
    num_steps = parser.parse_args().steps
    loads = (_decoding, _turning_over, _many_priorities, _held_up)
    figures = [load(num_waiting, num_steps) for load in loads for num_waiting in (0, 4096, 40_000)]
    figures += _looking_up(20)
    table = Table(title=f"What a step costs the scheduler, of {num_steps} steps", box=box.SIMPLE_HEAD)
    for name in ("", "p50 ms", "p99 ms", "limit ms", " "):
        table.add_column(name, justify="right" if name.endswith("ms") else "left")
    for figure in figures:
        limit = f"{figure.limit_seconds * 1000:.0f}" if figure.limit_seconds else ""
        style = "" if figure.holds else "red"
        p50, p99 = f"{figure.p50_seconds * 1000:.3f}", f"{figure.p99_seconds * 1000:.3f}"
        table.add_row(figure.name, p50, p99, limit, "" if figure.holds else "too slow", style=style)
    screen().print(table)
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
