"""The scripted shard complains: each way to break the contract on purpose is noticed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from headrace_proto import shard_pb2 as pb
from headrace_proto.shard_pb2_grpc import ShardStub

from tests.fake_cache import FakeCache, FakeSequence, Violation, digests_of
from tests.fake_shard import FakeShard, serving

PROMPT = list(range(10, 50))


def _sequence(number: int, blocks: list[int], num_computed: int = 0) -> FakeSequence:
    sequence = FakeSequence(number, pb.NewSequence(id=number), [], num_computed, blocks)
    sequence.append(PROMPT)
    return sequence


def test_what_was_computed_can_be_read_by_who_has_the_same_tokens() -> None:
    cache = FakeCache(8, 16)
    first = _sequence(1, [0, 1, 2])
    cache.compute([(first, 40)], [first], [], [])
    assert cache.holds([0, 1, 2], first.digests, 40)
    assert not cache.holds([0, 1, 2], digests_of([9, *PROMPT[1:]]), 16), "all tokens before count"
    assert not cache.holds([1], digests_of(PROMPT[16:]), 16), "and so does the place"
    second = _sequence(2, [0, 1, 3], num_computed=39)
    cache.compute([(second, 1)], [first, second], [2], [3])


@pytest.mark.parametrize(
    ("blocks", "num_computed", "num_tokens", "copies", "words"),
    [
        ([0, 1, 3], 40, 1, ([], []), "tokens 40 to 41 of 40"),
        ([0, 1], 32, 1, ([], []), "33 tokens in 2 blocks"),
        ([0, 1, 2], 32, 1, ([], []), "block 2 is written to and held 2 times"),
        ([0, 1, 3], 39, 1, ([], []), "its KV is not what it was"),
        ([0, 1, 9], 32, 1, ([], []), "block 9 of 8"),
        ([0, 1, 3], 39, 1, ([2, 2], [3, 3]), "copies from"),
        ([0, 1, 3], 39, 1, ([2, 3], [3, 4]), "copies from|held 0 times"),
    ],
)
def test_what_nobody_may_do(
    blocks: list[int], num_computed: int, num_tokens: int, copies: tuple[list[int], list[int]], words: str
) -> None:
    cache = FakeCache(8, 16)
    first = _sequence(1, [0, 1, 2])
    cache.compute([(first, 40)], [first], [], [])
    second = _sequence(2, blocks, num_computed)
    with pytest.raises(Violation, match=words):
        cache.compute([(second, num_tokens)], [first, second], *copies)


def _arrival(step_id: int, *, num_computed: int = 0, first_block: int = 0) -> pb.StepRequest:
    """A step in which a sequence arrives whose id is one more than the step's."""
    new = pb.NewSequence(
        id=step_id + 1, token_ids=PROMPT, num_prompt_tokens=len(PROMPT), num_computed_tokens=num_computed
    )
    return pb.StepRequest(
        step_id=step_id,
        new_sequences=[new],
        ids=[step_id + 1],
        num_tokens=[len(PROMPT) - num_computed],
        num_new_blocks=[3],
        new_blocks=range(first_block, first_block + 3),
    )


def _complaints(tmp_path: Path, main: Callable[[FakeShard, Any], Any]) -> list[str]:
    async def run() -> list[str]:
        address = f"unix://{tmp_path}/s"
        async with serving(FakeShard(), address) as shard, grpc.aio.insecure_channel(address) as channel:
            stub: Any = ShardStub(channel)
            await stub.Warmup(pb.WarmupRequest(max_step_tokens=64, max_step_sequences=4))
            await main(shard, stub)
            return shard.violations

    return asyncio.run(run())


def test_a_third_step_under_way(tmp_path: Path) -> None:
    async def main(shard: FakeShard, stub: Any) -> None:
        shard.gate.clear()
        calls = [stub.Prefill(_arrival(number, first_block=3 * number)) for number in range(3)]
        while not shard.violations:
            await asyncio.sleep(0.01)
        shard.gate.set()
        await asyncio.gather(*calls, return_exceptions=True)

    assert "3 steps under way" in _complaints(tmp_path, main)


def test_counting_on_a_step_that_is_not_answered(tmp_path: Path) -> None:
    async def main(shard: FakeShard, stub: Any) -> None:
        shard.gate.clear()
        first = stub.Prefill(_arrival(0))
        while not shard.steps:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Prefill(_arrival(1, num_computed=32))
        shard.gate.set()
        await first
        # From now on it may.
        shard.violations.pop()
        request = _arrival(1, num_computed=32)
        request.new_blocks[2] = 5
        await stub.Prefill(request)

    assert _complaints(tmp_path, main) == []
