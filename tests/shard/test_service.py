"""The service over a real unix socket: statuses, order, and what is answered while a step runs."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from headrace_proto import __version__
from headrace_proto import shard_pb2 as pb
from headrace_proto.shard_pb2_grpc import ShardStub
from headrace_shard import engine as engine_module
from headrace_shard import service as service_module
from headrace_shard.engine import Engine
from headrace_shard.errors import DeviceLost
from headrace_shard.service import ShardService, create_server
from headrace_shard.step import Step, StepResult

from tests.shard.small_router import GREEDY, LONG, SmallRouter, load_tiny, sampling, transformers_greedy

TIMEOUT_SECONDS = 60.0


@dataclass
class Serving:
    """A service in a thread of its own, and a client of it."""

    engine: Engine
    service: ShardService
    stub: ShardStub
    lost: list[DeviceLost]
    """What the service has said of its device."""

    def execute(self, request: pb.StepRequest, is_decode: bool) -> pb.StepResponse:
        method = self.stub.Decode if is_decode else self.stub.Prefill
        return method(request, timeout=TIMEOUT_SECONDS)

    def warm_up(self) -> pb.WarmupResponse:
        request = pb.WarmupRequest(max_step_tokens=128, max_step_sequences=32, max_total_tokens=64 * 16)
        return self.stub.Warmup(request, timeout=TIMEOUT_SECONDS)


@pytest.fixture
def serving(folder: Path, tmp_path: Path) -> Iterator[Serving]:
    loaded = load_tiny(folder)
    engine = Engine(loaded, kv_cache_memory=0.25, cuda_memory_fraction=0.9)
    target = f"unix:{tmp_path}/shard"
    started = threading.Event()
    stop: list[Callable[[], object]] = []
    services: list[ShardService] = []
    lost: list[DeviceLost] = []

    async def serve() -> None:
        service = ShardService(engine, loaded, on_lost=lost.append)
        services.append(service)
        server = create_server(service)
        server.add_insecure_port(target)
        await server.start()
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(stopping.set))
        started.set()
        await stopping.wait()
        await server.stop(None)
        service.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(TIMEOUT_SECONDS)
    with grpc.insecure_channel(target, options=(("grpc.max_send_message_length", -1),)) as channel:
        yield Serving(engine, services[0], ShardStub(channel), lost)
    stop[0]()
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()


@pytest.fixture
def router(serving: Serving) -> SmallRouter:
    serving.warm_up()
    return SmallRouter(serving.execute)


class Held:
    """Holds up the engine's steps until it is told to let them go."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()
        real = engine.step

        def step(step: Step) -> StepResult:
            self.reached.set()
            assert self.released.wait(TIMEOUT_SECONDS)
            return real(step)

        monkeypatch.setattr(engine, "step", step)


def status_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = caught.value
    assert isinstance(error, grpc.Call)
    return error.code(), error.details() or ""


def test_info_says_what_is_served(serving: Serving) -> None:
    info = serving.stub.Info(pb.InfoRequest())
    assert (info.model_type, info.dtype, info.device, info.attention) == ("llama", "float32", "cpu", "sdpa")
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


def test_steps_sent_ahead_give_what_steps_one_by_one_give(router: SmallRouter, serving: Serving) -> None:
    warm = sampling(temperature=1.1, seed=3)
    router.add(1, LONG, warm)
    router.add(2, [9, 8, 7])
    calls = []
    for _ in range(12):
        request, is_decode = router.request(router.plan(32))
        method = serving.stub.Decode if is_decode else serving.stub.Prefill
        calls.append(method.future(request, timeout=TIMEOUT_SECONDS))
    for call in calls:
        router.note(call.result())
    ahead = {number: known.output[:8] for number, known in router.sequences.items()}
    serving.stub.Clear(pb.ClearRequest())
    one_by_one = SmallRouter(serving.execute)
    one_by_one.add(1, LONG, warm)
    one_by_one.add(2, [9, 8, 7])
    assert one_by_one.run(8) == ahead


def test_short_message_does_not_overtake_a_long_one(router: SmallRouter, serving: Serving) -> None:
    # Megabytes, so that gRPC must cut the first message into pieces; the second one is a few bytes.
    router.add(1, LONG, sampling(temperature=0.0, suppressed=[1] * 3_000_000))
    first, _ = router.request(router.plan(128))
    second, _ = router.request({1: 1})
    calls = [
        serving.stub.Prefill.future(first, timeout=TIMEOUT_SECONDS),
        serving.stub.Decode.future(second, timeout=TIMEOUT_SECONDS),
    ]
    assert [list(call.result().ids) for call in calls] == [[1], [1]]


def test_step_that_arrives_first_waits_for_the_one_before(router: SmallRouter, serving: Serving) -> None:
    router.add(1, LONG)
    first, _ = router.request(router.plan(128))
    second, _ = router.request({1: 1})
    call = serving.stub.Decode.future(second, timeout=TIMEOUT_SECONDS)
    serving.stub.Health(pb.HealthRequest())
    assert list(serving.stub.Prefill(first, timeout=TIMEOUT_SECONDS).ids) == [1]
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
