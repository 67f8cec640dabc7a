"""The gRPC service: one method per call. Knows no tensors and decides nothing.

Whatever touches the engine runs in one thread, in order of arrival; the event loop never waits for a step, so
that Info and Health are answered while one runs. An error becomes a status in `_execute`, and nowhere else;
one that no call can be answered after is also told to whoever runs the service.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc.aio
import torch
from headrace_proto import __version__
from headrace_proto import shard_pb2 as pb
from headrace_proto.shard_pb2_grpc import ShardServicer, add_ShardServicer_to_server

from headrace_shard.convert import from_step_request, to_step_response
from headrace_shard.engine import Engine
from headrace_shard.errors import DeviceLost, ShardError
from headrace_shard.loading import LoadedModel, name_of
from headrace_shard.machine import is_lost
from headrace_shard.order import StepOrder

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Context = grpc.aio.ServicerContext[Any, Any]

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A second shard on the same port must fail, not take half of the calls.
    ("grpc.so_reuseport", 0),
)


def create_server(service: "ShardService") -> grpc.aio.Server:
    """A server that has no port and is not started."""
    server = grpc.aio.server(options=_OPTIONS)
    add_ShardServicer_to_server(service, server)
    return server


class ShardService(ShardServicer):
    """Must be made and used in one event loop."""

    def __init__(self, engine: Engine, loaded: LoadedModel, on_lost: Callable[[DeviceLost], object]) -> None:
        """`on_lost` is called, in the event loop, whenever a call fails since the device is lost."""
        self._engine = engine
        self._device = loaded.device
        self._on_lost = on_lost
        self._order = StepOrder()
        # torch counts its threads for each thread that calls it.
        self._worker = ThreadPoolExecutor(
            1, "steps", initializer=torch.set_num_threads, initargs=(loaded.num_threads,)
        )
        self._pulse = ThreadPoolExecutor(1, "health")
        # Made now, for there may be no memory for it later.
        self._beat = torch.zeros(1, device=self._device)
        self._beside_steps = _stream(self._device)
        config = loaded.config
        self._info = pb.InfoResponse(
            model_type=config.model_type,
            dtype=name_of(loaded.dtype),
            device=loaded.device.type,
            block_size=loaded.backend.block_size,
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
            eos_token_ids=config.eos_token_ids,
            weight_bytes=loaded.weight_bytes,
            version=__version__,
            instance=str(uuid.uuid4()),
            notes=loaded.notes,
        )

    def close(self) -> None:
        """Waits for the step that runs; those behind it are not begun."""
        self._worker.shutdown(cancel_futures=True)
        self._pulse.shutdown(cancel_futures=True)

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        return self._info

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        await self._execute(self._pulse, context, self._touch)
        return pb.HealthResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        self._order.restart()
        return await self._execute(self._worker, context, self._warm_up, request)

    async def Prefill(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        return await self._step(request, context, is_decode=False)

    async def Decode(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        return await self._step(request, context, is_decode=True)

    async def Filter(self, request: pb.FilterRequest, context: Context) -> pb.FilterResponse:
        count = await self._execute(self._worker, context, self._engine.drop, request.dropped_ids[:])
        return pb.FilterResponse(num_sequences=count)

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearResponse:
        self._order.restart()
        return pb.ClearResponse(num_dropped=await self._execute(self._worker, context, self._engine.clear))

    async def _step(self, request: pb.StepRequest, context: Context, *, is_decode: bool) -> pb.StepResponse:
        # Messages are read and written here, beside a step that runs, so that the worker goes from one step
        # to the next without a pause.
        step = from_step_request(request, is_decode=is_decode)
        await self._order.turn(request.step_id, needs_earlier=len(request.new_sequences) < len(request.ids))
        # From here to the worker's queue nothing is awaited: the queue keeps the order.
        result = await self._execute(self._worker, context, self._engine.step, step)
        return to_step_response(result)

    def _touch(self) -> None:
        """Have the device compute something beside its other work. Raises RuntimeError if it cannot."""
        with torch.cuda.stream(self._beside_steps):
            self._beat.zero_().add_(1).item()

    def _warm_up(self, request: pb.WarmupRequest) -> pb.WarmupResponse:
        capacity = self._engine.warm_up(
            max_step_tokens=request.max_step_tokens,
            max_step_sequences=request.max_step_sequences,
            max_total_tokens=request.max_total_tokens,
        )
        return pb.WarmupResponse(
            num_blocks=capacity.num_blocks,
            block_bytes=capacity.block_bytes,
            step_seconds=capacity.step_seconds,
            available_bytes=capacity.available_bytes,
            step_costs=[
                pb.StepCost(num_tokens=num_tokens, seconds=seconds)
                for num_tokens, seconds in capacity.step_costs
            ],
        )

    async def _execute(
        self, thread: ThreadPoolExecutor, context: Context, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """What `function` gives when it is run in `thread`; its errors become statuses of the call."""
        try:
            return await asyncio.wrap_future(thread.submit(self._run, function, *arguments))
        except ShardError as error:
            if isinstance(error, DeviceLost):
                self._on_lost(error)
            await context.abort(error.status, str(error))
        except Exception as error:  # the edge of one request
            logger.exception("a call failed")
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")

    def _run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """In the thread: as `function`, but raises DeviceLost for whatever a lost device makes it raise."""
        try:
            return function(*arguments)
        except DeviceLost:
            raise
        except Exception as error:
            if is_lost(self._device):
                raise DeviceLost.after(error) from error
            raise


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """Work in it does not wait for a step."""
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
