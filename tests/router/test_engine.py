"""Engine and Generation with a scripted shard and a real tokenizer: permits, outputs, stops, slow readers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from headrace_proto.settings import SettingsError
from headrace_router.config import RouterConfig
from headrace_router.engine import Engine, Finish, Generation, Output, OutputToken
from headrace_router.errors import GenerationError, LimitsError, Overloaded, Unavailable
from headrace_router.metrics import Metrics
from headrace_router.scheduling.request import FinishReason, Request, SamplingParams
from headrace_router.scheduling.scheduler import MAX_IN_FLIGHT
from headrace_router.text.output import OutputOptions
from headrace_router.text.tokenizer import Tokenizer

from tests.fake_shard import FakeShard, logprob_of, scripted, serving
from tests.tiny import make_tokenizer

WAIT_SECONDS = 20.0
"""A bound, not an expectation."""

PLAIN = OutputOptions()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Harness:
    """An engine at work, its shard and its metrics."""

    def __init__(self, engine: Engine, shard: FakeShard, metrics: Metrics) -> None:
        self.engine, self.shard, self.metrics = engine, shard, metrics

    def submit(self, options: OutputOptions = PLAIN, **fields: Any) -> Generation:
        values: dict[str, Any] = {"prompt_ids": (5, 6, 7), "max_new_tokens": 8}
        values["sampling"] = SamplingParams(temperature=0)
        return self.engine.submit(Request(**(values | fields)), options, arrived=time.monotonic())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                await asyncio.sleep(0.005)

    def value(self, name: str, **labels: str) -> float:
        found = [self.metrics.registry.get_sample_value(name + end, labels) for end in ("", "_total")]
        return next(value for value in found if value is not None)


@contextlib.asynccontextmanager
async def _engine(
    tmp_path: Path, tokenizer: Tokenizer, shard: FakeShard, **settings: Any
) -> AsyncIterator[Harness]:
    address = f"unix://{tmp_path}/s"
    metrics = Metrics()
    config = RouterConfig(shard=address, tokenizer_name="unused", **settings)
    engine = Engine(config, tokenizer, metrics)
    async with serving(shard, address):
        await engine.start()
        try:
            await engine.settled()
            yield Harness(engine, shard, metrics)
        finally:
            await engine.stop()
    assert shard.violations == []


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., None]:
    """Runs a coroutine function with an engine that is ready."""

    def run(
        main: Callable[[Harness], Awaitable[None]], shard: FakeShard | None = None, **settings: Any
    ) -> None:
        async def inner() -> None:
            async with _engine(tmp_path, tokenizer, shard or FakeShard(), **settings) as harness:
                async with asyncio.timeout(WAIT_SECONDS):
                    await main(harness)

        asyncio.run(inner())

    return run


async def _read(generation: Generation) -> tuple[list[OutputToken], Finish, list[Output]]:
    outputs = [output async for output in generation]
    assert [output.finish is None for output in outputs] == [True] * (len(outputs) - 1) + [False]
    finish = outputs[-1].finish
    assert finish is not None
    return [token for output in outputs for token in output.tokens], finish, outputs


def test_a_generation(run: Callable[..., None], tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_ids("The water turns the wheel.", add_special_tokens=False)

    async def main(harness: Harness) -> None:
        generation = harness.submit(max_new_tokens=len(answer) + 1, eos_token_ids=frozenset({2}))
        tokens, finish, outputs = await _read(generation)
        # The last token counts as length, whatever it is.
        assert finish.reason is FinishReason.LENGTH
        assert finish.text == "The water turns the wheel." == "".join(token.text for token in tokens)
        assert [token.id for token in tokens] == [*answer, 2]
        assert [token.is_special for token in tokens] == [False] * len(answer) + [True]
        assert [token.logprob for token in tokens] == [logprob_of(token.id) for token in tokens]
        assert all(output.prompt is None for output in outputs)
        assert finish.num_generated == len(tokens)
        timings = generation.timings
        assert timings.started is not None and timings.first_token is not None and timings.ended is not None
        assert (
            timings.arrived
            <= timings.queued
            <= timings.started
            <= timings.first_token
            <= timings.ended
            <= time.monotonic()
        )
        assert [output async for output in generation] == []

        longer = harness.submit(max_new_tokens=50, eos_token_ids=frozenset({2}))
        tokens, finish, _ = await _read(longer)
        assert (finish.reason, tokens[-1].id, tokens[-1].text) == (FinishReason.EOS, 2, "")

    run(main, FakeShard(answer=scripted([*answer, 2])))


def test_metrics_of_a_generation(run: Callable[..., None]) -> None:
    async def main(harness: Harness) -> None:
        await _read(harness.submit(prompt_ids=(5,) * 9))
        value = harness.value
        assert value("tgi_request_generated_tokens_sum") == 8
        assert value("tgi_request_input_length_sum") == 9
        assert value("tgi_request_max_new_tokens_sum") == 8
        for name in ("queue", "inference", "mean_time_per_token"):
            assert value(f"tgi_request_{name}_duration_count") == 1
        assert value("headrace_time_to_first_token_seconds_count") == 1
        assert value("headrace_inter_token_latency_seconds_count") == 7
        # Of one that does not end by itself there is nothing to tell.
        harness.submit().cancel()
        assert value("tgi_request_generated_tokens_count") == 1

    run(main)


def test_alternatives_and_prompt_logprobs(run: Callable[..., None], tokenizer: Tokenizer) -> None:
    prompt_ids = tuple(range(10, 60))

    async def main(harness: Harness) -> None:
        generation = harness.submit(
            prompt_ids=prompt_ids,
            max_new_tokens=2,
            top_n_tokens=3,
            prompt_logprobs=True,
            prompt_top_n_tokens=2,
        )
        tokens, _, outputs = await _read(generation)
        for token in tokens:
            assert [top.id for top in token.top] == [token.id, token.id + 1, token.id + 2]
            assert [top.logprob for top in token.top] == [token.logprob - i for i in range(3)]
        (prompt,) = [output.prompt for output in outputs if output.prompt is not None]
        assert tuple(part.id for part in prompt) == prompt_ids
        assert prompt[0].logprob is None and prompt[0].top == []
        for part in prompt[1:]:
            assert part.logprob == logprob_of(part.id)
            assert [(top.id, top.logprob) for top in part.top] == [
                (part.id, part.logprob),
                (part.id + 1, part.logprob - 1),
            ]
            assert part.text == tokenizer.token_text(part.id)
        # A prompt alone.
        tokens, finish, (output,) = await _read(
            harness.submit(prompt_ids=prompt_ids, max_new_tokens=0, prompt_logprobs=True)
        )
        assert (tokens, finish.reason, finish.num_generated) == ([], FinishReason.LENGTH, 0)
        assert output.prompt is not None and len(output.prompt) == 50

    run(main, max_batch_prefill_tokens=16, max_batch_size=8)


@pytest.mark.parametrize("keeps_stop", [True, False])
def test_a_stop_string_ends_the_sequence_in_the_shard(
    run: Callable[..., None], tokenizer: Tokenizer, keeps_stop: bool
) -> None:
    answer = tokenizer.encode_ids("The water turns the wheel and more. ", add_special_tokens=False)
    shard = FakeShard(answer=scripted(answer), step_seconds=0.02)

    async def main(harness: Harness) -> None:
        options = OutputOptions(stop=("whee",), keeps_stop=keeps_stop)
        tokens, finish, _ = await _read(harness.submit(options, max_new_tokens=400))
        assert finish.reason is FinishReason.STOP
        assert finish.text == ("The water turns the whee" if keeps_stop else "The water turns the ")
        assert "".join(token.text for token in tokens) == finish.text
        assert finish.num_generated < len(answer)
        await harness.until(lambda: not shard.sequences)
        # The match is found while the next steps are under way, and no later one holds the sequence.
        assert len(shard.steps) <= finish.num_generated + MAX_IN_FLIGHT
        assert harness.value("headrace_kv_blocks", state="used") == 0
        assert harness.value("tgi_request_generated_tokens_count") == 1

    run(main, shard)


def test_a_stop_string_in_the_last_token(run: Callable[..., None], tokenizer: Tokenizer) -> None:
    """Native clients are told "length", as by Text Generation Inference; OpenAI's that the text was cut."""
    answer = tokenizer.encode_ids("The water", add_special_tokens=False)

    async def main(harness: Harness) -> None:
        for keeps_stop, reason in ((True, FinishReason.LENGTH), (False, FinishReason.STOP)):
            options = OutputOptions(stop=("er",), keeps_stop=keeps_stop)
            _, finish, _ = await _read(harness.submit(options, max_new_tokens=len(answer)))
            assert finish.reason is reason

    run(main, FakeShard(answer=scripted(answer)))


def test_half_characters_and_held_back_tokens_come_later(
    run: Callable[..., None], tokenizer: Tokenizer
) -> None:
    answer = tokenizer.encode_ids("水车🌊 st", add_special_tokens=False)

    async def main(harness: Harness) -> None:
        for options in (PLAIN, OutputOptions(stop=("stop",)), OutputOptions(stop=("x",), keeps_stop=True)):
            tokens, finish, _ = await _read(harness.submit(options, max_new_tokens=len(answer)))
            assert [token.id for token in tokens] == answer
            assert [token.logprob for token in tokens] == [logprob_of(token_id) for token_id in answer]
            assert finish.text == "水车🌊 st" == "".join(token.text for token in tokens)

    run(main, FakeShard(answer=scripted(answer)))


def test_a_slow_reader_holds_nobody_back_and_gets_everything_at_once(run: Callable[..., None]) -> None:
    async def main(harness: Harness) -> None:
        slow = harness.submit(max_new_tokens=60)
        first = await anext(slow)
        quick = harness.submit(max_new_tokens=60)
        await _read(quick)
        await harness.until(lambda: not harness.shard.sequences)
        second = await anext(slow)
        assert len(first.tokens) + len(second.tokens) == 60
        assert second.finish is not None

    run(main)


def test_a_reader_that_gives_up_waiting_loses_nothing(run: Callable[..., None]) -> None:
    async def main(harness: Harness) -> None:
        harness.shard.gate.clear()
        generation = harness.submit()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(generation), 0.05)
        harness.shard.gate.set()
        tokens, _, _ = await _read(generation)
        assert len(tokens) == 8

    run(main)


def test_cancelling(run: Callable[..., None]) -> None:
    async def main(harness: Harness) -> None:
        generation = harness.submit(max_new_tokens=400)
        await anext(generation)
        waiting = asyncio.create_task(_drop(generation))
        await asyncio.sleep(0)
        generation.cancel()
        generation.cancel()
        await waiting
        assert harness.value("headrace_kv_blocks", state="used") == 0
        await harness.until(lambda: not harness.shard.sequences)
        finished = harness.submit()
        await _read(finished)
        finished.cancel()

    run(main, FakeShard(step_seconds=0.005))


async def _drop(generation: Generation) -> None:
    async for _ in generation:
        pass


def test_errors_come_after_what_came_before(run: Callable[..., None]) -> None:
    shard = FakeShard(answer=scripted([70, 71, 72]))
    shard.sequence_error = lambda sequence: "poisoned" if sequence.num_generated == 3 else None

    async def main(harness: Harness) -> None:
        generation = harness.submit()
        tokens: list[OutputToken] = []
        with pytest.raises(GenerationError, match="poisoned"):
            async for output in generation:
                tokens += output.tokens
        assert len(tokens) == 3
        assert generation.timings.ended is not None
        assert [output async for output in generation] == []

    run(main, shard)


def test_permits(run: Callable[..., None]) -> None:
    async def main(harness: Harness) -> None:
        engine = harness.engine
        with engine.admit() as permit, engine.admit(2):
            assert engine.num_active == 3
            with pytest.raises(Overloaded):
                engine.admit(2)
            engine.admit().release()
            permit.release()
            assert engine.num_active == 2
        assert engine.num_active == 0

    run(main, max_concurrent_requests=4)


def test_draining(run: Callable[..., None]) -> None:
    async def main(harness: Harness) -> None:
        engine = harness.engine
        assert engine.is_ready
        await engine.check_health()
        permit = engine.admit()
        engine.drain()
        assert not engine.is_ready
        with pytest.raises(Unavailable, match="shutting down"):
            engine.admit()
        await engine.check_health()
        assert not await engine.drained(0.01)
        # Who was let in may still begin.
        await _read(harness.submit())
        permit.release()
        assert await engine.drained(0.01)

    run(main)


def test_what_the_shard_said(run: Callable[..., None]) -> None:
    async def main(harness: Harness) -> None:
        engine = harness.engine
        assert engine.limits is not None and engine.info is not None
        assert engine.limits.eos_token_ids == frozenset({2})
        assert engine.info.device == "cpu"
        assert {row.name for row in engine.rows} >= {"model", "KV cache", "step"}

    run(main)


def test_without_a_shard(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def main() -> None:
        config = RouterConfig(shard=f"unix://{tmp_path}/none", tokenizer_name="unused")
        engine = Engine(config, tokenizer, Metrics())
        await engine.start()
        assert (engine.limits, engine.info, engine.rows, engine.is_ready) == (None, None, (), False)
        with pytest.raises(Unavailable):
            engine.admit()
        with pytest.raises(Unavailable):
            await engine.check_health()
        await engine.stop()

    asyncio.run(main())


def test_settings_that_cannot_be_met(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def main() -> None:
        with pytest.raises(LimitsError, match="--max-total-tokens is 5000"):
            async with _engine(tmp_path, tokenizer, FakeShard(), max_total_tokens=5000):
                pass

    asyncio.run(main())
    with pytest.raises(SettingsError, match="--shard"):
        Engine(RouterConfig(shard="localhost:1", tokenizer_name="unused"), tokenizer, Metrics())
