"""Batcher against a scripted shard on a real socket: the connection, losses, what may wait."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from headrace_router import batcher
from headrace_router.batcher import ShardState
from headrace_router.errors import ContextLengthExceeded, LimitsError, Overloaded, Unavailable
from headrace_router.scheduling.request import FinishReason
from headrace_router.shards import client as client_module

from tests.fake_shard import FakeShard, serving
from tests.router.batching import WAIT_SECONDS, Harness, RecordingSink, expected, settle


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/s"


@pytest.fixture(autouse=True)
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "WATCH_SECONDS", 0.05)


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
    settle(address, shard, main, max_total_tokens=100, **settings)


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
            harness.check_levels(running=0, waiting=1, used=0, num_blocks=64)
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

    settle(address, shard, main)


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

    settle(address, shard, main, shard_timeout=0.2)


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

    settle(address, shard, main)
    assert [record.levelname for record in caplog.records if "what is that?" in record.message] == ["ERROR"]


def test_a_step_may_take_ten_times_what_was_measured(address: str) -> None:
    shard = FakeShard(step_seconds=0.3)
    shard.measured_seconds = 2.0

    async def main(harness: Harness) -> None:
        sink = harness.submit(6, 2)
        await sink.over.wait()
        assert sink.tokens == expected(6, 2)

    settle(address, shard, main, shard_timeout=0.1)


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

    settle(address, shard, main)


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
                harness.check_levels(running=0, waiting=0, used=0, num_blocks=64)

    asyncio.run(run())


def test_who_does_not_fit_a_shard_that_comes_back_smaller_ends(address: str) -> None:
    async def run() -> None:
        harness = Harness(address, max_batch_size=1)
        async with harness.running():
            async with serving(FakeShard(step_seconds=0.005), address):
                await harness.ready()
                running, long, short = harness.submit(4, 300), harness.submit(300, 100), harness.submit(5, 5)
                await harness.until(lambda: len(running.tokens) > 2)
            async with serving(FakeShard(num_blocks=8), address):
                async with asyncio.timeout(WAIT_SECONDS):
                    await long.over.wait()
                    assert isinstance(long.error, ContextLengthExceeded)
                    assert "must be <= 128. Given: 300 `inputs` tokens and 100" in long.error.message
                    assert long.sequence is not None and long.sequence.finish_reason is FinishReason.FAILED
                    # As its reader does on the way out.
                    harness.batcher.finish(long.sequence, FinishReason.CANCELLED)
                    await short.over.wait()
                assert short.tokens == expected(5, 5)
                await harness.until_idle(8)

    asyncio.run(run())


def test_a_shard_of_another_version_is_named(address: str, caplog: pytest.LogCaptureFixture) -> None:
    shard = FakeShard()
    shard.version = "0.0.0"

    async def main(harness: Harness) -> None:
        assert harness.batcher.state is ShardState.READY

    settle(address, shard, main)
    assert "the shard runs headrace 0.0.0" in caplog.text


def test_no_more_wait_than_may(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        shard.gate.clear()
        running = harness.submit(4, 5)
        await harness.until(lambda: running.num_starts == 1)
        waiting = [harness.submit(10, 5, salt=salt) for salt in (1, 2)]
        assert harness.value("headrace_queue_tokens") == 20
        with pytest.raises(Overloaded, match="2 answers waiting, and --max-queued-requests is 2") as refusal:
            harness.submit(10, 5)
        assert refusal.value.retry_after_seconds == 1
        harness.check_levels(running=1, waiting=2, used=1, num_blocks=64)
        shard.gate.set()
        for sink in waiting:
            await sink.over.wait()
        after = harness.submit(10, 5, salt=3)
        await after.over.wait()
        assert after.tokens == expected(10, 5, salt=3)

    settle(address, shard, main, max_batch_size=1, max_queued_requests=2)


def test_no_more_prompt_tokens_wait_than_may(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        shard.gate.clear()
        running = harness.submit(4, 5)
        await harness.until(lambda: running.num_starts == 1)
        # Who finds nobody waiting may come in, however long.
        waiting = harness.submit(40, 5)
        with pytest.raises(
            Overloaded, match="40 prompt tokens waiting and 1 more asked for, and --max-queued-tokens is 30"
        ):
            harness.submit(1, 5)
        assert waiting.sequence is not None
        harness.batcher.finish(waiting.sequence, FinishReason.CANCELLED)
        shorter = [harness.submit(15, 5, salt=salt) for salt in (1, 2)]
        with pytest.raises(Overloaded, match="30 prompt tokens waiting"):
            harness.submit(1, 5)
        shard.gate.set()
        for sink in shorter:
            await sink.over.wait()

    settle(address, shard, main, max_batch_size=1, max_queued_tokens=30)
