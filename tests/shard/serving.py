"""A service over a real unix socket, in a thread of its own, for tests."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from headrace_proto import shard_pb2 as pb
from headrace_proto.shard_pb2_grpc import ShardStub
from headrace_shard.engine import Engine
from headrace_shard.errors import DeviceLost
from headrace_shard.service import ShardService, create_server
from headrace_shard.step import Step, StepResult

from tests.shard.small_router import load_tiny

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


@contextmanager
def served(folder: Path, tmp_path: Path) -> Iterator[Serving]:
    """A service of the checkpoint in `folder`, on a socket in `tmp_path`."""
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
