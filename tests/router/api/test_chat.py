"""/v1/chat/completions, over a real socket."""

from typing import Any

import pytest

from tests.router.running import CHAT, MODEL, RunningRouter

PATH = "/v1/chat/completions"


def contents(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_an_answer_has_the_documented_shape(router: RunningRouter) -> None:
    router.says("turns the wheel")
    response = router.post(PATH, CHAT)
    answer = response.json()
    assert list(answer) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["created"] > 1_600_000_000 and answer["model"] == MODEL
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["logprobs"] is None and choice["finish_reason"] == "stop"
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "turns the wheel"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert response.headers["x-generated-tokens"] == str(usage["completion_tokens"])
    assert response.headers["x-prompt-tokens"] == str(usage["prompt_tokens"])


def test_several_choices_have_seeds_of_their_own(router: RunningRouter) -> None:
    body = CHAT | {"n": 3, "seed": 5, "max_tokens": 6}
    answer = router.post(PATH, body).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 18
    alone = router.post(PATH, CHAT | {"seed": 6, "max_tokens": 6}).json()
    assert alone["choices"][0]["message"]["content"] == texts[1]
    assert alone["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_stream_opens_with_the_role_and_ends_with_the_reason(router: RunningRouter) -> None:
    router.says("turns the wheel")
    events = router.events(PATH, CHAT | {"stream": True}, is_done=True)
    first, *middle, last = events
    assert list(first) == ["object", "id", "created", "model", "system_fingerprint", "choices"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert first["choices"][0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:])
    assert all(event["choices"][0]["finish_reason"] is None for event in middle)
    assert last["choices"][0]["finish_reason"] == "stop" and last["choices"][0]["delta"] == {"content": ""}
    assert contents(events) == "turns the wheel"


def test_choices_of_a_stream_are_interleaved(router: RunningRouter) -> None:
    body = CHAT | {"n": 2, "seed": 5, "max_tokens": 5}
    whole = router.post(PATH, body).json()
    events = router.events(
        PATH, body | {"stream": True, "stream_options": {"include_usage": True}}, is_done=True
    )
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)
    for index in (0, 1):
        assert contents(events, index) == whole["choices"][index]["message"]["content"]
    order = [event["choices"][0]["index"] for event in events]
    assert order not in (sorted(order), sorted(order, reverse=True))


def test_logprobs_are_those_of_the_text(router: RunningRouter) -> None:
    router.says("a水b")
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    choice = router.post(PATH, body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert list(content[0]) == ["token", "logprob", "bytes", "top_logprobs"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"] == "a水b"
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "a水b"
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert all(token["token"] == token["top_logprobs"][0]["token"] for token in content)
    events = router.events(PATH, body | {"stream": True}, is_done=True)
    streamed = [
        token
        for event in events
        if (logprobs := event["choices"][0]["logprobs"])
        for token in logprobs["content"]
    ]
    assert streamed == content


def test_no_alternatives_unless_asked(router: RunningRouter) -> None:
    choice = router.post(PATH, CHAT | {"logprobs": True, "max_tokens": 1}).json()["choices"][0]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[]]


@pytest.mark.parametrize("stop", ["s t", ["s t"]])
def test_a_stop_string_is_never_shown(router: RunningRouter, stop: Any) -> None:
    router.says("turns the wheel")
    body = CHAT | {"stop": stop, "logprobs": True}
    choice = router.post(PATH, body).json()["choices"][0]
    assert choice["message"]["content"] == "turn" and choice["finish_reason"] == "stop"
    assert "".join(token["token"] for token in choice["logprobs"]["content"]) == "turn"
    events = router.events(PATH, body | {"stream": True}, is_done=True)
    assert contents(events) == "turn"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_length_is_a_reason(router: RunningRouter) -> None:
    choice = router.post(PATH, CHAT | {"max_tokens": 3}).json()["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("asked", ["tgi", "dummy", MODEL, None])
def test_names_of_the_model(router: RunningRouter, asked: str | None) -> None:
    answer = router.post(PATH, CHAT | {"model": asked, "max_tokens": 1}).json()
    assert answer["model"] == MODEL


@pytest.mark.parametrize("is_stream", [False, True])
def test_errors_are_in_the_envelope(router: RunningRouter, is_stream: bool) -> None:
    response = router.post(PATH, CHAT | {"top_p": 2, "stream": is_stream})
    error = response.json()["error"]
    assert response.status_code == 400
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error" and error["param"] == "top_p"
    assert "top_p" in error["message"] and not error["message"].startswith("Input validation error")

    response = router.post(PATH, CHAT | {"model": "no/such", "stream": is_stream})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"

    response = router.post(PATH, CHAT | {"max_tokens": 5000, "stream": is_stream})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["message"].startswith("This model's maximum context length is 256 tokens")


def test_nulls_are_absent(router: RunningRouter) -> None:
    names = ("temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "logprobs", "tools")
    response = router.post(PATH, CHAT | dict.fromkeys(names) | {"max_tokens": 1})
    assert response.status_code == 200, response.text


def test_usage_in_every_event_when_asked(router: RunningRouter) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    body = CHAT | {"n": 2, "max_tokens": 5, "stream": True}
    events = router.events(PATH, body | {"stream_options": options}, is_done=True)
    told = [event["usage"]["completion_tokens"] for event in events]
    assert told == sorted(told) and told[0] < told[-1] == 10
    assert events[-1]["choices"] == [] and events[-1]["usage"] == events[-2]["usage"]
    events = router.events(PATH, body | {"stream_options": {"continuous_usage_stats": True}}, is_done=True)
    assert events[-1]["choices"] and events[-1]["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        (
            {"stream_options": {"include_obfuscation": True}, "stream": True},
            "stream_options.include_obfuscation",
        ),
    ],
)
def test_stream_options_that_cannot_be_met(router: RunningRouter, fields: Any, param: str) -> None:
    for path, body in ((PATH, CHAT), ("/v1/completions", {"prompt": "a"})):
        response = router.post(path, body | fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
