"""The native face, over a real socket."""

import json
from typing import Any

import pytest

from tests.router.running import RunningRouter


def parameters(**given: Any) -> dict[str, Any]:
    return {"inputs": "the water", "parameters": given}


def test_an_answer_is_text_and_nothing_else(router: RunningRouter) -> None:
    router.says("turns the wheel")
    response = router.post("/generate", parameters(max_new_tokens=50) | {"stream": True})
    assert response.status_code == 200
    assert response.json() == {"generated_text": "turns the wheel"}
    assert response.headers["content-type"] == "application/json"


def test_headers_tell_sizes_and_times(router: RunningRouter) -> None:
    headers = router.post("/generate", parameters(max_new_tokens=3)).headers
    assert headers["x-compute-type"] == "1-cpu"
    assert headers["x-compute-characters"] == "9"
    assert headers["x-generated-tokens"] == "3"
    assert int(headers["x-prompt-tokens"]) >= 1
    assert float(headers["x-compute-time"]) > 0
    for name in ("total-time", "validation-time", "queue-time", "inference-time", "time-per-token"):
        assert headers[f"x-{name}"].isdecimal(), name
    assert "x-accel-buffering" not in headers


def test_details_have_the_order_of_keys(router: RunningRouter) -> None:
    router.says("turns")
    answer = router.post(
        "/generate", parameters(details=True, decoder_input_details=True, top_n_tokens=2)
    ).json()
    details = answer["details"]
    assert list(answer) == ["generated_text", "details"]
    assert list(details) == [
        "finish_reason",
        "generated_tokens",
        "seed",
        "prefill",
        "tokens",
        "top_tokens",
    ]
    assert details["finish_reason"] == "eos_token" and details["seed"] is None
    assert list(details["tokens"][0]) == ["id", "text", "logprob", "special"]
    assert details["tokens"][-1] == {
        "id": 2,
        "text": "<|im_end|>",
        "logprob": details["tokens"][-1]["logprob"],
        "special": True,
    }
    assert "".join(t["text"] for t in details["tokens"][:-1]) == answer["generated_text"] == "turns"
    assert [len(top) for top in details["top_tokens"]] == [2] * details["generated_tokens"]
    assert details["prefill"][0]["logprob"] is None
    assert all(token["logprob"] <= 0 for token in details["prefill"][1:])
    assert "".join(token["text"] for token in details["prefill"]) == "the water"


def test_the_root_answers_in_an_array_with_the_prompt(router: RunningRouter) -> None:
    router.says(" turns")
    assert router.post("/", parameters()).json() == [{"generated_text": "the water turns"}]
    assert router.post("/", parameters(return_full_text=False)).json() == [{"generated_text": " turns"}]
    assert router.post("/generate", parameters(return_full_text=True)).json() == {
        "generated_text": "the water turns"
    }


def test_the_root_streams_when_asked(router: RunningRouter) -> None:
    router.says(" turns")
    events = router.events("/", parameters() | {"stream": True}, is_done=False)
    assert events[-1]["generated_text"] == "the water turns"


def test_the_best_of_two_wins(router: RunningRouter) -> None:
    body = parameters(best_of=2, do_sample=True, seed=7, max_new_tokens=4, details=True)
    answer = router.post("/generate", body).json()
    details = answer["details"]
    (loser,) = details["best_of_sequences"]
    assert {details["seed"], loser["seed"]} == {7, 8}

    def mean(tokens: list[Any]) -> float:
        return float(sum(token["logprob"] for token in tokens)) / len(tokens)

    assert mean(details["tokens"]) >= mean(loser["tokens"])
    assert list(loser) == ["generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"]


def test_a_stream_has_one_event_per_token(router: RunningRouter) -> None:
    router.says("turns the wheel")
    whole = router.post("/generate", parameters(details=True)).json()
    events = router.events("/generate_stream", parameters(details=True), is_done=False)
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert list(events[0]) == ["index", "token", "generated_text", "details"]
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    assert events[-1]["generated_text"] == "turns the wheel"
    assert events[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": len(events),
        "seed": None,
        "input_length": int(events[-1]["details"]["input_length"]),
    }


def test_details_of_a_stream_only_when_asked(router: RunningRouter) -> None:
    events = router.events("/generate_stream", parameters(max_new_tokens=2, top_n_tokens=3), is_done=False)
    assert [event["details"] for event in events] == [None, None]
    assert [len(event["top_tokens"]) for event in events] == [3, 3]


def test_headers_of_a_stream(router: RunningRouter) -> None:
    headers = router.post("/generate_stream", parameters(max_new_tokens=1)).headers
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-compute-characters"] == "9"
    assert "x-total-time" not in headers and "content-length" not in headers


def test_a_stop_string_stays_and_ends_the_text(router: RunningRouter) -> None:
    router.says("turns the wheel")
    answer = router.post("/generate", parameters(stop=["s t"], details=True)).json()
    assert answer["generated_text"] == "turns t"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    events = router.events("/generate_stream", parameters(stop=["s t"]), is_done=False)
    assert "".join(event["token"]["text"] for event in events) == events[-1]["generated_text"] == "turns t"


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
def test_errors_before_the_first_token_have_a_status(router: RunningRouter, path: str) -> None:
    response = router.post(path, {"inputs": "a", "parameters": {"temperature": -1}, "stream": True})
    assert response.status_code == 422
    assert response.json() == {
        "error": "Input validation error: `temperature` must be strictly positive",
        "error_type": "validation",
    }
    assert "x-compute-type" not in response.headers


def test_characters_of_several_tokens_are_never_halved(router: RunningRouter) -> None:
    router.says("a水🌊b")
    events = router.events("/generate_stream", parameters(), is_done=False)
    assert not any("\ufffd" in json.dumps(event, ensure_ascii=False) for event in events)
    assert events[-1]["generated_text"] == "a水🌊b"
    assert "".join(event["token"]["text"] for event in events[:-1]) == "a水🌊b"
