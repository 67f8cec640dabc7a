"""Whatever a client sends, the answer is an error of its face, and the server lives."""

import contextlib
from typing import Any

import pytest

from tests.end_to_end.server import Server, generate

JSON = {"content-type": "application/json"}

NATIVE: list[tuple[Any, int, str]] = [
    (b"{", 400, ""),
    (b"", 400, ""),
    (b"\xff\xfe", 400, ""),
    (b"[]", 422, ""),
    ({}, 422, "inputs"),
    ({"inputs": 5}, 422, "inputs"),
    ({"inputs": ""}, 422, "inputs"),
    (b'{"inputs": "\\ud800"}', 422, "surrogate"),
    ({"inputs": "hello " * 5000}, 422, "tokens"),
    ({"inputs": "hi", "parameters": {"max_new_tokens": 0}}, 422, "max_new_tokens"),
    ({"inputs": "hi", "parameters": {"max_new_tokens": 10**7}}, 422, "max_new_tokens"),
    ({"inputs": "hi", "parameters": {"top_p": 2}}, 422, "top_p"),
    ({"inputs": "hi", "parameters": {"top_k": "x"}}, 422, "top_k"),
    ({"inputs": "hi", "parameters": {"temperature": -1}}, 422, "temperature"),
    ({"inputs": "hi", "parameters": {"watermark": True}}, 422, "watermark"),
    ({"inputs": "hi", "parameters": {"grammar": {"type": "regex", "value": "a"}}}, 422, "grammar"),
    ({"inputs": "hi", "parameters": {"adapter_id": "nobody"}}, 422, "nobody"),
]

OPENAI: list[tuple[str, Any, int, str]] = [
    ("completions", b"{", 400, ""),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": [10**6]}, 400, "1000000"),
    ("completions", {"prompt": [-1]}, 400, "prompt"),
    ("completions", {"prompt": "hi", "suffix": "x"}, 400, "suffix"),
    ("completions", {"prompt": "hi", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("completions", {"prompt": "hi", "logit_bias": {"999999": 1}}, 400, "999999"),
    ("completions", {"prompt": "hi", "max_tokens": 10**7}, 400, "maximum context length"),
    ("completions", {"prompt": "hi", "n": 100}, 400, "n"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"content": "hi"}]}, 400, "role"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2},
        400,
        "logprobs",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "model": "none"}, 404, "none"),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        400,
        "tools",
    ),
]


@pytest.fixture(autouse=True)
def lives(server: Server) -> Any:
    yield
    assert generate(server, "hello", max_new_tokens=2)["details"]["generated_tokens"] == 2


def send(server: Server, path: str, body: Any) -> Any:
    if isinstance(body, bytes):
        return server.client.post(path, content=body, headers=JSON)
    return server.client.post(path, json=body)


@pytest.mark.parametrize(("body", "status", "word"), NATIVE)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_native(server: Server, path: str, body: Any, status: int, word: str) -> None:
    answer = send(server, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert set(error) == {"error", "error_type"} and word in error["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status", "word"), OPENAI)
def test_openai(server: Server, path: str, body: Any, status: int, word: str, stream: bool) -> None:
    if isinstance(body, dict):
        body = body | {"stream": stream}
    answer = send(server, f"/v1/{path}", body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and word in error["message"]


def test_too_many_at_once_get_429(server: Server) -> None:
    """128 fit by default; whoever comes on top is told when to come back."""
    body = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "n": 16, "stream": True}
    with contextlib.ExitStack() as open_streams:
        for _ in range(8):
            answer = open_streams.enter_context(server.client.stream("POST", "/v1/completions", json=body))
            assert answer.status_code == 200
        refused = server.client.post("/generate", json={"inputs": "hello"})
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert refused.json()["error_type"] == "overloaded"
    server.wait_metrics({'headrace_requests{state="running"}': 0})
