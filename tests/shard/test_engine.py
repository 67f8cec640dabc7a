"""Steps on a real tiny model: what they give, what they leave, and how they fail."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from headrace_proto import shard_pb2 as pb
from headrace_shard import warmup
from headrace_shard.convert import from_step_request
from headrace_shard.engine import Engine
from headrace_shard.errors import InvalidStep, NotWarm, OutOfMemory, ShardError
from headrace_shard.loading import LoadedModel
from headrace_shard.warmup import CacheBudget

from tests.shard.small_router import (
    GREEDY,
    LONG,
    SHORT,
    VARIED,
    SmallRouter,
    execute_on,
    load_tiny,
    make_engine,
    transformers_greedy,
    transformers_logprobs,
)
from tests.tiny import make_checkpoint

# ---- what a step gives


def test_greedy_equals_transformers(router: SmallRouter, folder: Path) -> None:
    router.add(1, LONG)
    router.add(2, SHORT)
    outputs = router.run(12)
    assert outputs[1] == transformers_greedy(folder, LONG, 12)
    assert outputs[2] == transformers_greedy(folder, SHORT, 12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(folder: Path, dtype: str) -> None:
    router = SmallRouter(execute_on(make_engine(load_tiny(folder, dtype=dtype))))
    router.add(1, LONG)
    assert len(router.run(4)[1]) == 4
    assert all(value <= 0 for value in router.sequences[1].logprobs)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize("parameters", [GREEDY, VARIED], ids=["greedy", "varied"])
def test_chunked_prompt_gives_what_a_whole_one_gives(
    fresh: Callable[[], SmallRouter], chunk: int, parameters: pb.SamplingParams
) -> None:
    whole, chunked = fresh(), fresh()
    whole.add(1, LONG, parameters)
    chunked.add(1, LONG, parameters)
    assert chunked.run(8, chunk=chunk) == whole.run(8)


def test_mixed_steps_give_what_each_sequence_gives_alone(fresh: Callable[[], SmallRouter]) -> None:
    prompts = {1: LONG, 2: SHORT, 3: LONG[5:40], 4: [42], 5: LONG[:33]}
    kinds = {number: VARIED if number % 2 else GREEDY for number in prompts}
    alone = {}
    for number, prompt in prompts.items():
        router = fresh()
        router.add(number, prompt, kinds[number])
        alone[number] = router.run(10)[number]
    mixed = fresh()
    for number, prompt in prompts.items():
        mixed.add(number, prompt, kinds[number])
        mixed.step(mixed.plan(7))
    assert mixed.run(10, chunk=7) == alone


@pytest.mark.parametrize("parameters", [GREEDY, VARIED], ids=["greedy", "varied"])
def test_preempted_sequence_goes_on_as_if_nothing_had_happened(
    fresh: Callable[[], SmallRouter], parameters: pb.SamplingParams
) -> None:
    undisturbed, disturbed = fresh(), fresh()
    for router in (undisturbed, disturbed):
        router.add(1, LONG, parameters)
        router.add(2, SHORT, VARIED)
    expected = undisturbed.run(20)
    for pause in (3, 4, 11):
        disturbed.run(pause, chunk=32)
        disturbed.preempt(1)
        disturbed.step({2: 1})
        disturbed.preempt(2)
    assert disturbed.run(20, chunk=32) == expected


def test_same_sequence_may_be_dropped_and_sent_again_in_one_step(router: SmallRouter) -> None:
    router.add(1, SHORT)
    router.run(2)
    router.preempt(1)
    response = router.step({1: 5})
    assert list(response.ids) == [1]
    assert response.num_sequences == 1


def test_steps_may_be_sent_before_the_answer_is_read(fresh: Callable[[], SmallRouter]) -> None:
    prompt, pipelined = fresh(), fresh()
    for router in (prompt, pipelined):
        router.add(1, LONG, VARIED)
        router.add(2, SHORT)
    expected = prompt.run(10)
    unread: list[pb.StepResponse] = []
    for _ in range(12):
        # The request is made while the token of the step before is not known to the router.
        request, is_decode = pipelined.request(pipelined.plan(64))
        unread.append(pipelined.execute(request, is_decode))
        if len(unread) > 1:
            pipelined.note(unread.pop(0))
    pipelined.note(unread.pop())
    assert {number: known.output[:10] for number, known in pipelined.sequences.items()} == expected


def test_alternatives_come_for_those_who_want_them(router: SmallRouter, folder: Path) -> None:
    router.add(1, LONG).top_n_tokens = 3
    router.add(2, SHORT)
    router.add(3, [9, 8]).top_n_tokens = 1
    response = router.step(router.plan(128))
    assert list(response.top_counts) == [3, 0, 1]
    expected = transformers_logprobs(folder, LONG)[-1].topk(3)
    assert [number for number, _ in router.sequences[1].tops[0]] == expected.indices.tolist()
    values = torch.tensor([value for _, value in router.sequences[1].tops[0]])
    torch.testing.assert_close(values, expected.values, atol=1e-4, rtol=0)
    assert router.sequences[1].output[0] == expected.indices[0]
    assert router.sequences[1].logprobs[0] == pytest.approx(float(expected.values[0]), abs=1e-4)


@pytest.mark.parametrize("chunk", [128, 16, 5, 1])
def test_prompt_logprobs_across_chunks(router: SmallRouter, folder: Path, chunk: int) -> None:
    known = router.add(1, LONG)
    known.prompt_logprobs, known.prompt_top_n_tokens = True, 2
    router.add(2, SHORT)
    router.run(2, chunk=chunk)
    logprobs: list[float] = []
    tops: list[int] = []
    for part in known.prompt_parts:
        assert part.start == len(logprobs) + 1
        logprobs += part.logprobs
        tops += part.top_token_ids
    expected = transformers_logprobs(folder, LONG)[:-1]
    chosen = expected.gather(1, torch.tensor(LONG[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), chosen, atol=1e-4, rtol=0)
    assert torch.tensor(tops).view(-1, 2).tolist() == expected.topk(2).indices.tolist()


def test_seconds_and_counts_are_reported(router: SmallRouter) -> None:
    router.add(1, LONG)
    first = router.step({1: len(LONG)})
    assert first.idle_seconds == 0
    assert first.forward_seconds > 0 and first.sample_seconds > 0
    assert first.num_sequences == 1
    assert router.step({1: 1}).idle_seconds > 0


# ---- what a step leaves


def test_dropped_sequences_are_gone(router: SmallRouter, engine: Engine) -> None:
    for number in (1, 2, 3):
        router.add(number, SHORT)
    router.run(1)
    router.drop(2)
    assert router.step({1: 1}).num_sequences == 2
    assert engine.drop([3, 99]) == 1
    assert engine.clear() == 1
    assert engine.clear() == 0


def test_step_may_drop_without_scheduling(router: SmallRouter) -> None:
    router.add(1, SHORT)
    router.run(1)
    router.drop(1)
    response = router.step({})
    assert response.num_sequences == 0
    assert not response.ids


# ---- how a step fails


def test_sequence_with_broken_logits_fails_alone(tmp_path: Path) -> None:
    untied = load_tiny(make_checkpoint(tmp_path, tie_word_embeddings=False))
    engine = make_engine(untied)
    with torch.inference_mode():
        untied.model.get_parameter("model.embed_tokens.weight")[300] = torch.nan
    router = SmallRouter(execute_on(engine))
    router.add(1, SHORT)
    router.add(2, [300] * 10)
    router.add(3, LONG[:20])
    first, is_decode = router.request(router.plan(64))
    second, _ = router.request(router.plan(64))
    response = router.note(router.execute(first, is_decode))
    assert list(response.ids) == [1, 3]
    assert [(error.id, "not finite" in error.message) for error in response.errors] == [(2, True)]
    assert response.num_sequences == 2
    # This step was sent before the failure was known, and names the sequence that failed.
    response = router.note(router.execute(second, True))
    assert list(response.ids) == [1, 3]
    assert [error.id for error in response.errors] == [2]
    router.drop(2)
    # Its block, full of NaN, goes to a sequence that has done nothing.
    router.reuse_last_blocks()
    router.add(4, SHORT)
    outputs = router.run(8)
    assert outputs[4] == outputs[1] == transformers_greedy(tmp_path, SHORT, 8)
    assert outputs[3] == transformers_greedy(tmp_path, LONG[:20], 8)
    with pytest.raises(InvalidStep, match="sequence 2 is not known"):
        router.execute(pb.StepRequest(ids=[2], num_tokens=[1], num_new_blocks=[0]), True)


@pytest.mark.parametrize(
    ("fault", "expected", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory, "no memory for a step of 70 tokens"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), OutOfMemory, "no memory"),
        (RuntimeError("shapes do not fit"), ShardError, "RuntimeError: shapes do not fit"),
    ],
)
def test_failed_step_fails_its_sequences_and_no_other(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
    expected: type[ShardError],
    message: str,
) -> None:
    loaded = load_tiny(folder)
    engine = make_engine(loaded)
    router = SmallRouter(execute_on(engine))
    router.add(1, SHORT)
    router.run(3)
    router.add(2, LONG)

    def fail(inputs: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(loaded.model, "forward", fail)
        with pytest.raises(expected, match=message):
            router.step({2: len(LONG)})
    assert "a step of 70 tokens in 1 sequences" in caplog.text
    # A step that was sent in between names it; the others go on.
    response = router.step({1: 1, 2: 1})
    assert list(response.ids) == [1]
    assert [error.id for error in response.errors] == [2]
    router.preempt(2)
    router.sequences[2].num_promised = 0
    router.run(8)
    assert router.sequences[1].output[:8] == transformers_greedy(folder, SHORT, 8)
    assert router.sequences[2].output[:8] == transformers_greedy(folder, LONG, 8)


# ---- warm-up


def test_step_before_warm_up_is_refused(loaded: LoadedModel) -> None:
    engine = Engine(loaded, kv_cache_memory=None, cuda_memory_fraction=0.9)
    step = from_step_request(pb.StepRequest(), is_decode=True)
    with pytest.raises(NotWarm, match="call Warmup first"):
        engine.step(step)


def test_second_warm_up_starts_over(engine: Engine, router: SmallRouter) -> None:
    router.add(1, SHORT)
    router.run(2)
    capacity = engine.warm_up(max_step_tokens=16, max_step_sequences=4, max_total_tokens=100)
    assert capacity.num_blocks == 7
    assert capacity.step_seconds > 0
    assert engine.clear() == 0
    with pytest.raises(InvalidStep, match="sequence 1 is not known"):
        router.step({1: 1})


def test_cache_takes_what_it_is_given(loaded: LoadedModel) -> None:
    engine = Engine(loaded, kv_cache_memory=0.01, cuda_memory_fraction=0.9)
    capacity = engine.warm_up(max_step_tokens=16, max_step_sequences=4, max_total_tokens=0)
    assert capacity.available_bytes == int(0.01 * 2**30)
    assert capacity.num_blocks == capacity.available_bytes // capacity.block_bytes
    # Two layers, keys and values, two heads of 16 numbers, 16 tokens, float32.
    assert capacity.block_bytes == 2 * 2 * 2 * 16 * 16 * 4


def test_memory_is_measured_without_the_temporary_cache(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, kv_cache_memory=0.01, cuda_memory_fraction=0.9)
    real = CacheBudget.available_bytes
    sizes: list[tuple[int, int]] = []

    def available_bytes(budget: CacheBudget) -> int:
        bound = loaded.model.get_submodule("model.layers.0.self_attn").key_cache
        assert isinstance(bound, torch.Tensor)
        sizes.append((engine._cache.num_blocks, len(bound)))
        return real(budget)

    monkeypatch.setattr(CacheBudget, "available_bytes", available_bytes)
    engine.warm_up(max_step_tokens=128, max_step_sequences=4, max_total_tokens=0)
    assert sizes == [(1, 1)]


def test_memory_that_holds_no_block_is_refused(loaded: LoadedModel) -> None:
    engine = Engine(loaded, kv_cache_memory=1e-6, cuda_memory_fraction=0.9)
    with pytest.raises(OutOfMemory, match="one block of 16 tokens takes"):
        engine.warm_up(max_step_tokens=16, max_step_sequences=4, max_total_tokens=0)
    with pytest.raises(NotWarm):
        engine.step(from_step_request(pb.StepRequest(), is_decode=True))


def test_more_memory_than_there_is_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "available_host_bytes", lambda: 2**20)
    engine = Engine(loaded, kv_cache_memory=1.0, cuda_memory_fraction=0.9)
    with pytest.raises(OutOfMemory, match=r"asks for 1\.0 GiB, but only 1\.0 MiB are left"):
        engine.warm_up(max_step_tokens=16, max_step_sequences=4, max_total_tokens=0)


@pytest.mark.parametrize("name", ["max_step_tokens", "max_step_sequences"])
def test_limits_of_zero_are_refused(engine: Engine, name: str) -> None:
    limits = {"max_step_tokens": 16, "max_step_sequences": 4, "max_total_tokens": 0} | {name: 0}
    with pytest.raises(InvalidStep, match=f"{name} must be at least 1"):
        engine.warm_up(**limits)
