"""From jobs to generations: room, copies with their own seeds, whole answers, streams merged, headers.

Of several generations that one request asks for, the first that fails ends all: an answer has one status, and
an error event of a stream names no choice.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace_router.api.exchange import Exchange, HeaderList, Service
from headrace_router.engine import Finish, Generation, Output, OutputToken, Permit, PromptToken, Timings
from headrace_router.errors import HeadraceError
from headrace_router.scheduling.request import Request
from headrace_router.schemas.decode import invalid
from headrace_router.validation import Job

MAX_SEED = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A generation under way, and what it is of."""

    job: Job
    request: Request
    """The job's, but with the seed of this copy."""
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A generation that has ended."""

    job: Job
    request: Request
    tokens: list[OutputToken]
    prompt: list[PromptToken]
    """Empty unless its log-probabilities were asked for."""
    finish: Finish
    timings: Timings

    @property
    def mean_logprob(self) -> float:
        """What `best_of` compares."""
        return sum(token.logprob for token in self.tokens) / max(len(self.tokens), 1)


def admitted(service: Service, num_sequences: int, param: str) -> Permit:
    """Room for what one request asks for. Raises as `Engine.admit`, and `ValidationError`, naming `param`,
    for more than there will ever be: to try again would be in vain."""
    most = service.config.max_concurrent_requests
    if num_sequences > most:
        raise invalid(
            f"`{param}` asks for {num_sequences} answers at once. This server computes at most {most} "
            "(`--max-concurrent-requests`)",
            param,
        )
    return service.engine.admit(num_sequences)


def copies(request: Request, num_copies: int, tenant: str) -> list[Request]:
    """The request of a tenant several times over; copy i draws with seed + i, all else is equal.

    They hold one tuple of prompt ids, by which the scheduler knows that they may share its blocks.
    """
    first = request.sampling.seed
    return [
        replace(request, tenant=tenant, sampling=replace(request.sampling, seed=(first + i) % MAX_SEED))
        for i in range(num_copies)
    ]


def num_cached(running: Sequence[Running], num_copies: int) -> int:
    """Prompt tokens found in the prefix cache, of `num_copies` running for each prompt, prompt by prompt.

    Like the prompt, what was found of it counts once: for the first copy, which the others wait for.
    """
    return sum(one.generation.num_cached for one in running[::num_copies])


@contextlib.contextmanager
def submitted(
    service: Service, exchange: Exchange, jobs: Sequence[Job], num_copies: int = 1
) -> Iterator[list[Running]]:
    """`num_copies` of each job, job by job, under way. None of them outlives the context."""
    running: list[Running] = []
    exchange.num_prompt_tokens = sum(len(job.request.prompt_ids) for job in jobs)
    try:
        for job in jobs:
            for request in copies(job.request, num_copies, exchange.tenant):
                generation = service.engine.submit(
                    request, job.options, arrived=exchange.arrived, num_companions=len(running)
                )
                exchange.generations.append(generation)
                running.append(Running(job=job, request=request, generation=generation))
        queued = running[0].generation.timings.queued
        service.metrics.request_validation_duration.observe(queued - exchange.arrived)
        yield running
        service.metrics.request_duration.observe(time.monotonic() - exchange.arrived)
    finally:
        exchange.num_cached_tokens = num_cached(running, num_copies)
        for one in running:
            one.generation.cancel()


async def answers(running: Sequence[Running]) -> list[Answer]:
    """Waits for the ends of all generations. Raises the first error that one of them raises.

    All are read at once, for it is the reader who finds a stop string and ends the sequence.
    """
    if len(running) == 1:
        return [await _answer(running[0])]
    readers = [asyncio.create_task(_answer(one)) for one in running]
    try:
        return await asyncio.gather(*readers)
    finally:
        await _cancelled(readers)


async def _answer(running: Running) -> Answer:
    generation = running.generation
    tokens: list[OutputToken] = []
    prompt: list[PromptToken] = []
    finish = None
    async for output in generation:
        tokens += output.tokens
        prompt = output.prompt or prompt
        finish = output.finish
    if finish is None:
        raise HeadraceError("Incomplete generation")
    return Answer(
        job=running.job,
        request=running.request,
        tokens=tokens,
        prompt=prompt,
        finish=finish,
        timings=generation.timings,
    )


def best_of(candidates: Sequence[Answer], num_best: int = 1) -> list[Answer]:
    """The `num_best` of highest mean log-probability first, then the others; each part in its old order."""
    ranked = sorted(range(len(candidates)), key=lambda index: -candidates[index].mean_logprob)  # Stable.
    best = sorted(ranked[:num_best])
    return [candidates[index] for index in [*best, *sorted(set(ranked) - set(best))]]


async def merged(running: Sequence[Running]) -> AsyncGenerator[list[tuple[int, Output]], None]:
    """Outputs with the index of their generation, as they come; those that are ready together come together.

    Ends when all generations have ended. Raises the first error that one of them raises, after all that this
    one had to say before.
    """
    if len(running) == 1:
        async for output in running[0].generation:
            yield [(0, output)]
        return
    ready: list[tuple[int, Output]] = []
    has_news = asyncio.Event()

    async def read(index: int, generation: Generation) -> None:
        try:
            async for output in generation:
                ready.append((index, output))
                has_news.set()
        finally:
            has_news.set()

    pumps = [asyncio.create_task(read(index, one.generation)) for index, one in enumerate(running)]
    try:
        while True:
            # Before `ready` is taken: what a pump has put there before its end must not be left behind.
            is_over = all(pump.done() for pump in pumps)
            failed = next((pump for pump in pumps if pump.done() and pump.exception()), None)
            if ready:
                batch, ready[:] = list(ready), []
                yield batch
            if failed is not None:
                failed.result()
            if is_over:
                return
            await has_news.wait()
            has_news.clear()
    finally:
        await _cancelled(pumps)


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def stream_headers(service: Service, num_characters: int) -> HeaderList:
    """The headers of a stream, which begins before there are times to tell."""
    return [
        (b"x-compute-type", service.compute_type.encode()),
        (b"x-compute-characters", b"%d" % num_characters),
    ]


def answer_headers(
    service: Service,
    exchange: Exchange,
    slowest: Sequence[Answer],
    *,
    num_characters: int,
    num_generated: int,
) -> HeaderList:
    """The headers of a whole answer: sizes, and times in milliseconds summed over the prompts.

    `slowest` holds one generation of each prompt, the one that took longest.
    """
    times = {b"x-total-time": 0.0, b"x-validation-time": 0.0, b"x-queue-time": 0.0, b"x-inference-time": 0.0}
    per_token = 0.0
    for one in slowest:
        timings = one.timings
        ended = time.monotonic() if timings.ended is None else timings.ended
        started = ended if timings.started is None else timings.started
        times[b"x-total-time"] += ended - timings.arrived
        times[b"x-validation-time"] += timings.queued - timings.arrived
        times[b"x-queue-time"] += started - timings.queued
        times[b"x-inference-time"] += ended - started
        per_token += (ended - started) / max(one.finish.num_generated, 1)
    num_prompt_tokens = sum(len(one.request.prompt_ids) for one in slowest)
    return [
        *stream_headers(service, num_characters),
        (b"x-compute-time", b"%.6f" % (time.monotonic() - exchange.arrived)),
        *((name, b"%d" % (seconds * 1000)) for name, seconds in times.items()),
        (b"x-time-per-token", b"%d" % (per_token * 1000)),
        (b"x-prompt-tokens", b"%d" % num_prompt_tokens),
        (b"x-cached-tokens", b"%d" % exchange.num_cached_tokens),
        (b"x-generated-tokens", b"%d" % num_generated),
    ]
