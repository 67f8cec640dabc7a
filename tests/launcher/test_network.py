"""Ports, sockets and health, asked of real ones."""

import asyncio
import socket
from pathlib import Path

import pytest
from headrace_launcher import network
from headrace_launcher.errors import StartError
from headrace_launcher.network import claim_port, health_status, listens, reachable_name, shard_is_alive

from tests.fake_shard import FakeShard, serving


def test_a_free_port_stays_free(free_port: int) -> None:
    assert claim_port("127.0.0.1", free_port) == free_port
    assert claim_port("127.0.0.1", free_port) == free_port
    assert claim_port("0.0.0.0", 0) > 0


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for hostname in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(StartError, match=f"^--port {port}: another program listens there"):
                claim_port(hostname, port)
        with pytest.raises(StartError, match=f"^--prometheus-port {port}: "):
            claim_port("127.0.0.1", port, "--prometheus-port")


@pytest.mark.parametrize("hostname", ["no.such.host.invalid", "a b", "203.0.113.7", "x" * 300])
def test_a_hostname_that_is_not_ours(hostname: str) -> None:
    with pytest.raises(StartError, match=r"^--hostname .*no such address on this machine"):
        claim_port(hostname, 0)


def test_reachable_name() -> None:
    assert [reachable_name(name) for name in ("0.0.0.0", "::", "10.0.0.1")] == [
        "127.0.0.1",
        "::1",
        "10.0.0.1",
    ]


def test_a_socket_answers_only_while_somebody_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    assert not asyncio.run(listens(path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        assert not asyncio.run(listens(path))
        server.listen()
        assert asyncio.run(listens(path))
    assert not asyncio.run(listens(path))


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b"HTTP/1.1 200 OK\r\n\r\n", 200), (b"HTTP/1.1 503 x\r\n\r\n", 503), (b"hello\r\n", None), (b"", None)],
)
def test_health_status(answer: bytes, status: int | None) -> None:
    requests: list[bytes] = []

    async def work() -> int | None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await health_status("0.0.0.0", server.sockets[0].getsockname()[1])

    assert asyncio.run(work()) == status
    assert requests[0].startswith(b"GET /health HTTP/1.1\r\n")


def test_nobody_is_no_status(free_port: int) -> None:
    assert asyncio.run(health_status("127.0.0.1", free_port)) is None


def test_a_shard_is_alive_while_its_device_computes(tmp_path: Path) -> None:
    async def work() -> None:
        path = str(tmp_path / "socket")
        assert not await shard_is_alive(path)
        async with serving(shard := FakeShard(), f"unix://{path}"):
            assert await shard_is_alive(path)
            shard.health_error = "an illegal memory access"
            assert not await shard_is_alive(path)
        assert not await shard_is_alive(path)

    asyncio.run(work())


def test_a_shard_that_gives_no_answer_is_not_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PROBE_SECONDS", 0.2)
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        assert not asyncio.run(shard_is_alive(path))
