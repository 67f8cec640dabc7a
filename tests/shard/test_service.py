"""The service over a real unix socket: statuses, and what is answered while a step runs."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from headrace_proto import __version__
from headrace_proto import shard_pb2 as pb
from headrace_shard import engine as engine_module
from headrace_shard import service as service_module

from tests.shard.serving import TIMEOUT_SECONDS, Held, Serving, served, status_of
from tests.shard.small_router import GREEDY, LONG, SmallRouter, transformers_greedy


@pytest.fixture
def serving(folder: Path, tmp_path: Path) -> Iterator[Serving]:
    with served(folder, tmp_path) as serving:
        yield serving


@pytest.fixture
def router(serving: Serving) -> SmallRouter:
    serving.warm_up()
    return SmallRouter(serving.execute)


def test_info_says_what_is_served(serving: Serving) -> None:
    info = serving.stub.Info(pb.InfoRequest())
    assert (info.model_type, info.dtype, info.device) == ("llama", "float32", "cpu")
    assert (info.block_size, info.vocab_size, info.max_positions) == (16, 384, 512)
    assert list(info.eos_token_ids) == [2]
    assert info.version == __version__
    assert info.weight_bytes > 0
    assert len(info.instance) == 36
    for start in ("device: cpu", "dtype: float32", "attention: sdpa", "threads: 1", "weights: "):
        assert any(note.startswith(start) for note in info.notes), info.notes


def test_warm_up_says_how_many_blocks_there_are(serving: Serving) -> None:
    response = serving.warm_up()
    assert response.num_blocks == 64
    assert response.block_bytes * 64 <= response.available_bytes == 2**28
    assert response.step_seconds > 0
    assert [cost.num_tokens for cost in response.step_costs] == [1, 16, 32, 64, 128]
    assert all(cost.seconds > 0 for cost in response.step_costs)


def test_greedy_over_the_wire_equals_transformers(router: SmallRouter, folder: Path) -> None:
    router.add(1, LONG)
    router.add(2, [9, 8, 7])
    outputs = router.run(10, chunk=32)
    assert outputs[1] == transformers_greedy(folder, LONG, 10)
    assert outputs[2] == transformers_greedy(folder, [9, 8, 7], 10)


def test_filter_and_clear(router: SmallRouter, serving: Serving) -> None:
    for number in (1, 2, 3):
        router.add(number, [5, 6])
    router.run(1)
    assert serving.stub.Filter(pb.FilterRequest(dropped_ids=[2, 77])).num_sequences == 2
    assert serving.stub.Clear(pb.ClearRequest()).num_dropped == 2
    assert serving.stub.Clear(pb.ClearRequest()).num_dropped == 0


def test_health_and_info_answer_while_a_step_runs(
    router: SmallRouter, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(serving.engine, monkeypatch)
    router.add(1, LONG)
    request, _ = router.request(router.plan(128))
    call = serving.stub.Prefill.future(request, timeout=TIMEOUT_SECONDS)
    assert held.reached.wait(TIMEOUT_SECONDS)
    serving.stub.Health(pb.HealthRequest(), timeout=TIMEOUT_SECONDS)
    assert serving.stub.Info(pb.InfoRequest(), timeout=TIMEOUT_SECONDS).model_type == "llama"
    assert not call.done()
    held.released.set()
    assert list(call.result().ids) == [1]


def test_step_before_warm_up(serving: Serving) -> None:
    request = pb.StepRequest()
    code, details = status_of(lambda: serving.stub.Decode(request))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "call Warmup first" in details


def test_broken_step(router: SmallRouter, serving: Serving) -> None:
    router.add(1, [5, 6])
    router.run(1)
    request = pb.StepRequest(step_id=1, ids=[1, 9], num_tokens=[1, 1], num_new_blocks=[0, 0])
    code, details = status_of(lambda: serving.stub.Decode(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "sequence 9 is not known" in details
    assert len(router.run(4)[1]) == 4


def test_failing_step_has_a_status_and_the_shard_lives(
    router: SmallRouter, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.add(1, LONG)

    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    with monkeypatch.context() as patch:
        patch.setattr(serving.engine._loaded.model, "forward", fail)
        code, details = status_of(lambda: router.step({1: len(LONG)}))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "no memory for a step of 70 tokens" in details
    serving.stub.Clear(pb.ClearRequest())
    again = SmallRouter(serving.execute)
    again.add(1, LONG)
    assert len(again.run(3)[1]) == 3


def test_unforeseen_fault_is_internal(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("row")

    monkeypatch.setattr(serving.engine, "clear", fail)
    code, details = status_of(lambda: serving.stub.Clear(pb.ClearRequest()))
    assert code is grpc.StatusCode.INTERNAL
    assert details == "KeyError: 'row'"


def test_health_has_the_device_compute(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving.service._beat == 0
    serving.stub.Health(pb.HealthRequest())
    assert serving.service._beat == 1

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with ...")

    monkeypatch.setattr(serving.service, "_touch", fail)
    code, _ = status_of(lambda: serving.stub.Health(pb.HealthRequest()))
    assert code is grpc.StatusCode.INTERNAL
    assert not serving.lost
    monkeypatch.setattr(service_module, "is_lost", lambda device: True)
    code, details = status_of(lambda: serving.stub.Health(pb.HealthRequest()))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert details.endswith("AcceleratorError: CUDA error: unspecified launch failure")
    assert [str(error) for error in serving.lost] == [details]


def test_step_by_which_the_device_is_lost(
    router: SmallRouter,
    serving: Serving,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(inputs: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(serving.engine._loaded.model, "forward", fail)
    monkeypatch.setattr(engine_module, "is_lost", lambda device: True)
    router.add(1, LONG)
    code, details = status_of(lambda: router.step({1: len(LONG)}))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "this process must be replaced" in details
    assert [str(error) for error in serving.lost] == [details]
    assert not caplog.records


def test_call_that_is_given_up_harms_no_other(
    router: SmallRouter, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(serving.engine, monkeypatch)
    router.add(1, LONG)
    request, _ = router.request(router.plan(128))
    call = serving.stub.Prefill.future(request, timeout=TIMEOUT_SECONDS)
    assert held.reached.wait(TIMEOUT_SECONDS)
    call.cancel()
    held.released.set()
    assert serving.stub.Clear(pb.ClearRequest(), timeout=TIMEOUT_SECONDS).num_dropped == 1


def test_second_warm_up_drops_everything(router: SmallRouter, serving: Serving) -> None:
    router.add(1, LONG)
    router.run(1)
    serving.warm_up()
    assert serving.stub.Clear(pb.ClearRequest()).num_dropped == 0


def test_prompt_logprobs_cross_the_wire(router: SmallRouter) -> None:
    known = router.add(1, LONG, GREEDY)
    known.prompt_logprobs, known.prompt_top_n_tokens = True, 3
    router.run(1, chunk=30)
    assert [(part.start, len(part.logprobs)) for part in known.prompt_parts] == [(1, 30), (31, 30), (61, 9)]
    assert all(len(part.top_token_ids) == 3 * len(part.logprobs) for part in known.prompt_parts)
    assert all(len(part.top_logprobs) == 3 * len(part.logprobs) for part in known.prompt_parts)
