"""A client that leaves is gone from the shard within two steps, whatever its request was doing."""

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.server import Server, running
from tests.tiny import make_checkpoint

IDLE = {
    'headrace_requests{state="running"}': 0.0,
    'headrace_requests{state="waiting"}': 0.0,
    'headrace_kv_blocks{state="used"}': 0.0,
    "headrace_shard_sequences": 0.0,
}


LONG = 20_000
"""Tokens of a prompt or an answer: a thousand steps and more, so that none ends before its client leaves."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Sixteen tokens a step, so that a prompt takes many steps, and one sequence at a time."""
    folder = tmp_path_factory.mktemp("narrow")
    model = make_checkpoint(folder / "tiny-llama", max_positions=32768)
    arguments = ["--max-batch-prefill-tokens", "16", "--max-batch-size", "1"]
    with running(folder, "--model-id", str(model), *arguments) as server:
        yield server


class Client:
    """A connection that can be cut at any moment."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        self.connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        self.socket: socket.socket = self.connection.sock

    def read_some(self) -> bytes:
        answer = self.connection.getresponse()
        assert answer.status == 200
        return answer.read1(64)

    def leave(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def leaves_within_two_steps(server: Server, client: Client) -> None:
    client.leave()
    at_departure = server.num_steps(server.metrics())
    afterwards = server.wait_metrics(IDLE)
    assert server.num_steps(afterwards) - at_departure <= 2


def completion(prompt: str | list[int], num_tokens: int, stream: bool) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": stream}


def generated(metrics: dict[str, float]) -> float:
    return metrics["headrace_generated_tokens"]


@pytest.mark.parametrize("stream", [True, False])
def test_while_decoding(narrow: Server, stream: bool) -> None:
    before = generated(narrow.metrics())
    client = Client(narrow, "/v1/completions", completion("hello", LONG, stream))
    if stream:
        client.read_some()
    narrow.wait_for(lambda found: generated(found) >= before + 2, "two tokens")
    leaves_within_two_steps(narrow, client)
    assert generated(narrow.metrics()) - before < LONG


@pytest.mark.parametrize("stream", [True, False])
def test_in_prefill(narrow: Server, stream: bool) -> None:
    before = narrow.metrics()
    client = Client(narrow, "/v1/completions", completion([5] * LONG, 8, stream))
    narrow.wait_for(lambda found: narrow.num_steps(found) >= narrow.num_steps(before) + 3, "three steps")
    leaves_within_two_steps(narrow, client)
    assert generated(narrow.metrics()) == generated(before)


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_queue(narrow: Server, stream: bool) -> None:
    runner = Client(narrow, "/v1/completions", completion("hello", LONG, True))
    runner.read_some()
    waiter = Client(narrow, "/v1/completions", completion("the sun", 8, stream))
    narrow.wait_metrics({'headrace_requests{state="waiting"}': 1})
    waiter.leave()
    found = narrow.wait_metrics({'headrace_requests{state="waiting"}': 0})
    assert found['headrace_requests{state="running"}'] == 1, "the other one goes on"
    runner.leave()
    narrow.wait_metrics(IDLE)
