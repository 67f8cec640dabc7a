"""How much of a prompt was cached, as each face tells it; salts; copies that share."""

import uuid
from typing import Any

import pytest

from tests.router.running import CHAT, RunningRouter

BLOCK = 16
PROMPT = "The water turns the wheel, and the wheel turns the stone that grinds the corn. " * 2


@pytest.fixture
def salt() -> str:
    """Of this test alone, so that nothing is cached yet."""
    return uuid.uuid4().hex


def cached(answer: Any) -> int:
    usage = answer["usage"]
    assert list(usage) == ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"]
    assert list(usage["prompt_tokens_details"]) == ["cached_tokens"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def whole_blocks(num_tokens: int) -> int:
    """What a repeated prompt finds: its last token is computed in any case."""
    return (num_tokens - 1) // BLOCK * BLOCK


def chat(salt: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return CHAT | {"messages": messages, "cache_salt": salt, "max_tokens": 2, "ignore_eos": True} | fields


def completion(salt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "cache_salt": salt, "max_tokens": 2, "ignore_eos": True} | fields


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat), ("/v1/completions", completion)])
def test_a_repeated_prompt_is_found(router: RunningRouter, salt: str, path: str, body: Any) -> None:
    hits = router.metric("headrace_prefix_cache_hit_tokens")
    first, second = router.post(path, body(salt)), router.post(path, body(salt))
    num_prompt = first.json()["usage"]["prompt_tokens"]
    assert num_prompt > 2 * BLOCK
    assert (cached(first.json()), cached(second.json())) == (0, whole_blocks(num_prompt))
    assert first.headers["x-cached-tokens"] == "0"
    assert second.headers["x-cached-tokens"] == str(whole_blocks(num_prompt))
    assert second.json()["usage"]["prompt_tokens"] == num_prompt
    assert router.metric("headrace_prefix_cache_hit_tokens") == hits + whole_blocks(num_prompt)


def test_the_native_face_says_it_in_a_header(router: RunningRouter, salt: str) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2, "cache_salt": salt}}
    first, second = router.post("/generate", body), router.post("/generate", body)
    num_prompt = int(first.headers["x-prompt-tokens"])
    assert first.headers["x-cached-tokens"] == "0"
    assert second.headers["x-cached-tokens"] == str(whole_blocks(num_prompt))
    assert first.json() == second.json()
    # Log-probabilities are of every position, so every position is computed.
    scored = {"inputs": PROMPT, "parameters": body["parameters"] | {"decoder_input_details": True}}  # type: ignore[operator]
    assert router.post("/generate", scored).headers["x-cached-tokens"] == "0"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize(("name", "value"), [("cache_salt", "a"), ("priority", -1), ("cache_salt", None)])
def test_what_stands_beside_the_parameters_is_refused(
    router: RunningRouter, path: str, name: str, value: object
) -> None:
    refused = router.post(path, {"inputs": "a", "parameters": {"max_new_tokens": 2}, name: value})
    assert refused.status_code == 422
    assert f"`{name}` has to stand in `parameters`" in refused.json()["error"]


def test_salts_and_their_absence_share_nothing(router: RunningRouter, salt: str) -> None:
    unsalted = {name: value for name, value in completion(salt).items() if name != "cache_salt"}
    unsalted["prompt"] = f"{salt} {PROMPT}"
    salted = [completion(f"{salt}-{number}", prompt=unsalted["prompt"]) for number in range(2)]
    for body in (unsalted, *salted):
        assert cached(router.post("/v1/completions", body).json()) == 0
    for body in (unsalted, *salted):
        assert cached(router.post("/v1/completions", body).json()) > 0


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat), ("/v1/completions", completion)])
def test_a_prompt_counts_once_for_all_its_copies(
    router: RunningRouter, salt: str, path: str, body: Any
) -> None:
    """The other copies share what the first computes; that was not cached before the request came."""
    first = router.post(path, body(salt, n=3))
    assert cached(first.json()) == 0
    second = router.post(path, body(salt, n=3))
    assert cached(second.json()) == whole_blocks(first.json()["usage"]["prompt_tokens"])
    assert second.headers["x-cached-tokens"] == str(cached(second.json()))


def test_several_prompts_are_added_up(router: RunningRouter, salt: str) -> None:
    lengths = []
    for prompt in ("a " + PROMPT, "b " + PROMPT):
        answer = router.post("/v1/completions", completion(salt, prompt=prompt)).json()
        lengths.append(answer["usage"]["prompt_tokens"])
    both = completion(salt, prompt=["a " + PROMPT, "b " + PROMPT], n=2)
    assert cached(router.post("/v1/completions", both).json()) == sum(map(whole_blocks, lengths))


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat), ("/v1/completions", completion)])
def test_streams_tell_it_with_the_usage(router: RunningRouter, salt: str, path: str, body: Any) -> None:
    whole = router.post(path, body(salt)).json()
    expected = whole_blocks(whole["usage"]["prompt_tokens"])
    options = {"include_usage": True}
    *events, last = router.events(path, body(salt, stream=True, stream_options=options), is_done=True)
    assert cached(last) == expected and all(event["usage"] is None for event in events)
    options = {"continuous_usage_stats": True}
    events = router.events(path, body(salt, n=2, stream=True, stream_options=options), is_done=True)
    assert {cached(event) for event in events} == {expected}


def test_the_line_in_the_log_says_it(
    router: RunningRouter, salt: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace_router")
    for _ in range(2):
        num_prompt = router.post("/v1/completions", completion(salt)).json()["usage"]["prompt_tokens"]
    lines = [record.message for record in caplog.records if record.name.endswith("request_log")]
    assert " cached_tokens=0 " in lines[0]
    assert f" cached_tokens={whole_blocks(num_prompt)} " in lines[1]
    assert salt not in caplog.text
