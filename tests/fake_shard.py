"""A scripted shard: the real gRPC service in plain Python, with made-up tokens. The router's one test double.

It holds the router to the contract: a step that names an unknown sequence, computes more than there is, puts
a token where no block is or somebody else reads, or counts on KV that nobody has computed, fails and is
written down in `violations`; so is a third step under way. What it answers is a function of the sequence
alone, so that batching, chunks, shared blocks and preemptions can be seen to change nothing.

In a test:         async with serving(FakeShard(), address) as shard: ...
As a process:      python -m tests.fake_shard --address unix:///tmp/x --step-seconds 0.01
"""

import argparse
import asyncio
import bisect
import contextlib
import itertools
import uuid
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from headrace_proto import __version__
from headrace_proto import shard_pb2 as pb
from headrace_proto.shard_pb2_grpc import ShardServicer, add_ShardServicer_to_server

from tests.fake_cache import FakeCache, Violation, digests_of
from tests.fake_cache import FakeSequence as FakeSequence

PATIENCE_SECONDS = 5.0
"""How long a step waits for the one before it."""

FIRST_TOKEN = 3
"""Ids below are the special ones of the tiny tokenizer; they are not made up, only scripted."""


Answer = Callable[[FakeSequence], int]
"""The next token of a sequence."""


def made_up(vocab_size: int) -> Answer:
    """A token that depends on every token before it, and on the seed unless the sequence is greedy."""

    def answer(sequence: FakeSequence) -> int:
        seed = sequence.new.sampling.seed if sequence.new.sampling.temperature > 0 else 0
        digest = zlib.crc32(repr((seed, sequence.token_ids)).encode())
        return FIRST_TOKEN + digest % (vocab_size - FIRST_TOKEN)

    return answer


def scripted(token_ids: Sequence[int]) -> Answer:
    """These tokens, one after the other, and from the start again."""
    return lambda sequence: token_ids[sequence.num_generated % len(token_ids)]


def logprob_of(token_id: int) -> float:
    """What the fake says of a chosen token; its alternatives follow in steps of one."""
    return -(token_id % 8) / 8


class FakeShard(ShardServicer):
    """All knobs are plain attributes and may be turned while it serves."""

    def __init__(
        self,
        *,
        answer: Answer | None = None,
        num_blocks: int = 64,
        block_size: int = 16,
        vocab_size: int = 384,
        max_positions: int = 512,
        eos_token_ids: tuple[int, ...] = (2,),
        device: str = "cpu",
        step_seconds: float = 0.0,
    ) -> None:
        self.answer = answer or made_up(vocab_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.eos_token_ids = eos_token_ids
        self.device = device
        self.step_seconds = step_seconds
        """How late every step answers."""
        self.step_errors: deque[tuple[grpc.StatusCode, str]] = deque()
        """Each fails one step."""
        self.poison: Callable[[FakeSequence], str | None] = lambda sequence: None
        """A message fails every step in which the one sequence computes."""
        self.sequence_error: Callable[[FakeSequence], str | None] = lambda sequence: None
        """A message fails the one sequence that would have got a token."""
        self.warmup_error: str | None = None
        self.health_error: str | None = None
        """While it is set, the device does not compute."""
        self.info_errors: deque[str] = deque()
        """Each fails one call of Info, as a program that is no shard would."""
        self.measured_seconds: float | None = None
        """What the largest step is said to have taken; None: `step_seconds`."""
        self.version = __version__
        self.instance = uuid.uuid4().hex
        self.gate = asyncio.Event()
        """Steps wait while it is cleared."""
        self.gate.set()
        self.step_costs: tuple[tuple[int, float], ...] = ()
        self.sequences: dict[int, FakeSequence] = {}
        self.warmups: list[pb.WarmupRequest] = []
        self.steps: list[pb.StepRequest] = []
        """Those that have arrived, in the order of their ids after every warm-up."""
        self._num_steps_before = 0
        """How many of them came before the last warm-up."""
        self.num_in_flight = 0
        """Steps that have arrived and are not answered."""
        self.violations: list[str] = []
        self._cache = FakeCache(0, block_size)
        self._failed: dict[int, str] = {}
        """Sequences that have failed and that the router has not dropped yet, and why."""
        self._next_id = 0
        self._order = asyncio.Condition()

    # ---- the service

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        if self.info_errors:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, self.info_errors.popleft())
        return pb.InfoResponse(
            model_type="llama",
            dtype="float32",
            device=self.device,
            block_size=self.block_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            eos_token_ids=self.eos_token_ids,
            weight_bytes=1_000_000,
            version=self.version,
            instance=self.instance,
        )

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        if self.health_error is not None:
            await context.abort(grpc.StatusCode.INTERNAL, self.health_error)
        return pb.HealthResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: Any) -> pb.WarmupResponse:
        if self.warmup_error is not None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.warmup_error)
        self.warmups.append(request)
        num_blocks = self.num_blocks
        if request.max_total_tokens:
            num_blocks = min(num_blocks, request.max_total_tokens // self.block_size)
        self.sequences.clear()
        self._failed.clear()
        self._cache = FakeCache(num_blocks, self.block_size)
        self._next_id = 0
        self._num_steps_before = len(self.steps)
        return pb.WarmupResponse(
            num_blocks=num_blocks,
            block_bytes=1024,
            step_seconds=self.step_seconds if self.measured_seconds is None else self.measured_seconds,
            available_bytes=1024 * self.num_blocks,
            step_costs=[
                pb.StepCost(num_tokens=tokens, seconds=seconds) for tokens, seconds in self.step_costs
            ],
        )

    async def Prefill(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        return await self._step(request, context, is_decode=False)

    async def Decode(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        return await self._step(request, context, is_decode=True)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        num_dropped = len(self.sequences)
        self._drop(list(self.sequences))
        return pb.ClearResponse(num_dropped=num_dropped)

    async def Filter(self, request: pb.FilterRequest, context: Any) -> pb.FilterResponse:
        if self.num_in_flight:
            self.violations.append("Filter while steps are under way: they could carry the ids")
        self._drop(request.dropped_ids)
        return pb.FilterResponse(num_sequences=len(self.sequences))

    # ---- a step

    async def _step(self, request: pb.StepRequest, context: Any, *, is_decode: bool) -> pb.StepResponse:
        # A short message may come before a long one that was sent earlier.
        bisect.insort(self.steps, request, lo=self._num_steps_before, key=lambda step: step.step_id)
        self.num_in_flight += 1
        cache = self._cache
        try:
            if self.num_in_flight > 2:
                raise Violation(f"{self.num_in_flight} steps under way")
            self._check_arrivals(request)
            async with self._turn(request.step_id):
                if self.step_seconds:
                    await asyncio.sleep(self.step_seconds)
                await self.gate.wait()
                if cache is not self._cache:
                    await context.abort(grpc.StatusCode.ABORTED, "the shard was warmed up meanwhile")
                if (error := self._step_error(request)) is not None:
                    self._fail_step(request, error[1])
                    await context.abort(*error)
                return self._execute(request, is_decode)
        except Violation as violation:
            self.violations.append(str(violation))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(violation))
            raise
        finally:
            self.num_in_flight -= 1

    @contextlib.asynccontextmanager
    async def _turn(self, step_id: int) -> AsyncIterator[None]:
        """Steps are executed in the order of their ids, whatever the order in which they come."""
        async with self._order:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._order.wait_for(lambda: self._next_id >= step_id)
            except TimeoutError:
                raise Violation(f"step {step_id} without step {self._next_id}") from None
            if self._next_id != step_id:
                raise Violation(f"step {step_id} after step {self._next_id - 1}")
        try:
            yield
        finally:
            self._next_id = step_id + 1
            async with self._order:
                self._order.notify_all()

    def _check_arrivals(self, request: pb.StepRequest) -> None:
        """What a step reuses must have been computed before it was sent, by a step that was answered."""
        source_of = dict(zip(request.copied_to, request.copied_from, strict=True))
        blocks_of = dict(zip(request.ids, _split(request.new_blocks, request.num_new_blocks), strict=True))
        for new in request.new_sequences:
            blocks = [source_of.get(block, block) for block in blocks_of.get(new.id, ())]
            count = new.num_computed_tokens
            if new.prompt_logprobs and count:
                raise Violation(f"sequence {new.id} wants log-probabilities of a prompt that is computed")
            if count and not self._cache.holds(blocks, digests_of(new.token_ids), count):
                raise Violation(f"sequence {new.id} counts on {count} tokens that nobody has computed")

    def _step_error(self, request: pb.StepRequest) -> tuple[grpc.StatusCode, str] | None:
        if self.step_errors:
            return self.step_errors.popleft()
        arrivals = [FakeSequence(new.id, new, list(new.token_ids), 0) for new in request.new_sequences]
        known = [self.sequences[number] for number in request.ids if number in self.sequences]
        messages = (self.poison(sequence) for sequence in [*arrivals, *known])
        return next(((grpc.StatusCode.INTERNAL, message) for message in messages if message), None)

    def _fail_step(self, request: pb.StepRequest, message: str) -> None:
        """Nobody knows how far the step came: its sequences are forgotten, nothing else is done."""
        parts = _split(request.new_blocks, request.num_new_blocks)
        num_computed = {new.id: new.num_computed_tokens for new in request.new_sequences}
        for number, num_tokens, blocks in zip(request.ids, request.num_tokens, parts, strict=True):
            if (sequence := self.sequences.pop(number, None)) is not None:
                blocks, start = sequence.blocks + blocks, sequence.num_computed
            else:
                start = num_computed.get(number, 0)
            self._cache.write(blocks, [None] * num_tokens, start)
            self._failed[number] = f"the step before failed: {message}"

    def _execute(self, request: pb.StepRequest, is_decode: bool) -> pb.StepResponse:
        if not self.warmups:
            raise Violation("a step before Warmup")
        if is_decode and (request.new_sequences or any(count != 1 for count in request.num_tokens)):
            raise Violation("Decode takes known sequences with one token each")
        self._check_size(request)
        self._drop(request.dropped_ids)
        for new in request.new_sequences:
            if new.id in self.sequences or new.id not in request.ids:
                raise Violation(f"new sequence {new.id} is known already, or not scheduled")
            self._failed.pop(new.id, None)
            sequence = self.sequences[new.id] = FakeSequence(new.id, new, [], new.num_computed_tokens)
            sequence.append(new.token_ids)
        response = pb.StepResponse(forward_seconds=self.step_seconds)
        chunks: list[tuple[FakeSequence, int]] = []
        parts = _split(request.new_blocks, request.num_new_blocks)
        for number, num_tokens, blocks in zip(request.ids, request.num_tokens, parts, strict=True):
            if number in self._failed:
                response.errors.add(id=number, message=self._failed[number])
            elif number in self.sequences:
                self.sequences[number].blocks += blocks
                chunks.append((self.sequences[number], num_tokens))
            else:
                raise Violation(f"unknown sequence {number}")
        self._cache.compute(chunks, self.sequences.values(), request.copied_from, request.copied_to)
        for sequence, num_tokens in chunks:
            self._compute(sequence, num_tokens, response)
        response.num_sequences = len(self.sequences)
        return response

    def _compute(self, sequence: FakeSequence, num_tokens: int, response: pb.StepResponse) -> None:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        sequence.num_computed = end
        if sequence.new.prompt_logprobs:
            self._tell_prompt(sequence, start, end, response)
        if end < len(sequence.token_ids):
            return
        if (message := self.sequence_error(sequence)) is not None:
            response.errors.add(id=sequence.id, message=message)
            self._failed[sequence.id] = message
            del self.sequences[sequence.id]
            return
        token_id = self.answer(sequence)
        sequence.append([token_id])
        response.ids.append(sequence.id)
        response.token_ids.append(token_id)
        response.logprobs.append(logprob_of(token_id))
        num_top = sequence.new.top_n_tokens
        response.top_counts.append(num_top)
        response.top_token_ids.extend((token_id + i) % self.vocab_size for i in range(num_top))
        response.top_logprobs.extend(logprob_of(token_id) - i for i in range(num_top))

    def _tell_prompt(self, sequence: FakeSequence, start: int, end: int, response: pb.StepResponse) -> None:
        known = sequence.token_ids[start + 1 : min(end + 1, sequence.new.num_prompt_tokens)]
        if not known:
            return
        part = response.prompt_logprobs.add(id=sequence.id, start=start + 1)
        part.num_top = sequence.new.prompt_top_n_tokens
        for token_id in known:
            part.logprobs.append(logprob_of(token_id))
            part.top_token_ids.extend((token_id + i) % self.vocab_size for i in range(part.num_top))
            part.top_logprobs.extend(logprob_of(token_id) - i for i in range(part.num_top))

    def _check_size(self, request: pb.StepRequest) -> None:
        largest = self.warmups[-1]
        if not 0 < len(request.ids) <= largest.max_step_sequences:
            raise Violation(f"{len(request.ids)} sequences, at most {largest.max_step_sequences}")
        if sum(request.num_tokens) > largest.max_step_tokens:
            raise Violation(f"{sum(request.num_tokens)} tokens, at most {largest.max_step_tokens}")

    def _drop(self, dropped_ids: Sequence[int]) -> None:
        for number in dropped_ids:
            self.sequences.pop(number, None)
            self._failed.pop(number, None)


def _split(blocks: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """The blocks of each sequence."""
    rest = iter(blocks)
    return [list(itertools.islice(rest, count)) for count in counts]


@contextlib.asynccontextmanager
async def serving(shard: FakeShard, address: str) -> AsyncIterator[FakeShard]:
    """Serves on `unix:///path` or `tcp://host:port`; at the end every call under way is broken off."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    )
    add_ShardServicer_to_server(shard, server)
    server.add_insecure_port(address.removeprefix("tcp://"))
    await server.start()
    try:
        yield shard
    finally:
        await server.stop(None)


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--num-blocks", type=int, default=64)
    arguments = parser.parse_args()

    async def serve() -> None:
        shard = FakeShard(step_seconds=arguments.step_seconds, num_blocks=arguments.num_blocks)
        async with serving(shard, arguments.address):
            print("ready", flush=True)
            await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
