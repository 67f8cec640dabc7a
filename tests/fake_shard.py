"""A scripted shard: the real gRPC service in plain Python, with made-up tokens. The router's one test double.

It holds the router to the contract: a step that names an unknown sequence, computes more than there is, gives
a block twice or puts a token where no block is, fails and is written down in `violations`. What it answers is
a function of the sequence alone, so that batching, chunks and preemptions can be seen to change nothing.

In a test:         async with serving(FakeShard(), address) as shard: ...
As a process:      python -m tests.fake_shard --address unix:///tmp/x --step-seconds 0.01
"""

import argparse
import asyncio
import contextlib
import uuid
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from headrace_proto import __version__
from headrace_proto import shard_pb2 as pb
from headrace_proto.shard_pb2_grpc import ShardServicer, add_ShardServicer_to_server

FIRST_TOKEN = 3
"""Ids below are the special ones of the tiny tokenizer; they are not made up, only scripted."""


@dataclass
class FakeSequence:
    """What a shard keeps of a sequence."""

    id: int
    new: pb.NewSequence
    token_ids: list[int]
    num_computed: int
    blocks: list[int] = field(default_factory=list)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.new.num_prompt_tokens


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


class Violation(Exception):
    """The router broke the contract."""


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
        self.sequences: dict[int, FakeSequence] = {}
        self.warmups: list[pb.WarmupRequest] = []
        self.steps: list[pb.StepRequest] = []
        self.violations: list[str] = []
        self.num_clears = 0

    # ---- the service

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        if self.info_errors:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, self.info_errors.popleft())
        return pb.InfoResponse(
            model_type="llama",
            dtype="float32",
            device=self.device,
            attention="sdpa",
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
        self.sequences.clear()
        num_blocks = self.num_blocks
        if request.max_total_tokens:
            num_blocks = min(num_blocks, request.max_total_tokens // self.block_size)
        return pb.WarmupResponse(
            num_blocks=num_blocks,
            block_bytes=1024,
            step_seconds=self.step_seconds if self.measured_seconds is None else self.measured_seconds,
            available_bytes=1024 * self.num_blocks,
        )

    async def Prefill(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        return await self._step(request, context)

    async def Decode(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        if request.new_sequences or any(count != 1 for count in request.num_tokens):
            await self._refuse("Decode takes known sequences with one token each", context)
        return await self._step(request, context)

    async def Filter(self, request: pb.FilterRequest, context: Any) -> pb.FilterResponse:
        self._drop(request.dropped_ids)
        return pb.FilterResponse(num_sequences=len(self.sequences))

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        self.num_clears += 1
        num_dropped = len(self.sequences)
        self.sequences.clear()
        return pb.ClearResponse(num_dropped=num_dropped)

    # ---- a step

    async def _step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        self.steps.append(request)
        if self.step_seconds:
            await asyncio.sleep(self.step_seconds)
        await self.gate.wait()
        if self.step_errors:
            await context.abort(*self.step_errors.popleft())
        try:
            return self._execute(request)
        except Violation as violation:
            await self._refuse(str(violation), context)
            raise

    async def _refuse(self, message: str, context: Any) -> None:
        self.violations.append(message)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)

    def _execute(self, request: pb.StepRequest) -> pb.StepResponse:
        if not self.warmups:
            raise Violation("a step before Warmup")
        self._drop(request.dropped_ids)
        for new in request.new_sequences:
            if new.id in self.sequences or new.id not in request.ids:
                raise Violation(f"new sequence {new.id} is known already, or not scheduled")
            self.sequences[new.id] = FakeSequence(new.id, new, list(new.token_ids), new.num_computed_tokens)
        self._check_size(request)
        response = pb.StepResponse(forward_seconds=self.step_seconds)
        new_blocks = iter(request.new_blocks)
        for number, num_tokens, num_new in zip(
            request.ids, request.num_tokens, request.num_new_blocks, strict=True
        ):
            sequence = self.sequences.get(number)
            if sequence is None:
                raise Violation(f"unknown sequence {number}")
            sequence.blocks += [next(new_blocks) for _ in range(num_new)]
            self._compute(sequence, num_tokens, response)
        self._check_blocks()
        response.num_sequences = len(self.sequences)
        return response

    def _compute(self, sequence: FakeSequence, num_tokens: int, response: pb.StepResponse) -> None:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        if not start < end <= len(sequence.token_ids):
            raise Violation(f"sequence {sequence.id}: tokens {start} to {end} of {len(sequence.token_ids)}")
        if end > len(sequence.blocks) * self.block_size:
            raise Violation(f"sequence {sequence.id}: {end} tokens in {len(sequence.blocks)} blocks")
        sequence.num_computed = end
        if sequence.new.prompt_logprobs:
            self._tell_prompt(sequence, start, end, response)
        if end < len(sequence.token_ids):
            return
        if (message := self.sequence_error(sequence)) is not None:
            response.errors.add(id=sequence.id, message=message)
            del self.sequences[sequence.id]
            return
        token_id = self.answer(sequence)
        sequence.token_ids.append(token_id)
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

    def _check_blocks(self) -> None:
        held = [block for sequence in self.sequences.values() for block in sequence.blocks]
        if len(held) != len(set(held)) or not all(0 <= block < self.num_blocks for block in held):
            raise Violation("a block is held twice, or is none of ours")

    def _drop(self, dropped_ids: Sequence[int]) -> None:
        for number in dropped_ids:
            self.sequences.pop(number, None)


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
