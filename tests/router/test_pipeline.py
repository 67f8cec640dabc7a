"""Pipeline, inside a batcher, on a scripted shard: two steps under way, chosen late; ends and cancels."""

import asyncio
import dataclasses
import random
from pathlib import Path

import pytest
from headrace_router.pace import Pace
from headrace_router.scheduling.request import FinishReason, SamplingParams

from tests.fake_shard import FakeShard, made_up, scripted
from tests.router.batching import Harness, RecordingSink, expected, request_of, settle


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/s"


def one_by_one(shard: FakeShard) -> None:
    """From now on the shard stops after every step that gives a token."""
    inner = shard.answer

    def answer(sequence: object) -> int:
        shard.gate.clear()
        return inner(sequence)  # type: ignore[arg-type]

    shard.answer = answer
    shard.gate.clear()


def never_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step seems to take an hour, so that the next one is chosen when its answer comes."""
    monkeypatch.setattr(Pace, "slack_seconds", lambda self, step: 3600.0)


def ids_of(*sinks: RecordingSink) -> list[int]:
    return [sink.sequence.id for sink in sinks if sink.sequence is not None]


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
        assert harness.value("headrace_prefix_cache_evicted_blocks") > 0
        assert harness.value("headrace_prompt_tokens") == sum(n for n, _, _ in sizes)
        assert harness.value("headrace_generated_tokens") == sum(m for _, m, _ in sizes)
        steps = sum(
            harness.value("tgi_batch_inference_success", method=method) for method in ("prefill", "decode")
        )
        assert steps == len(shard.steps) == harness.value("headrace_step_tokens_count")
        assert steps == harness.value("headrace_shard_busy_seconds_count")
        # Before the first step nobody wanted anything.
        assert steps - 1 == harness.value("headrace_shard_idle_seconds_count")
        assert harness.value("tgi_batch_concat", reason="chunking") > 0

    settle(address, shard, main, max_batch_prefill_tokens=32, max_batch_size=16)


def test_the_next_step_leaves_before_the_answer(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        shard.gate.clear()
        sink = harness.submit(5, 20)
        await harness.until(lambda: shard.num_in_flight == 2)
        await asyncio.sleep(0.05)
        assert shard.num_in_flight == len(shard.steps) == 2, "a third one waits for an answer"
        assert sink.tokens == []
        # Its token is known to the shard alone.
        assert (list(shard.steps[1].ids), list(shard.steps[1].num_tokens)) == (ids_of(sink), [1])
        shard.gate.set()
        await sink.over.wait()
        assert sink.tokens == expected(5, 20)

    settle(address, shard, main)


def test_only_waits_between_steps_count_as_idle(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        for num_pauses in (1, 2, 3):
            sink = harness.submit(5, 6, salt=40 * num_pauses)
            await sink.over.wait()
            await harness.until_idle(64)
            assert len(shard.steps) == harness.value("headrace_shard_busy_seconds_count") == 6 * num_pauses
            assert harness.value("headrace_shard_idle_seconds_count") == 5 * num_pauses

    settle(address, shard, main)


def test_an_end_that_the_next_step_did_not_know_of_costs_one_row(address: str) -> None:
    shard = FakeShard(answer=scripted([10, 11, 2, 12, 13]), num_blocks=2)
    one_by_one(shard)

    async def main(harness: Harness) -> None:
        ending = harness.submit(5, 20, eos_token_ids=frozenset({2}))
        for num_steps in (2, 3, 4):
            await harness.until(lambda n=num_steps: len(shard.steps) == n)  # type: ignore[misc]
            shard.gate.set()
        await ending.over.wait()
        assert (ending.tokens, ending.reason) == ([10, 11, 2], FinishReason.EOS)
        harness.check_levels(running=0, waiting=0, used=0, num_blocks=2)
        assert list(shard.steps[3].ids) == ids_of(ending) and shard.num_in_flight == 1
        # Its block is handed out again while the step that still writes there is under way.
        after = harness.submit(30, 1, salt=9)
        await harness.until(lambda: shard.num_in_flight == 2)
        assert list(shard.steps[4].dropped_ids) == ids_of(ending)
        shard.gate.set()
        await harness.until(lambda: shard.num_in_flight == 1)
        shard.gate.set()
        await after.over.wait()
        assert after.tokens == [10]
        await harness.until_idle(2)

    settle(address, shard, main)


def test_nobody_is_computed_beyond_its_length(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        sinks = [harness.submit(5, 3, salt=0), harness.submit(20, 1, salt=50)]
        for sink in sinks:
            await sink.over.wait()
        await harness.until_idle(64)
        assert sum(sum(step.num_tokens) for step in shard.steps) == 5 + 2 + 20

    settle(address, shard, main)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_cancelling_frees_everything_within_two_steps(address: str, phase: str) -> None:
    shard = FakeShard(step_seconds=0.005)

    async def main(harness: Harness) -> None:
        other = harness.submit(4, 100)
        await harness.until(lambda: len(other.tokens) > 2)
        sink = harness.submit(200 if phase == "prefill" else 20, 100, salt=100)
        assert sink.sequence is not None
        if phase != "queued":
            await harness.until(lambda: sink.num_starts == 1)
        if phase == "decode":
            await harness.until(lambda: len(sink.tokens) > 3)
        num_steps = len(shard.steps)
        harness.batcher.finish(sink.sequence, FinishReason.CANCELLED)
        harness.batcher.finish(sink.sequence, FinishReason.CANCELLED)
        assert other.sequence is not None
        harness.check_levels(running=1, waiting=0, used=len(other.sequence.blocks), num_blocks=64)
        await harness.until(lambda: len(shard.steps) >= num_steps + 2)
        dropped_ids = [
            number for step in shard.steps[num_steps : num_steps + 2] for number in step.dropped_ids
        ]
        assert dropped_ids == ([] if phase == "queued" else [sink.sequence.id])
        assert not sink.over.is_set()
        harness.batcher.finish(other.sequence, FinishReason.CANCELLED)
        await harness.until_idle(64)
        assert not shard.sequences

    settle(address, shard, main, max_batch_prefill_tokens=16, max_batch_size=16)


def test_a_cancel_with_two_steps_under_way(address: str) -> None:
    shard = FakeShard()
    one_by_one(shard)

    async def main(harness: Harness) -> None:
        leaving, staying = harness.submit(5, 50, salt=1), harness.submit(6, 8, salt=2)
        await harness.until(lambda: shard.num_in_flight == 2)
        shard.gate.set()
        await harness.until(lambda: bool(staying.tokens))
        await harness.until(lambda: shard.num_in_flight == 2)
        num_steps, heard = len(shard.steps), list(leaving.tokens)
        assert leaving.sequence is not None
        harness.batcher.finish(leaving.sequence, FinishReason.CANCELLED)
        shard.gate.set()
        await harness.until(lambda: len(shard.steps) == num_steps + 1)
        step = shard.steps[num_steps]
        assert (list(step.ids), list(step.dropped_ids)) == (ids_of(staying), ids_of(leaving))
        shard.answer = made_up(shard.vocab_size)
        shard.gate.set()
        await staying.over.wait()
        assert staying.tokens == expected(6, 8, salt=2)
        assert leaving.tokens == heard and not leaving.over.is_set()
        await harness.until_idle(64)

    settle(address, shard, main)


def test_who_comes_while_a_step_runs_is_in_the_next(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "slack_seconds", lambda self, step: 0.5)
    shard = FakeShard()
    one_by_one(shard)

    async def main(harness: Harness) -> None:
        first = harness.submit(5, 4, salt=1)
        await harness.until(lambda: shard.num_in_flight == 1)
        second = harness.submit(6, 4, salt=2)
        # Half a second after the first step began, though it has not been answered.
        await harness.until(lambda: shard.num_in_flight == 2)
        assert list(shard.steps[1].ids) == ids_of(first, second)
        shard.answer = made_up(shard.vocab_size)
        shard.gate.set()
        for sink, (n, salt) in ((first, (5, 1)), (second, (6, 2))):
            await sink.over.wait()
            assert sink.tokens == expected(n, 4, salt=salt)

    settle(address, shard, main)


def test_a_wrong_expectation_does_not_keep_the_shard_waiting(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_by_the_clock(monkeypatch)
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        sinks = [harness.submit(5 + i, 30, salt=i) for i in range(3)]
        for i, sink in enumerate(sinks):
            await sink.over.wait()
            assert sink.tokens == expected(5 + i, 30, salt=i)
        # Who comes when nobody runs is not kept waiting either.
        late = harness.submit(5, 1)
        await late.over.wait()

    settle(address, shard, main)


def test_with_nothing_to_send_ahead_a_new_request_is_sent_at_once(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        shard.gate.clear()
        last = harness.submit(5, 1, salt=1)
        await harness.until(lambda: shard.num_in_flight == 1)
        await asyncio.sleep(0.05)
        assert shard.num_in_flight == 1, "nobody computes anything after its last token"
        new = harness.submit(6, 1, salt=2)
        await harness.until(lambda: shard.num_in_flight == 2)
        shard.gate.set()
        await last.over.wait()
        await new.over.wait()

    settle(address, shard, main)


def test_a_prompt_that_was_computed_is_not_computed_again(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        for _ in range(2):
            sink = harness.submit(64, 20)
            await sink.over.wait()
            assert sink.tokens == expected(64, 20)
        # The last of four blocks holds the last token, which must be computed.
        assert harness.value("headrace_prefix_cache_hit_tokens") == 48
        assert harness.value("headrace_prompt_tokens") == 128
        # 83 tokens were computed: five whole blocks.
        await harness.until(lambda: harness.value("headrace_kv_blocks", state="cached") == 5)
        (arrival,) = [step.new_sequences[0] for step in shard.steps if step.new_sequences][1:]
        assert arrival.num_computed_tokens == 48

    settle(address, shard, main)


def test_without_a_prefix_cache_nothing_is_kept(address: str) -> None:
    async def main(harness: Harness) -> None:
        for _ in range(2):
            sink = harness.submit(64, 20)
            await sink.over.wait()
            assert sink.tokens == expected(64, 20)
        assert harness.value("headrace_prefix_cache_hit_tokens") == 0
        await harness.until_idle(64)
        assert harness.value("headrace_kv_blocks", state="free") == 64

    settle(address, FakeShard(), main, prefix_caching=False)


def test_siblings_share_their_prompt_and_go_their_own_ways(address: str) -> None:
    shard = FakeShard()

    async def main(harness: Harness) -> None:
        first = request_of(40, 12)
        sinks = [RecordingSink() for _ in range(4)]
        for seed, sink in enumerate(sinks):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            harness.batcher.submit(dataclasses.replace(first, sampling=sampling), sink, 0.0)
        for sink in sinks:
            await sink.over.wait()
        assert len({tuple(sink.tokens) for sink in sinks}) == 4
        # Two whole blocks are shared, the rest of the prompt but one token is copied.
        copies = [list(step.copied_to) for step in shard.steps if step.copied_to]
        assert sum(len(targets) for targets in copies) == 3
        assert sum(sum(step.num_tokens) for step in shard.steps) == 40 + 3 + 4 * 11

    settle(address, shard, main)


def test_what_is_allocated_and_unused(address: str) -> None:
    shard = FakeShard()
    one_by_one(shard)

    async def main(harness: Harness) -> None:
        sink = harness.submit(20, 1)
        await harness.until(lambda: harness.value("headrace_kv_unused_slots") == 12)
        assert harness.value("headrace_kv_waste_ratio") == pytest.approx(12 / 32)
        shard.gate.set()
        await sink.over.wait()
        await harness.until_idle(64)

    settle(address, shard, main)


def test_a_storm_of_cancels_leaves_nothing_behind(address: str) -> None:
    shard = FakeShard(num_blocks=24)

    async def main(harness: Harness) -> None:
        rng = random.Random(3)
        sinks: list[tuple[RecordingSink, int, int, int]] = []
        left: set[RecordingSink] = set()
        for _ in range(150):
            n, m, salt = rng.randint(1, 80), rng.randint(1, 60), rng.choice((0, 100, 200))
            sinks.append((harness.submit(n, m, salt=salt), n, m, salt))
            if rng.random() < 0.5:
                victim = rng.choice(sinks)[0]
                assert victim.sequence is not None
                harness.batcher.finish(victim.sequence, FinishReason.CANCELLED)
                left.add(victim)
            await asyncio.sleep(rng.random() * 0.004)
        for sink, n, m, salt in sinks:
            if sink not in left:
                await sink.over.wait()
                assert sink.tokens == expected(n, m, salt)
        await harness.until_idle(24)
        assert not shard.sequences

    settle(address, shard, main, max_batch_prefill_tokens=32, max_batch_size=16)
