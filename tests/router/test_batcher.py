"""Batcher against a scripted shard on a real socket: steps, failures, losses, gauges."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace_router import batcher
from headrace_router.batcher import ShardState
from headrace_router.errors import ContextLengthExceeded, GenerationError, LimitsError, Unavailable
from headrace_router.scheduling.request import FinishReason
from headrace_router.shards import client as client_module

from tests.fake_shard import FakeShard, serving
from tests.router.batching import WAIT_SECONDS, Harness, RecordingSink, expected


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/s"


@pytest.fixture(autouse=True)
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "WATCH_SECONDS", 0.05)


def _settle(address: str, shard: FakeShard, main: Callable[[Harness], Any], **settings: Any) -> None:
    """Runs `main` with a batcher that is ready; at the end the shard must have nothing to complain of."""

    async def run() -> None:
        async with serving(shard, address), Harness(address, **settings).running() as harness:
            await harness.ready()
            async with asyncio.timeout(WAIT_SECONDS):
                await main(harness)
            assert shard.violations == []

    asyncio.run(run())


def test_many_mixed_requests_get_what_they_get_alone(address: str) -> None:
    shard = FakeShard(num_blocks=16)

    async def main(harness: Harness) -> None:
        sizes = [(1 + 7 * i % 60, 1 + 13 * i % 80, i) for i in range(24)]
        sinks = [harness.submit(n, m, salt=salt) for n, m, salt in sizes]
        for sink, (n, m, salt) in zip(sinks, sizes, strict=True):
            await sink.over.wait()
            assert (sink.reason, sink.num_starts) == (FinishReason.LENGTH, 1)
            assert sink.tokens == expected(n, m, salt)
        await harness.until_idle(16)
        assert not shard.sequences
        assert harness.value("headrace_preemptions") > 0
        assert harness.value("headrace_prompt_tokens") == sum(n for n, _, _ in sizes)
        assert harness.value("headrace_generated_tokens") == sum(m for _, m, _ in sizes)
        steps = sum(
            harness.value("tgi_batch_inference_success", method=method) for method in ("prefill", "decode")
        )
        assert steps == len(shard.steps) == harness.value("headrace_step_tokens_count")
        assert harness.value("tgi_batch_concat", reason="chunking") > 0

    _settle(address, shard, main, max_batch_prefill_tokens=32, max_batch_size=16)


def test_the_shard_is_asked_for_what_the_settings_say(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        (warmup,) = shard.warmups
        assert (warmup.max_step_tokens, warmup.max_step_sequences, warmup.max_total_tokens) == (64, 8, 320)
        limits = harness.batcher.limits
        assert limits is not None
        assert (limits.num_blocks, limits.max_total_tokens) == (20, 100)
        assert harness.value("tgi_batch_max_total_tokens") == 320
        assert harness.value("headrace_shard_up") == 1
        with pytest.raises(
            ContextLengthExceeded,
            match=r"^Input validation error: .* must be <= 100\. Given: 90 `inputs` tokens and 11",
        ):
            harness.submit(90, 11)

    settings = {"max_batch_prefill_tokens": 64, "max_batch_size": 8, "max_batch_total_tokens": 320}
    _settle(address, shard, main, max_total_tokens=100, **settings)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_cancelling_frees_everything_within_two_steps(address: str, phase: str) -> None:
    shard = FakeShard(step_seconds=0.005)

    async def main(harness: Harness) -> None:
        other = harness.submit(4, 100)
        await harness.until(lambda: len(other.tokens) > 2)
        sink = harness.submit(200 if phase == "prefill" else 20, 100)
        assert sink.sequence is not None
        if phase != "queued":
            await harness.until(lambda: sink.num_starts == 1)
        if phase == "decode":
            await harness.until(lambda: len(sink.tokens) > 3)
        num_steps = len(shard.steps)
        harness.batcher.finish(sink.sequence, FinishReason.CANCELLED)
        harness.batcher.finish(sink.sequence, FinishReason.CANCELLED)
        assert other.sequence is not None
        used = len(other.sequence.blocks)
        harness.check_levels(running=1, waiting=0, used=used, free=64 - used)
        await harness.until(lambda: len(shard.steps) >= num_steps + 2)
        dropped_ids = [
            number for step in shard.steps[num_steps : num_steps + 2] for number in step.dropped_ids
        ]
        assert dropped_ids == ([] if phase == "queued" else [sink.sequence.id])
        assert not sink.over.is_set()
        harness.batcher.finish(other.sequence, FinishReason.CANCELLED)
        await harness.until_idle(64)
        assert not shard.sequences

    _settle(address, shard, main, max_batch_prefill_tokens=16, max_batch_size=16)


def test_a_failed_step_fails_its_requests_and_the_service_goes_on(address: str) -> None:
    shard = FakeShard(step_seconds=0.005)

    async def main(harness: Harness) -> None:
        sinks = [harness.submit(4, 50, salt=i) for i in range(3)]
        await harness.until(lambda: all(sink.tokens for sink in sinks))
        shard.step_errors.append((grpc.StatusCode.INTERNAL, "the device fell over"))
        for sink in sinks:
            await sink.over.wait()
            assert isinstance(sink.error, GenerationError)
            assert "Request failed during generation: Server error: the device fell over" in str(sink.error)
        after = harness.submit(6, 3)
        await after.over.wait()
        assert after.tokens == expected(6, 3)
        assert shard.num_clears == 1
        await harness.until_idle(64)
        failures = [harness.value("tgi_batch_inference_failure", method=m) for m in ("prefill", "decode")]
        assert sum(failures) == 1

    _settle(address, shard, main)


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

    _settle(address, shard, main)


def test_a_lost_shard_fails_what_ran_and_keeps_what_waits(address: str) -> None:
    async def run() -> None:
        harness = Harness(address, max_batch_size=1)
        async with harness.running():
            async with serving(FakeShard(step_seconds=0.005), address):
                await harness.ready()
                running, waiting = harness.submit(4, 400), harness.submit(6, 5)
                await harness.until(lambda: len(running.tokens) > 2)
            await running.over.wait()
            assert isinstance(running.error, Unavailable)
            await harness.until(lambda: harness.batcher.state is ShardState.CONNECTING)
            assert harness.value("headrace_shard_up") == 0
            harness.check_levels(running=0, waiting=1, used=0, free=64)
            late = harness.submit(7, 3)
            async with serving(shard := FakeShard(num_blocks=32), address):
                for sink, length in ((waiting, (6, 5)), (late, (7, 3))):
                    await sink.over.wait()
                    assert sink.tokens == expected(*length)
                await harness.until_idle(32)
                assert shard.violations == []

    asyncio.run(run())


def test_a_prompt_under_way_is_replayed_once(address: str) -> None:
    async def run() -> None:
        harness = Harness(address)
        async with harness.running():
            first = FakeShard()
            first.gate.clear()
            async with serving(first, address):
                await harness.ready()
                sink = harness.submit(6, 5)
                await harness.until(lambda: bool(first.steps))
            second = FakeShard()
            async with serving(second, address):
                await sink.over.wait()
                assert (sink.tokens, sink.num_starts) == (expected(6, 5), 1)

    asyncio.run(run())


def test_a_request_under_which_two_shards_die_fails(address: str) -> None:
    async def run() -> None:
        harness = Harness(address)
        async with harness.running():
            sink = None
            for _ in range(2):
                shard = FakeShard()
                shard.gate.clear()
                async with serving(shard, address):
                    await harness.ready()
                    sink = sink or harness.submit(6, 5)
                    await harness.until(lambda shard=shard: bool(shard.steps))  # type: ignore[misc]
                await harness.until(lambda: harness.batcher.state is ShardState.CONNECTING)
            assert sink is not None
            assert isinstance(sink.error, Unavailable)

    asyncio.run(run())


def test_another_process_behind_the_address_is_noticed_while_idle(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        shard.instance = "another"
        await harness.until(lambda: len(shard.warmups) == 2 and harness.batcher.state is ShardState.READY)
        sink = harness.submit(6, 5)
        await sink.over.wait()
        assert sink.tokens == expected(6, 5)

    _settle(address, shard, main)


def test_a_frozen_shard_is_given_up(address: str) -> None:
    shard = FakeShard(step_seconds=0.005)

    async def main(harness: Harness) -> None:
        sink = harness.submit(6, 50)
        await harness.until(lambda: len(sink.tokens) > 1)
        shard.gate.clear()
        await sink.over.wait()
        assert isinstance(sink.error, Unavailable)
        shard.gate.set()
        await harness.until(lambda: len(shard.warmups) == 2)

    _settle(address, shard, main, shard_timeout=0.2)


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_freezes(address: str, kill: signal.Signals, monkeypatch: Any) -> None:
    monkeypatch.setattr(client_module, "INFO_TIMEOUT_SECONDS", 0.5)

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.fake_shard", "--address", address, "--step-seconds", "0.01"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process

    async def run() -> None:
        process = start()
        try:
            async with Harness(address).running() as harness:
                await harness.ready()
                sink = harness.submit(6, 400)
                await harness.until(lambda: len(sink.tokens) > 2)
                process.send_signal(kill)
                async with asyncio.timeout(WAIT_SECONDS):
                    await sink.over.wait()
                assert isinstance(sink.error, Unavailable)
                process.kill()
                process.communicate()
                Path(address.removeprefix("unix://")).unlink(missing_ok=True)
                process = start()
                await harness.ready()
                again = harness.submit(6, 5)
                await again.over.wait()
                assert again.tokens == expected(6, 5)
        finally:
            process.kill()
            process.communicate()

    asyncio.run(run())


def test_limits_that_cannot_be_met_end_the_first_start(address: str) -> None:
    async def run(shard: FakeShard, **settings: Any) -> LimitsError | None:
        harness = Harness(address, **settings)
        async with serving(shard, address), harness.running():
            await harness.batcher.settled.wait()
            assert harness.batcher.limits is None
            with pytest.raises(Unavailable):
                harness.submit()
            return harness.batcher.failure

    assert "the model's context is 512" in str(asyncio.run(run(FakeShard(), max_total_tokens=1000)))
    small = FakeShard()
    small.warmup_error = "a step of 512 tokens does not fit"
    assert "a step of 512 tokens does not fit" in str(asyncio.run(run(small)))


def test_stopping_fails_what_is_left(address: str) -> None:
    shard = FakeShard(step_seconds=0.01)

    async def run() -> RecordingSink:
        async with serving(shard, address), Harness(address).running() as harness:
            await harness.ready()
            sink = harness.submit(4, 400)
            await harness.until(lambda: bool(sink.tokens))
        return sink

    assert isinstance(asyncio.run(run()).error, Unavailable)


def test_a_program_that_is_no_shard_is_waited_out(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "POLL_SECONDS", 0.01)
    shard = FakeShard()
    shard.info_errors.extend(["what is that?"] * 3)

    async def main(harness: Harness) -> None:
        sink = harness.submit(6, 5)
        await sink.over.wait()
        assert sink.tokens == expected(6, 5)

    _settle(address, shard, main)
    assert [record.levelname for record in caplog.records if "what is that?" in record.message] == ["ERROR"]


def test_a_step_may_take_ten_times_what_was_measured(address: str) -> None:
    shard = FakeShard(step_seconds=0.3)
    shard.measured_seconds = 2.0

    async def main(harness: Harness) -> None:
        sink = harness.submit(6, 2)
        await sink.over.wait()
        assert sink.tokens == expected(6, 2)

    _settle(address, shard, main, shard_timeout=0.1)


def test_a_shard_whose_device_does_not_compute_is_given_up(address: str) -> None:
    shard = FakeShard(step_seconds=0.005)

    async def main(harness: Harness) -> None:
        sink = harness.submit(6, 400)
        await harness.until(lambda: len(sink.tokens) > 1)
        shard.health_error = "an illegal memory access"
        await sink.over.wait()
        assert isinstance(sink.error, Unavailable)
        shard.health_error = None
        await harness.until(lambda: len(shard.warmups) == 2)

    _settle(address, shard, main)


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

    _settle(address, shard, main)


def test_a_shard_that_comes_back_too_small_leaves_nobody_waiting(address: str) -> None:
    async def run() -> None:
        harness = Harness(address, max_batch_size=1, max_total_tokens=400)
        async with harness.running():
            async with serving(FakeShard(step_seconds=0.005), address):
                await harness.ready()
                running, waiting = harness.submit(4, 300), harness.submit(6, 5)
                await harness.until(lambda: len(running.tokens) > 2)
            async with serving(FakeShard(num_blocks=4), address):
                async with asyncio.timeout(WAIT_SECONDS):
                    await waiting.over.wait()
                assert isinstance(waiting.error, Unavailable)
                harness.check_levels(running=0, waiting=0, used=0, free=64)

    asyncio.run(run())


def test_a_shard_of_another_version_is_named(address: str, caplog: pytest.LogCaptureFixture) -> None:
    shard = FakeShard()
    shard.version = "0.0.0"

    async def main(harness: Harness) -> None:
        assert harness.batcher.state is ShardState.READY

    _settle(address, shard, main)
    assert "the shard runs headrace 0.0.0" in caplog.text
