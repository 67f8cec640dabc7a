"""Event streams: comments in silence, errors after the start, slow readers."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from headrace_router.api import sse
from headrace_router.api.chat import _Deltas
from headrace_router.api.exchange import ClientLeft, Exchange
from headrace_router.api.sse import EventStream, frame
from headrace_router.api.tgi import NATIVE
from headrace_router.engine import Finish, Output
from headrace_router.scheduling.request import FinishReason
from starlette.types import Message

from tests.router.running import CHAT, WAIT_SECONDS, RunningRouter, raw_request

ROUTES: list[tuple[str, dict[str, Any], bool]] = [
    ("/generate_stream", {"inputs": "the water", "parameters": {"max_new_tokens": 20}}, False),
    ("/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 20}, True),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True, "max_tokens": 20}, True),
]


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    connection.settimeout(WAIT_SECONDS)
    data = b""
    while mark not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


@pytest.mark.parametrize(("path", "body", "is_openai"), ROUTES)
def test_silence_is_broken_by_comments(
    model_folder: Path, path: str, body: dict[str, Any], is_openai: bool
) -> None:
    with RunningRouter(model_folder, keep_alive_seconds=0.1) as router:
        router.do(router.shard.gate.clear)
        with raw_request(router, path, body) as connection:
            data = read_until(connection, b":\n\n")
            assert data.startswith(b"HTTP/1.1 200 OK") and b"text/event-stream" in data
            while data.count(b":\n\n") < 3:
                data += connection.recv(65536)
            assert b"data:" not in data
            router.do(router.shard.gate.set)
            data += read_until(connection, b"0\r\n\r\n")
            assert data.count(b"data: ") > 2
            # A comment after an `id:` line is an event without data to some clients.
            assert b"\nid:" not in data.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(("path", "body", "is_openai"), ROUTES)
def test_an_error_before_the_first_token_has_a_status(
    router: RunningRouter, path: str, body: dict[str, Any], is_openai: bool
) -> None:
    before = router.metric('tgi_request_failure{err="generation"}')
    router.shard.poison = lambda sequence: "the device caught fire"
    response = router.post(path, body)
    router.shard.poison = lambda sequence: None
    assert response.status_code == (500 if is_openai else 424)
    error = response.json()["error"]
    assert "the device caught fire" in (error["message"] if is_openai else error)
    assert router.metric('tgi_request_failure{err="generation"}') == before + 1


@pytest.mark.parametrize(("path", "body", "is_openai"), ROUTES)
def test_a_later_error_is_an_event(
    router: RunningRouter, path: str, body: dict[str, Any], is_openai: bool
) -> None:
    router.shard.sequence_error = lambda one: "no more" if one.num_generated == 3 else None
    router.says("a", ends=False)
    payloads = router.stream(path, body)
    router.shard.sequence_error = lambda one: None
    assert ("[DONE]" in payloads) == is_openai
    if is_openai:
        assert payloads.pop() == "[DONE]"
        error = json.loads(payloads[-1])["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert "no more" in error["message"]
    else:
        error = json.loads(payloads[-1])
        assert list(error) == ["error", "error_type"] and error["error_type"] == "generation"
    assert len(payloads) > 2


def test_a_late_reader_gets_everything_and_holds_nobody(router: RunningRouter) -> None:
    router.says("a", ends=False)
    body = {"inputs": "the water", "parameters": {"max_new_tokens": 200, "top_n_tokens": 5}}
    with raw_request(router, "/generate_stream", body) as late:
        for _ in range(3):
            assert router.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 50}}).is_success
        data = read_until(late, b"0\r\n\r\n")
    assert data.count(b"data: ") == 200
    last = json.loads(data.split(b"data: ")[-1].split(b"\n")[0])
    assert last["index"] == 200 and last["generated_text"] == "a" * 200


class SlowClient:
    """What ASGI gives an application whose client takes nothing until told to."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.takes = asyncio.Event()
        self.exchange = Exchange({"type": "http", "headers": []}, self.receive, self.send, NATIVE)

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        await self.takes.wait()
        self.sent.append(message)


def test_while_the_client_is_slow_nothing_piles_up() -> None:
    async def check() -> None:
        client = SlowClient()
        async with EventStream(client.exchange, [], keep_alive_seconds=0.01) as stream:
            writing = asyncio.create_task(stream.write(frame(b"{}")))
            await asyncio.sleep(0.05)
            assert not writing.done() and not client.exchange.is_started
            client.takes.set()
            await writing
            # Not one comment has piled up behind the event.
            assert [message["body"] for message in client.sent[1:]] == [b"data: {}\n\n"]
            while len(client.sent) < 4:
                await asyncio.sleep(0.005)
            assert client.sent[2]["body"] == client.sent[3]["body"] == b":\n\n"

    asyncio.run(check())


@pytest.mark.parametrize("is_event", [True, False])
def test_a_client_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, is_event: bool) -> None:
    monkeypatch.setattr(sse, "MAX_STALL_SECONDS", 0.02)

    async def check() -> None:
        client = SlowClient()
        with pytest.raises(ClientLeft):
            async with client.exchange.watched(), EventStream(client.exchange, [], 0.01) as stream:
                if is_event:
                    await stream.write(frame(b"{}"))
                await asyncio.Event().wait()
        assert client.sent == []

    asyncio.run(asyncio.wait_for(check(), WAIT_SECONDS))


def test_a_token_without_text_yet_is_an_event() -> None:
    """Within a character, or within what may be a stop string: one sees that the answer gets on."""
    held = Output(tokens=[], num_new=1, prompt=None, finish=None)
    deltas = _Deltas(None, with_logprobs=False)  # type: ignore[arg-type]
    role, empty = deltas.of(0, held)
    assert role.delta.role == "assistant" and empty.delta.content == ""
    (again,) = deltas.of(0, held)
    assert again.delta.content == "" and again.finish_reason is None
    end = Finish(reason=FinishReason.LENGTH, text="", num_generated=3)
    (last,) = deltas.of(0, Output(tokens=[], num_new=1, prompt=None, finish=end))
    assert last.finish_reason == "length"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stop_string_that_may_begin_is_held_back_in_events(router: RunningRouter, path: str) -> None:
    router.says("turns the wheel")
    router.shard.step_seconds = 0.05
    body = (CHAT if "chat" in path else {"prompt": "a"}) | {"stop": "turns the wheels", "max_tokens": 20}
    events = router.events(path, body | {"stream": True}, is_done=True)
    texts = [
        choice["delta"]["content"] if "chat" in path else choice["text"]
        for event in events
        for choice in event["choices"]
    ]
    assert "".join(texts) == "turns the wheel"
    # All but the last token of the text is held back until the end is known.
    assert texts.count("") >= 3
