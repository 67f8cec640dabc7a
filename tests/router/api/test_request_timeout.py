"""A request has so long from its arrival to its end: queued or running, streamed or not."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_shard import FakeSequence, made_up
from tests.router.running import CHAT, RunningRouter, raw_request

TIMEOUT_SECONDS = 1.5
"""Long enough for a first token on a machine that does much else."""

MESSAGE = (
    "Request timed out: its answer was not complete after 1.5 s, as long as this server lets one take "
    "(`--request-timeout`); ask for fewer tokens, or later"
)
OPENAI_ERROR = {"message": MESSAGE, "type": "timeout_error", "param": None, "code": "timeout"}
NATIVE_ERROR = {"error": MESSAGE, "error_type": "timeout"}

NATIVE = {"inputs": "the water", "parameters": {"max_new_tokens": 100}}
FAILURES = 'tgi_request_failure{err="timeout"}'


@pytest.fixture(scope="module")
def timed(model_folder: Path) -> Iterator[RunningRouter]:
    """One sequence runs at a time."""
    with RunningRouter(model_folder, request_timeout=TIMEOUT_SECONDS, max_batch_size=1) as router:
        yield router


@pytest.fixture
def standing(timed: RunningRouter) -> Iterator[RunningRouter]:
    """Its shard stands still; in the end nothing may be left of what has timed out."""
    timed.do(timed.shard.gate.clear)
    yield timed
    timed.wait_for(lambda: timed.service.engine.num_active == 0)
    timed.do(timed.shard.gate.set)
    timed.wait_for(lambda: not timed.shard.sequences)
    for state in ("running", "waiting"):
        assert timed.metric(f'headrace_requests{{state="{state}"}}') == 0
    answer = timed.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}})
    assert answer.status_code == 200


def test_running_and_waiting_ones_end_with_504(standing: RunningRouter) -> None:
    """All at once: the first computes its prompt, the others wait for the one place there is."""
    before = standing.metric(FAILURES), standing.metric("tgi_request_success")
    asked: list[tuple[str, Any]] = [
        ("/generate", NATIVE),
        ("/generate_stream", NATIVE),
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 100}),
    ]
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        answers[number] = standing.post(*asked[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (path, _) in enumerate(asked):
        assert answers[number].status_code == 504
        error = {"error": OPENAI_ERROR} if path.startswith("/v1") else NATIVE_ERROR
        assert answers[number].json() == error
    after = standing.metric(FAILURES), standing.metric("tgi_request_success")
    assert after == (before[0] + len(asked), before[1])


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/generate_stream", NATIVE, NATIVE_ERROR),
        (
            "/v1/chat/completions",
            CHAT | {"stream": True, "stream_options": {"include_usage": True}},
            {"error": OPENAI_ERROR},
        ),
    ],
)
def test_after_the_first_token_an_error_event_ends_the_stream(
    standing: RunningRouter, path: str, body: Any, last: Any
) -> None:
    going_on = made_up(standing.shard.vocab_size)

    def stops(sequence: FakeSequence) -> int:
        if sequence.num_generated >= 2:
            standing.shard.gate.clear()
        return going_on(sequence)

    standing.shard.answer = stops
    standing.do(standing.shard.gate.set)
    *events, error = standing.events(path, body | {"ignore_eos": True}, is_done=path.startswith("/v1"))
    assert error == last
    assert events and not any("error" in event for event in events)
    standing.shard.answer = going_on


def test_a_body_that_does_not_come_is_in_the_time(timed: RunningRouter) -> None:
    """The client has sent a part of it and waits for the answer."""
    with raw_request(timed, "/generate", NATIVE, num_missing_bytes=5) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 504 ")


def test_a_client_that_leaves_before_is_no_timeout(standing: RunningRouter) -> None:
    before = standing.metric('tgi_request_failure{err="dropped"}')
    with raw_request(standing, "/generate", NATIVE):
        standing.wait_for(lambda: standing.service.engine.num_active == 1)
    standing.wait_for(lambda: standing.service.engine.num_active == 0)
    assert standing.metric('tgi_request_failure{err="dropped"}') == before + 1


def test_who_is_in_time_hears_nothing_of_it(timed: RunningRouter) -> None:
    timed.says("turns the wheel")
    assert timed.post("/generate", NATIVE).json() == {"generated_text": "turns the wheel"}
    events = timed.events("/v1/chat/completions", CHAT | {"stream": True}, is_done=True)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    timed.shard.answer = made_up(timed.shard.vocab_size)
