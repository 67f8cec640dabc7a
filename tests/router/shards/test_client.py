"""ShardClient against a real gRPC service: what comes back, and which error each fault becomes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from headrace_proto.settings import SettingsError
from headrace_router.errors import GenerationError, Unavailable
from headrace_router.scheduling.limits import Plan
from headrace_router.scheduling.request import Request, SamplingParams, Sequence
from headrace_router.scheduling.step import Arrival, Step, StepResult
from headrace_router.shards import client as client_module
from headrace_router.shards.client import ShardClient, target_of

from tests.fake_shard import FakeShard, serving

PLAN = Plan(max_step_tokens=200_000, max_step_sequences=8, max_cache_tokens=0)


def _step(step_id: int = 0, num_prompt: int = 4, *, prompt_logprobs: bool = False) -> Step:
    """A sequence arrives whose id is one more than the step's."""
    request = Request(
        prompt_ids=tuple([5] * num_prompt),
        sampling=SamplingParams(temperature=0),
        max_new_tokens=2,
        prompt_logprobs=prompt_logprobs,
        prompt_top_n_tokens=5 if prompt_logprobs else 0,
    )
    sequence = Sequence(id=step_id + 1, request=request, arrived_at=0.0)
    num_blocks = -(-num_prompt // 16)
    return Step(
        id=step_id,
        sequences=[sequence],
        num_tokens=[num_prompt],
        num_new_blocks=[num_blocks],
        new_blocks=list(range(step_id * num_blocks, (step_id + 1) * num_blocks)),
        arrivals=[Arrival(sequence=sequence, num_computed=0)],
        samplers=[sequence],
        total_tokens=num_prompt,
    )


@contextlib.asynccontextmanager
async def _connected(
    address: str, shard: FakeShard, *, step_timeout_seconds: float = 30.0
) -> AsyncIterator[ShardClient]:
    async with serving(shard, address):
        client = ShardClient(address, step_timeout_seconds=step_timeout_seconds)
        try:
            yield client
        finally:
            await client.close()


async def _run(client: ShardClient, step: Step) -> StepResult:
    return await client.receive(client.send(step))


def test_addresses() -> None:
    assert target_of("unix:///tmp/x") == "unix:///tmp/x"
    assert target_of("tcp://host:80") == "host:80"
    for wrong in (
        "",
        "host:80",
        "http://host",
        "unix://",
        "unix:/x",
        "tcp://:80",
        "tcp://a:0",
        "tcp://a:65536",
    ):
        with pytest.raises(SettingsError, match="--shard: expected unix:///path or tcp://host:port"):
            target_of(wrong)


def test_every_call(tmp_path: Path) -> None:
    async def main() -> None:
        async with _connected(f"unix://{tmp_path}/s", shard := FakeShard(num_blocks=7)) as client:
            assert (await client.info()).instance == shard.instance
            await client.health()
            assert (await client.warmup(PLAN)).num_blocks == 7
            result = await _run(client, _step())
            assert [token.sequence_id for token in result.tokens] == [1]
            assert result.num_sequences == 1
            assert await client.filter([2]) == 1
            assert await client.filter([1]) == 0
            assert not shard.violations

    asyncio.run(main())


def test_large_messages_pass(tmp_path: Path) -> None:
    async def main() -> None:
        async with _connected(f"unix://{tmp_path}/s", FakeShard(num_blocks=20_000)) as client:
            await client.warmup(PLAN)
            result = await _run(client, _step(num_prompt=150_000, prompt_logprobs=True))
            assert len(result.prompt_logprobs[0].logprobs) == 149_999

    asyncio.run(main())


def test_a_step_that_fails_is_a_generation_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with _connected(f"unix://{tmp_path}/s", shard := FakeShard()) as client:
            with pytest.raises(GenerationError, match="Server error: a step before Warmup"):
                await _run(client, _step())
            await client.warmup(PLAN)
            shard.step_errors.append((grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory"))
            with pytest.raises(
                GenerationError, match="Request failed during generation: Server error: out of memory"
            ):
                await _run(client, _step())
            assert (await _run(client, _step(1))).num_sequences == 1
            shard.warmup_error = "too little memory"
            with pytest.raises(GenerationError, match="Warmup failed: too little memory"):
                await client.warmup(PLAN)

    asyncio.run(main())


def test_a_shard_that_is_not_there_or_goes_away_is_unavailable(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"unix://{tmp_path}/s"
        client = ShardClient(address, step_timeout_seconds=30.0)
        with pytest.raises(Unavailable, match="is gone: no connection"):
            await client.info()
        async with serving(shard := FakeShard(), address):
            await client.close()
            client = ShardClient(address, step_timeout_seconds=30.0)
            await client.warmup(PLAN)
            shard.gate.clear()
            call = client.send(_step())
            while not shard.steps:
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable):
            await client.receive(call)
        await client.close()

    asyncio.run(main())


def test_a_frozen_shard_is_unavailable(tmp_path: Path) -> None:
    async def main() -> None:
        shard = FakeShard()
        async with _connected(f"unix://{tmp_path}/s", shard, step_timeout_seconds=0.1) as client:
            await client.warmup(PLAN)
            shard.gate.clear()
            with pytest.raises(Unavailable, match="did not answer step in time"):
                await _run(client, _step())

    asyncio.run(main())


def test_a_step_behind_another_has_the_time_of_both(tmp_path: Path) -> None:
    async def main() -> None:
        shard = FakeShard(step_seconds=1.0)
        async with _connected(f"unix://{tmp_path}/s", shard, step_timeout_seconds=1.9) as client:
            await client.warmup(PLAN)
            calls = [client.send(_step()), client.send(_step(1), num_ahead=1)]
            for number, call in enumerate(calls):
                assert [token.sequence_id for token in (await client.receive(call)).tokens] == [number + 1]

    asyncio.run(main())


def test_closing_ends_a_step_under_way_and_cancelling_stays_cancelling(tmp_path: Path) -> None:
    async def main() -> None:
        async with _connected(f"unix://{tmp_path}/s", shard := FakeShard()) as client:
            await client.warmup(PLAN)
            shard.gate.clear()
            cancelled = asyncio.create_task(_run(client, _step()))
            while not shard.steps:
                await asyncio.sleep(0.01)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            closed = asyncio.create_task(_run(client, _step(1)))
            while len(shard.steps) < 2:
                await asyncio.sleep(0.01)
            await client.close()
            with pytest.raises(Unavailable, match="was given up during step"):
                await closed
            shard.gate.set()

    asyncio.run(main())


def test_the_watch_sees_death_and_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "WATCH_SECONDS", 0.01)

    async def main() -> None:
        address = f"unix://{tmp_path}/s"
        async with _connected(address, shard := FakeShard()) as client:
            watch = asyncio.create_task(client.lost(shard.instance))
            await asyncio.sleep(0.05)
            assert not watch.done()
            shard.instance = "another"
            assert "restarted" in (await watch).message
        client = ShardClient(address, step_timeout_seconds=1.0)
        assert "is gone" in (await client.lost("another")).message
        await client.close()

    asyncio.run(main())


def test_the_watch_sees_a_device_that_does_not_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "WATCH_SECONDS", 0.01)

    async def main() -> None:
        async with _connected(f"unix://{tmp_path}/s", shard := FakeShard()) as client:
            watch = asyncio.create_task(client.lost(shard.instance))
            shard.health_error = "an illegal memory access"
            assert "Health failed: an illegal memory access" in (await watch).message

    asyncio.run(main())
