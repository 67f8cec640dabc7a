"""Reading bodies, and noticing at once that a client has left: queued, computing, streaming or not."""

import asyncio
import socket
import struct
from typing import Any

import pytest
from headrace_router.api.connection import HttpConnection
from headrace_router.batcher import Batcher
from headrace_router.scheduling.request import FinishReason, Sequence, Status
from headrace_router.scheduling.scheduler import MAX_IN_FLIGHT

from tests.router.running import CHAT, RunningRouter, raw_request

STREAM = {"inputs": "the water", "parameters": {"max_new_tokens": 200}}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", STREAM),
    ("/generate_stream", STREAM),
    ("/v1/chat/completions", CHAT | {"ignore_eos": True}),
    ("/v1/chat/completions", CHAT | {"stream": True, "ignore_eos": True}),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 3, "ignore_eos": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 200, "ignore_eos": True}),
]

DROPPED = 'tgi_request_failure{err="dropped"}'


def abort(connection: socket.socket) -> None:
    """Closes with a reset, as a killed process with unread data does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def wait_until_gone(router: RunningRouter) -> None:
    engine = router.service.engine
    router.wait_for(lambda: engine.num_active == 0)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("has_reset", [False, True])
def test_leaving_during_prefill(
    router: RunningRouter, path: str, body: dict[str, Any], has_reset: bool
) -> None:
    before = router.metric(DROPPED)
    router.do(router.shard.gate.clear)
    num_steps = len(router.shard.steps)
    with raw_request(router, path, body) as connection:
        router.wait_for(lambda: len(router.shard.steps) > num_steps)
        if has_reset:
            abort(connection)
    # The step still stands still: nothing but the closed socket can have told.
    wait_until_gone(router)
    router.do(router.shard.gate.set)
    router.wait_for(lambda: not router.shard.sequences)
    assert router.metric(DROPPED) == before + 1


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_leaving_while_tokens_come(router: RunningRouter, path: str, body: dict[str, Any]) -> None:
    before = router.metric(DROPPED)
    router.shard.step_seconds = 0.005
    router.says("a", ends=False)
    with raw_request(router, path, body):
        router.wait_for(lambda: any(one.num_generated > 3 for one in router.shard.sequences.values()))
    wait_until_gone(router)
    router.wait_for(lambda: not router.shard.sequences)
    assert router.metric(DROPPED) == before + 1
    assert router.metric('headrace_kv_blocks{state="used"}') == 0


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_leaving_the_queue(model_folder: Any, path: str, body: dict[str, Any]) -> None:
    with RunningRouter(model_folder, max_batch_size=1, max_total_tokens=256) as router:
        router.do(router.shard.gate.clear)
        engine = router.service.engine
        with raw_request(router, "/generate", STREAM):
            router.wait_for(lambda: len(router.shard.steps) == MAX_IN_FLIGHT)
            with raw_request(router, path, body):
                router.wait_for(lambda: engine.num_active > 1)
            router.wait_for(lambda: engine.num_active == 1)
            router.wait_for(lambda: len(router.shard.steps) == MAX_IN_FLIGHT)
        router.wait_for(lambda: engine.num_active == 0)
        router.do(router.shard.gate.set)
        assert router.metric("tgi_queue_size") == 0
        assert router.metric(DROPPED) == 2
        # None but the first was ever sent to the shard.
        assert {new.id for step in router.shard.steps for new in step.new_sequences} <= {1}


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_who_leaves_is_cancelled_in_the_next_turn_of_the_loop(
    router: RunningRouter, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many turns its handler takes to end: in each of them a step might be sent."""
    turn = 0
    noticed: list[int] = []
    cancelled: list[int] = []
    finish, eof_received = Batcher.finish, HttpConnection.eof_received

    async def turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def notes_eof(self: HttpConnection) -> None:
        noticed.append(turn)
        eof_received(self)

    def notes_finish(self: Batcher, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is not Status.FINISHED:
            cancelled.append(turn)
        finish(self, sequence, reason)

    monkeypatch.setattr(HttpConnection, "eof_received", notes_eof)
    monkeypatch.setattr(Batcher, "finish", notes_finish)
    router.do(router.shard.gate.clear)
    num_steps = len(router.shard.steps)
    counting = asyncio.run_coroutine_threadsafe(turns(), router.loop)
    with raw_request(router, path, body):
        router.wait_for(lambda: len(router.shard.steps) > num_steps)
    wait_until_gone(router)
    counting.cancel()
    router.do(router.shard.gate.set)
    router.wait_for(lambda: not router.shard.sequences)
    assert cancelled and len(noticed) == 1
    assert max(cancelled) - noticed[0] <= 1


def test_leaving_before_the_body_is_whole(router: RunningRouter) -> None:
    before = router.metric(DROPPED)
    head = b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", router.port)) as connection:
        connection.sendall(head + b"content-length: 100\r\n\r\n{")
    count = router.service.metrics.request_failure.labels("dropped")
    router.wait_for(lambda: count._value.get() == before + 1)


def test_a_client_that_stays_is_not_dropped(router: RunningRouter) -> None:
    before = router.metric(DROPPED)
    for _ in range(5):
        assert router.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}).is_success
        assert router.post(
            "/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 2}}
        ).is_success
    assert router.metric(DROPPED) == before


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
    ],
)
def test_only_plain_json_is_read(router: RunningRouter, headers: dict[str, str], status: int) -> None:
    response = router.client.post("/tokenize", content=b'{"inputs":"a"}', headers=headers)
    assert response.status_code == status
    if status == 415:
        assert set(response.json()) == {"error", "error_type"}


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_large_body_is_refused(router: RunningRouter, is_chunked: bool) -> None:
    body = b'{"inputs":"' + b"x" * router.config.payload_limit + b'"}'
    content: Any = (
        (body[start : start + 100_000] for start in range(0, len(body), 100_000)) if is_chunked else body
    )
    response = router.client.post("/generate", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert str(router.config.payload_limit) in response.json()["error"]


def test_a_body_may_come_in_pieces(router: RunningRouter) -> None:
    pieces = (bytes([byte]) for byte in b'{"inputs":"the water"}')
    response = router.client.post("/tokenize", content=pieces, headers={"content-type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b'{"inputs":"a","parameters":{"temperature":NaN}}', b"\xff"]
)
def test_what_is_no_json(router: RunningRouter, body: bytes) -> None:
    for path in ("/generate", "/v1/chat/completions", "/invocations", "/tokenize"):
        response = router.client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert "error" in response.json()
