"""A connection to one shard: deadlines, and statuses as errors of the router. Knows no policy.

UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED   → errors.Unavailable      the shard is gone or frozen
any other status                            → errors.GenerationError  it is there, and the call failed
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio
from headrace_proto import shard_pb2 as pb
from headrace_proto.settings import SettingsError
from headrace_proto.shard_pb2_grpc import ShardStub

from headrace_router.errors import GenerationError, HeadraceError, Unavailable
from headrace_router.scheduling.limits import Capacity, Plan, ShardInfo
from headrace_router.scheduling.step import Step, StepResult
from headrace_router.shards import convert

if TYPE_CHECKING:
    # Only the stub files know it: what a stub is when its channel is asynchronous.
    from headrace_proto.shard_pb2_grpc import ShardAsyncStub

Response = TypeVar("Response")
StepCall = grpc.aio.UnaryUnaryCall[pb.StepRequest, pb.StepResponse]

INFO_TIMEOUT_SECONDS = 10.0
"""For calls that a shard answers at once, also while a step runs."""

WATCH_SECONDS = 1.0
"""Between two looks at a shard that is thought to be well."""

WARMUP_TIMEOUT_SECONDS = 600.0
"""Warming up may compile kernels and capture graphs."""

_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)

_NO_CONNECTION = re.compile("failed to connect|no such file|connection refused", re.IGNORECASE)
_BROKEN = re.compile("socket closed|connection reset|broken pipe|goaway|(recv|send)msg|cancel", re.IGNORECASE)
"""gRPC's own words; what else comes with a status is the shard's."""

log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A shard that was restarted must be found at once, and not through somebody else's dead connection.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # A step must not be sent twice; and what is kept for that costs time with every call.
    ("grpc.enable_retries", 0),
)


def target_of(address: str) -> str:
    """`unix:///path` or `tcp://host:port` as gRPC names it. Raises `SettingsError`."""
    scheme, separator, rest = address.partition("://")
    if scheme == "unix" and separator and rest.startswith("/"):
        return address
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isascii() and port.isdecimal() and 0 < int(port) <= 65535:
        return rest
    raise SettingsError(f"--shard: expected unix:///path or tcp://host:port, got {address!r}")


class ShardClient:
    """One connection; must be made and used in one event loop. Every call raises as the module says."""

    def __init__(self, address: str, *, step_timeout_seconds: float) -> None:
        self._address = address
        self.step_timeout_seconds = step_timeout_seconds
        """For a step, and for what waits behind one."""
        self._channel = grpc.aio.insecure_channel(target_of(address), options=_OPTIONS)
        self._is_closed = False
        self._told = ""
        """What went wrong last, in gRPC's words."""
        stub: ShardAsyncStub = ShardStub(self._channel)  # type: ignore[assignment]
        self._stub = stub

    async def close(self) -> None:
        """Calls under way end with `Unavailable`."""
        self._is_closed = True
        await self._channel.close()

    async def info(self) -> ShardInfo:
        call = self._stub.Info(pb.InfoRequest(), timeout=INFO_TIMEOUT_SECONDS)
        return convert.from_info_response(await self._answer(call, "Info"))

    async def lost(self, instance: str) -> Unavailable:
        """Returns why once the shard is gone, frozen, another process than `instance`, or without a device
        that computes. Asks every second: so it sees what a step under way or an idle connection would not."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                info = await self.info()
                await self.health()
            except HeadraceError as error:
                return Unavailable(error.message)
            if info.instance != instance:
                return Unavailable("the shard was restarted")

    async def health(self) -> None:
        """Has the device compute something. A `GenerationError` means that it cannot."""
        await self._answer(self._stub.Health(pb.HealthRequest(), timeout=INFO_TIMEOUT_SECONDS), "Health")

    async def warmup(self, planned: Plan) -> Capacity:
        """The shard drops every sequence, measures and allocates."""
        request = convert.to_warmup_request(planned)
        call = self._stub.Warmup(request, timeout=WARMUP_TIMEOUT_SECONDS)
        return convert.from_warmup_response(await self._answer(call, "Warmup"))

    def send(self, step: Step, *, num_ahead: int = 0) -> StepCall:
        """Hands a step to gRPC, which sends it the next time the event loop turns; see `receive`. So many
        others that were sent have not come back, and each may take as long as a step may."""
        method = self._stub.Prefill if step.is_prefill else self._stub.Decode
        return method(convert.to_step_request(step), timeout=(1 + num_ahead) * self.step_timeout_seconds)

    async def receive(self, call: StepCall) -> StepResult:
        """The result of a step that was sent."""
        return convert.from_step_response(await self._answer(call, "step"))

    async def filter(self, dropped_ids: Iterable[int]) -> int:
        """The shard forgets these sequences; how many it still holds."""
        request = pb.FilterRequest(dropped_ids=dropped_ids)
        call = self._stub.Filter(request, timeout=self.step_timeout_seconds)
        return (await self._answer(call, "Filter")).num_sequences

    async def _answer(self, call: Awaitable[Response], name: str) -> Response:
        # When our task is cancelled, gRPC may say so with a status; when `close` ends the call, it raises
        # CancelledError. Only the task itself knows which of the two it is.
        task = asyncio.current_task()
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
            raise self._error(error, name) from error
        except asyncio.CancelledError:
            if self._is_closed and task is not None and not task.cancelling():
                raise Unavailable(f"the shard at {self._address} was given up during {name}") from None
            raise

    def _error(self, error: grpc.aio.AioRpcError, name: str) -> HeadraceError:
        details = error.details() or error.code().name
        if details != self._told:  # While a shard starts it is asked again and again.
            log.debug("%s: %s: %s", name, error.code().name, details)
            self._told = details
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"the shard at {self._address} did not answer {name} in time")
        if error.code() in _GONE:
            return Unavailable(f"the shard at {self._address} is gone: {_in_plain_words(details)}")
        prefix = "Request failed during generation: Server error" if name == "step" else f"{name} failed"
        return GenerationError(f"{prefix}: {details}")


def _in_plain_words(details: str) -> str:
    if _NO_CONNECTION.search(details):
        return "no connection"
    return "the connection broke" if _BROKEN.search(details) else details
