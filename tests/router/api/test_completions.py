"""/v1/completions, over a real socket."""

import itertools
from typing import Any

import pytest

from tests.router.running import MODEL, RunningRouter

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "tgi", "prompt": "the water"}


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] for choice in choices)


def test_an_answer_has_the_documented_shape(router: RunningRouter) -> None:
    router.says(" turns")
    answer = router.post(PATH, BODY).json()
    assert list(answer) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["model"] == MODEL
    assert answer["choices"] == [{"index": 0, "text": " turns", "logprobs": None, "finish_reason": "stop"}]


def test_sixteen_tokens_unless_asked(router: RunningRouter) -> None:
    answer = router.post(PATH, BODY).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_choices_go_prompt_by_prompt(router: RunningRouter) -> None:
    body = BODY | {"prompt": ["the", "water"], "n": 2, "max_tokens": 2, "echo": True, "seed": 1}
    response = router.post(PATH, body)
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text.startswith("the") for text in texts] == [True, True, False, False]
    assert [text.startswith("water") for text in texts] == [False, False, True, True]
    assert answer["usage"]["completion_tokens"] == 8
    assert response.headers["x-compute-characters"] == "8"
    assert response.headers["x-generated-tokens"] == "8"
    events = router.events(
        PATH, body | {"stream": True, "stream_options": {"include_usage": True}}, is_done=True
    )
    assert events[-1]["usage"] == answer["usage"] and events[-1]["choices"] == []
    assert [text_of(events, index) for index in range(4)] == texts
    assert len({event["id"] for event in events}) == 1


def test_token_ids_are_prompts(router: RunningRouter) -> None:
    ids = router.service.tokenizer.encode("the water", add_special_tokens=False).ids
    one = router.post(PATH, BODY | {"prompt": ids, "max_tokens": 3, "temperature": 0}).json()
    text = router.post(PATH, BODY | {"max_tokens": 3, "temperature": 0}).json()
    assert one["choices"] == text["choices"]
    assert one["usage"]["prompt_tokens"] == len(ids)
    many = router.post(PATH, BODY | {"prompt": [ids, ids], "max_tokens": 3, "echo": True}).json()
    assert [choice["text"].startswith("the water") for choice in many["choices"]] == [True, True]


def test_too_many_prompts(router: RunningRouter) -> None:
    response = router.post(PATH, BODY | {"prompt": ["a"] * 5})
    assert response.status_code == 400 and "4" in response.json()["error"]["message"]
    assert router.post(PATH, BODY | {"prompt": []}).status_code == 400


def test_the_best_are_kept(router: RunningRouter) -> None:
    body = BODY | {"max_tokens": 4, "logprobs": 0, "seed": 3, "temperature": 1}
    all_four = router.post(PATH, body | {"n": 4}).json()["choices"]
    best_two = router.post(PATH, body | {"n": 2, "best_of": 4}).json()

    def mean(choice: Any) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return float(sum(logprobs) / len(logprobs))

    expected = sorted(sorted(all_four, key=mean)[2:], key=lambda choice: choice["index"])
    assert [choice["text"] for choice in best_two["choices"]] == [choice["text"] for choice in expected]
    assert best_two["usage"]["completion_tokens"] == 16


def test_legacy_logprobs(router: RunningRouter) -> None:
    router.says(" turns the")
    choice = router.post(PATH, BODY | {"logprobs": 2}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert "".join(logprobs["tokens"]) == choice["text"] == " turns the"
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)


def test_no_alternatives_for_zero(router: RunningRouter) -> None:
    logprobs = router.post(PATH, BODY | {"logprobs": 0, "max_tokens": 1}).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None and len(logprobs["token_logprobs"]) == 1


def test_a_prompt_can_be_scored(router: RunningRouter) -> None:
    body = BODY | {"echo": True, "max_tokens": 0, "logprobs": 1}
    answer = router.post(PATH, body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "the water" and choice["finish_reason"] == "length"
    assert "".join(choice["logprobs"]["tokens"]) == "the water"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in choice["logprobs"]["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("is_text", [True, False])
def test_offsets_of_a_prompt_that_was_cut(router: RunningRouter, is_text: bool) -> None:
    """The text is whole, the tokens are the last ones. Its letters repeat, and a cut may go through the ✓."""
    text = "水abab ✓abab"
    encoding = router.service.tokenizer.encode(text, add_special_tokens=False)
    assert len(encoding.ids) > len(text)
    for num_kept in range(1, len(encoding.ids) + 2):
        body: dict[str, Any] = {"prompt": text if is_text else encoding.ids, "echo": True, "max_tokens": 0}
        body |= {"logprobs": 0, "truncate_prompt_tokens": num_kept}
        (choice,) = router.post(PATH, body).json()["choices"]
        assert choice["text"] == text
        assert choice["logprobs"]["text_offset"] == [start for start, _ in encoding.offsets[-num_kept:]]


def test_a_stream_of_echo_and_logprobs(router: RunningRouter) -> None:
    router.says(" turns the")
    body = BODY | {"echo": True, "logprobs": 1, "max_tokens": 20}
    whole = router.post(PATH, body).json()["choices"][0]
    events = router.events(PATH, body | {"stream": True}, is_done=True)
    assert text_of(events) == whole["text"] == "the water turns the"
    choices = [choice for event in events for choice in event["choices"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
        assert list(itertools.chain(*parts)) == whole["logprobs"][name], name
    assert events[-1]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert all("usage" not in event for event in events)
