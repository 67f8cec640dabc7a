"""What clients may do to a connection: offer upgrades, send heads without end, fall silent, send no HTTP."""

import json
import socket
from pathlib import Path

import pytest
from headrace_router import __main__ as program
from headrace_router.api import connection, exchange

from tests.router.running import WAIT_SECONDS, RunningRouter, raw_request

BODY = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 2}}).encode()

HEALTH = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n"

H2C = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}


def written(path: str, body: bytes = BODY, **headers: str) -> bytes:
    """A POST as it stands on the wire; `_` in a header's name is `-`."""
    given = {"host": "test", "content-type": "application/json", "content-length": str(len(body))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    if "transfer-encoding" in given:
        del given["content-length"]
    lines = [f"{name}: {value}" for name, value in given.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + body


def answered(router: RunningRouter, *parts: bytes) -> bytes:
    """All that comes back until the server hangs up."""
    received = b""
    with socket.create_connection(("127.0.0.1", router.port), timeout=WAIT_SECONDS) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for part in parts:
                client.sendall(part)
            while data := client.recv(65536):
                received += data
        except (ConnectionResetError, BrokenPipeError):
            pass  # It has hung up on something that we still sent.
    return received


def error_of(answer: bytes) -> tuple[int, dict[str, object]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head and b"connection: close" in head
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
def test_an_upgrade_is_declined_and_the_body_is_read(router: RunningRouter, protocol: str) -> None:
    offer = written("/generate", BODY, **(H2C | {"upgrade": protocol}))
    last = written("/generate", BODY, **(H2C | {"upgrade": protocol, "connection": "close, Upgrade"}))
    for parts in ([offer + last], [bytes([byte]) for byte in offer + last]):
        answer = answered(router, *parts)
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert answer.count(b"generated_text") == 2


def test_a_read_may_offer_an_upgrade_too(router: RunningRouter) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: test\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"
    end = b"GET /health HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"
    assert answered(router, request + end).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("offer", [{}, H2C | {"connection": "close, Upgrade"}])
def test_nothing_is_answered_behind_a_close(router: RunningRouter, offer: dict[str, str]) -> None:
    """A proxy that takes what follows for the body, or for another client's request, must not be misled."""
    answer = answered(router, written("/generate", BODY, **({"connection": "close"} | offer)) + HEALTH * 2)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"generated_text" in answer


@pytest.mark.parametrize("offer", [b"", b"connection: Upgrade\r\nupgrade: h2c\r\n"])
@pytest.mark.parametrize(
    "length",
    [
        b"content-length: 0\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 0",
        b"content-length: 0\r\ncontent-length: 9",
        b"content-length: 0, 9",
        b"content-length: +9",
        b"transfer-encoding: identity",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding : chunked",
        b"content-length: 9\r\nx-a: b\r\n transfer-encoding: chunked",
        b"content-length: 9\r\nx-a: b\ntransfer-encoding: chunked",
        b"content-length: 9\r\nx-a: b\rtransfer-encoding: chunked",
    ],
)
def test_a_body_that_may_end_in_two_places_is_refused(
    router: RunningRouter, length: bytes, offer: bytes
) -> None:
    """A proxy might read another length: what is a body for the one would be a request for the other."""
    start = b"POST /generate HTTP/1.1\r\nhost: test\r\n"
    status, _ = error_of(answered(router, start + offer + length + b"\r\n\r\n" + HEALTH * 2))
    assert status == 400


@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTTP/1.1\r\nx-long: ",
        b"GET /",
        written("/v1/completions", b"1;extension=", transfer_encoding="chunked"),
        written("/v1/completions", b"1\r\n{\r\n0\r\nx-trailer: ", transfer_encoding="chunked"),
    ],
)
def test_what_never_ends_is_cut_off(router: RunningRouter, start: bytes) -> None:
    answer = answered(router, start, *[b"a" * 4096] * (connection.MAX_HEAD_BYTES // 4096 + 200))
    # A reset may overtake the answer; what counts is that nobody reads on for ever.
    assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


@pytest.mark.parametrize(
    "request_line",
    [b"\x16\x03\x01\x02\x00", b"GET /\xff HTTP/1.1", b"FOO / HTTP/1.1", b"CONNECT a:80 HTTP/1.1"],
)
def test_no_http_is_an_error_of_the_native_face(router: RunningRouter, request_line: bytes) -> None:
    status, body = error_of(answered(router, request_line + b"\r\nhost: test\r\n\r\n"))
    assert status == 400
    assert body["error_type"] == "bad_request" and "HTTP/1.1" in str(body["error"])


@pytest.mark.parametrize(
    "request_",
    [
        written("/v1/completions", content_length="-1"),
        written("/v1/completions", b"zz\r\nabc\r\n", transfer_encoding="chunked"),
    ],
)
def test_broken_http_under_v1_is_an_error_of_the_openai_face(router: RunningRouter, request_: bytes) -> None:
    status, body = error_of(answered(router, request_))
    assert status == 400
    assert isinstance(body["error"], dict) and body["error"]["type"] == "invalid_request_error"


def test_rubbish_behind_a_request_does_not_take_its_answer(router: RunningRouter) -> None:
    answer = answered(router, written("/generate") + b"\x00rubbish\r\n\r\n")
    assert answer.count(b"HTTP/1.1") == 1 and b"generated_text" in answer


def test_leaving_is_noticed_behind_pipelined_requests(router: RunningRouter) -> None:
    engine = router.service.engine
    router.do(router.shard.gate.clear)
    with raw_request(router, "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 9}}) as client:
        router.wait_for(lambda: engine.num_active == 1)
        client.sendall(written("/generate") * 2)
    router.wait_for(lambda: engine.num_active == 0)


def test_a_head_has_its_time(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_SECONDS", 0.05)
    assert answered(router, b"GET /health HTTP/1.1\r\nhost: te") == b""


def test_a_connection_without_a_request_ends(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "KEEP_ALIVE_CONNECTION_SECONDS", 0.05)
    with RunningRouter(model_folder) as router:
        assert answered(router) == b""


def test_a_body_that_stops_coming(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_BODY_SILENCE_SECONDS", 0.05)
    status, body = error_of(answered(router, written("/generate", BODY, content_length="500")))
    assert (status, body["error_type"]) == (408, "request_timeout")


def test_clients_that_are_gone_or_take_nothing_are_noticed() -> None:
    with program.bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            timeout = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout == program.CLIENT_GONE_SECONDS * 1000
