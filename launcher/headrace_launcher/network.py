"""What the launcher asks the network: is this port free, is the router healthy, is the shard alive."""

import asyncio
import errno
import os
import socket
from contextlib import closing
from typing import TYPE_CHECKING

from headrace_launcher.errors import StartError

if TYPE_CHECKING:
    # Only the stub files know it.
    from headrace_proto.shard_pb2_grpc import ShardAsyncStub

PROBE_SECONDS = 5.0
"""How long one question may take."""


def claim_port(hostname: str, port: int, flag: str = "--port") -> int:
    """The port, proven free a moment ago; for port 0 one that is free. Raises StartError."""
    try:
        found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise StartError(f"--hostname {hostname}: no such address on this machine") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As the router does: connections of an earlier server that are still closing are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            raise StartError(_why_not(error, hostname, port, flag)) from None
        return int(probe.getsockname()[1])


def _why_not(error: OSError, hostname: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{flag} {port}: another program listens there already; end it, or choose another port"
    if error.errno == errno.EACCES:
        return f"{flag} {port}: this user may not listen there; choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--hostname {hostname}: no such address on this machine"
    return f"{flag} {port}: {os.strerror(error.errno or 0)}"


def reachable_name(hostname: str) -> str:
    """The address under which this machine reaches a server that listens on `hostname`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(hostname, hostname)


async def listens(socket_path: str) -> bool:
    """Whether a process accepts connections on a Unix socket."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_unix_connection(socket_path)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def health_status(hostname: str, port: int) -> int | None:
    """The HTTP status of `GET /health`, or None when nobody answers in time."""
    request = f"GET /health HTTP/1.1\r\nhost: {hostname}:{port}\r\nconnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(reachable_name(hostname), port)
            with closing(writer):
                writer.write(request.encode())
                status_line = await reader.readline()
        return int(status_line.split()[1])
    except (OSError, TimeoutError, ValueError, IndexError):
        return None


async def shard_is_alive(socket_path: str) -> bool:
    """Whether the shard on a Unix socket answers `Health` in time, for which its device has to compute.

    That is not whether it serves: it answers while it warms up too.
    """
    # Not before anybody is asked: the children need not wait for these packages.
    import grpc
    import grpc.aio
    from headrace_proto import shard_pb2 as pb
    from headrace_proto.shard_pb2_grpc import ShardStub

    # A new channel each time: an old one would wait before it looks for a shard that has started again.
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    async with grpc.aio.insecure_channel(f"unix://{socket_path}", options=options) as channel:
        stub: ShardAsyncStub = ShardStub(channel)  # type: ignore[assignment]
        try:
            await stub.Health(pb.HealthRequest(), timeout=PROBE_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    return True
