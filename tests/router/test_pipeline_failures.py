"""Pipeline, inside a batcher, when steps fail: who fails for it, who does not, and when the shard is lost."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace_router.batcher import ShardState
from headrace_router.errors import GenerationError, Unavailable
from headrace_router.scheduling.step import Step
from headrace_router.shards import client as client_module
from headrace_router.shards.client import ShardClient, StepCall

from tests.fake_shard import FakeShard, serving
from tests.router.batching import Harness, expected, settle


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/s"


def sum_over_methods(harness: Harness, name: str) -> float:
    return sum(harness.value(name, method=method) for method in ("prefill", "decode"))


def test_a_step_that_fails_once_costs_nobody_anything(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        sinks = [harness.submit(4 + 9 * i, 50, salt=40 * i) for i in range(5)]
        await harness.until(lambda: all(sink.tokens for sink in sinks))
        shard.gate.clear()
        await harness.until(lambda: shard.num_in_flight == 2)
        shard.step_errors.append((grpc.StatusCode.INTERNAL, "the device fell over"))
        shard.gate.set()
        for i, sink in enumerate(sinks):
            await sink.over.wait()
            assert sink.error is None and sink.tokens == expected(4 + 9 * i, 50, salt=40 * i)
            assert sink.num_starts == 1
        await harness.until_idle(64)
        assert not shard.sequences
        assert sum_over_methods(harness, "tgi_batch_inference_failure") == 1
        assert len(shard.warmups) == 1

    settle(address, shard, main)


def test_a_request_that_is_alone_in_a_step_that_fails_fails(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        sink = harness.submit(4, 50)
        await harness.until(lambda: bool(sink.tokens))
        shard.step_errors.append((grpc.StatusCode.INTERNAL, "the device fell over"))
        await sink.over.wait()
        assert isinstance(sink.error, GenerationError)
        assert "Request failed during generation: Server error: the device fell over" in str(sink.error)
        after = harness.submit(6, 3)
        await after.over.wait()
        assert after.tokens == expected(6, 3)
        await harness.until_idle(64)
        assert not shard.sequences

    settle(address, shard, main)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_request_that_spoils_every_step_it_is_in_fails_alone(address: str, num_tokens: int) -> None:
    """In its first step, or once it has generated some tokens."""
    shard = FakeShard()
    # Of salt 300 - 3 + 10: its first token is like nobody else's.
    shard.poison = lambda sequence: (
        "a fault in handling it"
        if sequence.num_generated >= num_tokens - 1 and sequence.token_ids[0] == 13
        else None
    )

    async def main(harness: Harness) -> None:
        good = [(harness.submit(4 + 5 * i, 40, salt=20 + 30 * i), 4 + 5 * i, 20 + 30 * i) for i in range(4)]
        bad = harness.submit(6, 40, salt=10)
        good += [
            (harness.submit(4 + 5 * i, 40, salt=20 + 30 * i), 4 + 5 * i, 20 + 30 * i) for i in range(4, 8)
        ]
        await bad.over.wait()
        assert isinstance(bad.error, GenerationError) and "a fault in handling it" in str(bad.error)
        assert bad.tokens == expected(6, 40, salt=10)[: num_tokens - 1]
        for sink, n, salt in good:
            await sink.over.wait()
            assert sink.error is None and sink.tokens == expected(n, 40, salt=salt)
        await harness.until_idle(64)
        assert not shard.sequences
        assert len(shard.warmups) == 1

    settle(address, shard, main)


def test_a_sequence_that_fails_by_itself_takes_nobody_with_it(address: str) -> None:
    shard = FakeShard()
    shard.sequence_error = lambda sequence: "poisoned" if sequence.token_ids[0] == 13 else None

    async def main(harness: Harness) -> None:
        bad, good = harness.submit(4, 5, salt=10), harness.submit(4, 5, salt=0)
        await bad.over.wait()
        await good.over.wait()
        assert isinstance(bad.error, GenerationError) and "poisoned" in str(bad.error)
        assert good.tokens == expected(4, 5)
        await harness.until_idle(64)
        assert not shard.sequences

    settle(address, shard, main)


def test_a_step_that_fails_on_a_broken_device_gives_the_shard_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "WATCH_SECONDS", 60.0)
    shard = FakeShard(step_seconds=0.005)

    async def main(harness: Harness) -> None:
        sink = harness.submit(6, 400)
        await harness.until(lambda: len(sink.tokens) > 1)
        shard.health_error = "an illegal memory access"
        shard.step_errors.append((grpc.StatusCode.INTERNAL, "an illegal memory access"))
        await sink.over.wait()
        await harness.until(lambda: len(shard.warmups) == 2)

    settle(address, shard, main)


def test_a_step_that_fails_in_another_process_gives_the_shard_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "WATCH_SECONDS", 60.0)
    shard = FakeShard(step_seconds=0.005)

    async def main(harness: Harness) -> None:
        sinks = [harness.submit(6, 400, salt=salt) for salt in (1, 2)]
        await harness.until(lambda: all(len(sink.tokens) > 1 for sink in sinks))
        shard.instance = "another"
        shard.step_errors.append((grpc.StatusCode.INTERNAL, "unknown sequences"))
        for sink in sinks:
            await sink.over.wait()
            assert isinstance(sink.error, Unavailable)
        await harness.until(lambda: len(shard.warmups) == 2)

    settle(address, shard, main)


def test_a_shard_lost_with_two_steps_under_way(address: str) -> None:
    async def run() -> None:
        harness = Harness(address)
        async with harness.running():
            first = FakeShard()
            async with serving(first, address):
                await harness.ready()
                running = harness.submit(5, 400, salt=1)
                await harness.until(lambda: len(running.tokens) > 2)
                first.gate.clear()
                await harness.until(lambda: first.num_in_flight == 2)
                fresh = harness.submit(9, 7, salt=2)
            await running.over.wait()
            assert isinstance(running.error, Unavailable)
            assert running.tokens == expected(5, 400, salt=1)[: len(running.tokens)]
            await harness.until(lambda: harness.batcher.state is ShardState.CONNECTING)
            harness.check_levels(running=0, waiting=1, used=0, num_blocks=64)
            assert sum_over_methods(harness, "tgi_batch_inference_failure") == 2
            async with serving(second := FakeShard(), address):
                await fresh.over.wait()
                assert (fresh.tokens, fresh.num_starts) == (expected(9, 7, salt=2), 1)
                await harness.until_idle(64)
                assert second.violations == []
            sent = sum_over_methods(harness, "tgi_batch_inference_count")
            succeeded = sum_over_methods(harness, "tgi_batch_inference_success")
            assert sent == succeeded + 2

    asyncio.run(run())


def test_a_shard_lost_in_the_turn_a_first_step_is_sent(address: str, monkeypatch: Any) -> None:
    """The loss is noticed after the step was given to gRPC and before anything else is done."""
    lost = asyncio.Event()
    watch, send = ShardClient.lost, ShardClient.send

    async def loses(self: ShardClient, instance: str) -> Unavailable:
        if lost.is_set():
            return await watch(self, instance)
        await lost.wait()
        return Unavailable("lost")

    def sends(self: ShardClient, step: Step, *, num_ahead: int = 0) -> StepCall:
        call = send(self, step, num_ahead=num_ahead)
        if not lost.is_set():
            lost.set()
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # As the batcher does, which has noticed the loss just now.
        return call

    monkeypatch.setattr(ShardClient, "lost", loses)
    monkeypatch.setattr(ShardClient, "send", sends)
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        sink = harness.submit(5, 4)
        await sink.over.wait()
        assert (sink.tokens, sink.num_starts) == (expected(5, 4), 1)
        assert harness.value("headrace_prompt_tokens") == 5
        outcomes = ("success", "failure")
        ended = sum(sum_over_methods(harness, f"tgi_batch_inference_{outcome}") for outcome in outcomes)
        assert sum_over_methods(harness, "tgi_batch_inference_count") == ended
        assert sum_over_methods(harness, "tgi_batch_inference_failure") == 1

    settle(address, shard, main)


def test_a_shard_frozen_with_two_steps_under_way(address: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(client_module, "WATCH_SECONDS", 60.0)
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        sink = harness.submit(6, 50)
        await harness.until(lambda: len(sink.tokens) > 1)
        shard.gate.clear()
        await harness.until(lambda: shard.num_in_flight == 2)
        await sink.over.wait()
        assert isinstance(sink.error, Unavailable)
        shard.gate.set()
        await harness.until(lambda: len(shard.warmups) == 2)
        again = harness.submit(6, 50)
        await again.over.wait()
        assert again.tokens == expected(6, 50)

    settle(address, shard, main, shard_timeout=0.3)
