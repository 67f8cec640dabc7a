"""Bodies of the OpenAI face: what is read, refused by name or without effect; the shape of answers."""

import json
from typing import Any

import msgspec
import pytest
from headrace_router.errors import ValidationError
from headrace_router.schemas import openai
from headrace_router.schemas.decode import decode

USAGE = openai.Usage(
    prompt_tokens=1,
    completion_tokens=2,
    total_tokens=3,
    prompt_tokens_details=openai.PromptTokensDetails(cached_tokens=0),
)
HEAD: dict[str, Any] = {"id": "x", "created": 1, "model": "m", "system_fingerprint": "f"}


def encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


def chat(**fields: Any) -> openai.ChatRequest:
    return decode(json.dumps({"messages": []} | fields).encode(), openai.ChatRequest)


def completion(**fields: Any) -> openai.CompletionRequest:
    return decode(json.dumps({"prompt": "a"} | fields).encode(), openai.CompletionRequest)


def message(**fields: Any) -> dict[str, Any]:
    body = chat(messages=[{"role": "user"} | fields])
    return body.messages[0].to_template("messages[0]")


def test_a_chat_answer() -> None:
    choice = openai.ChatChoice(
        index=0, message=openai.AssistantMessage(content="hi"), logprobs=None, finish_reason="stop"
    )
    assert encoded(openai.ChatCompletion(**HEAD, choices=[choice], usage=USAGE)) == (
        '{"object":"chat.completion","id":"x","created":1,"model":"m","system_fingerprint":"f","choices":'
        '[{"index":0,"message":{"role":"assistant","content":"hi","refusal":null},"logprobs":null,'
        '"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,'
        '"prompt_tokens_details":{"cached_tokens":0}}}'
    )


def test_chunks_have_a_usage_only_when_asked() -> None:
    choice = openai.ChunkChoice(index=0, delta=openai.Delta(role="assistant", content=""))
    chunk = openai.ChatCompletionChunk(**HEAD, choices=[choice])
    assert encoded(chunk) == (
        '{"object":"chat.completion.chunk","id":"x","created":1,"model":"m","system_fingerprint":"f",'
        '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        '"finish_reason":null}]}'
    )
    chunk.usage = None
    assert encoded(chunk).endswith('"usage":null}')
    assert encoded(openai.Delta()) == "{}"


def test_a_completion_and_its_log_probabilities() -> None:
    logprobs = openai.CompletionLogprobs(
        tokens=["a"], token_logprobs=[None], top_logprobs=[None], text_offset=[0]
    )
    choice = openai.CompletionChoice(index=0, text="a", logprobs=logprobs)
    answer = encoded(openai.Completion(**HEAD, choices=[choice]))
    assert answer.startswith('{"object":"text_completion","id":"x"') and "usage" not in answer
    assert '"token_logprobs":[null],"top_logprobs":[null],"text_offset":[0]' in answer


def test_models_and_errors() -> None:
    model = openai.Model(id="m", created=0, owned_by="m")
    assert encoded(openai.ModelList(data=[model])) == (
        '{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"m"}]}'
    )
    error = openai.Error(message="no", type="t", param=None, code=None)
    assert encoded(openai.ErrorResponse(error=error)) == (
        '{"error":{"message":"no","type":"t","param":null,"code":null}}'
    )


def test_messages_as_templates_know_them() -> None:
    assert message(content="a") == {"role": "user", "content": "a"}
    assert message(content="") == {"role": "user", "content": ""}
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert message(content=parts, name="Ann") == {"role": "user", "content": "a b", "name": "Ann"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert message(role="assistant", content=None, tool_calls=[call]) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
    }
    assert message(role="assistant", content="", tool_calls=[call])["tool_calls"] == [call]
    assert message(role="tool", content="x", tool_call_id="1")["tool_call_id"] == "1"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "content"),
        ({"content": None}, "content"),
        ({"content": None, "tool_calls": []}, "content"),
        ({"content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "image_url"),
        ({"content": [{"type": "input_audio"}]}, "input_audio"),
        ({"content": [{"type": "text"}]}, r"content\[0\].text"),
        ({"content": None, "function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_messages_that_cannot_be_shown_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        message(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "yaml"}},
        {"grammar": {"type": "regex", "value": "a"}},
        {"guided_json": {}},
        {"guided_regex": "a"},
        {"guided_choice": ["a"]},
        {"guided_grammar": "a"},
        {"structured_outputs": {"regex": "a"}},
        {"functions": []},
        {"function_call": "auto"},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"prediction": {"type": "content"}},
        {"web_search_options": {}},
        {"reasoning_effort": "low"},
        {"verbosity": "low"},
    ],
)
def test_what_would_change_the_answer_is_named(fields: dict[str, Any]) -> None:
    assert chat(**fields).unsupported() == next(iter(fields))


def test_what_asks_for_nothing_is_accepted() -> None:
    fields = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    assert chat(**fields).unsupported() is None
    assert chat(**dict.fromkeys(fields)).unsupported() is None
    assert completion(suffix="x").unsupported() == "suffix"
    assert completion(response_format={"type": "json_object"}).unsupported() == "response_format"
    assert completion().unsupported() is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([""], [""]),
    ],
)
def test_prompts_of_every_kind(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], [[1], "a"]])
def test_prompts_of_mixed_kinds_are_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError, match="prompt"):
        completion(prompt=prompt).prompts()


@pytest.mark.parametrize("prompt", [None, 5, [1.5], [True], {"a": 1}, [[1.0]], [["a"]]])
def test_prompts_of_other_kinds_are_no_prompts(prompt: Any) -> None:
    with pytest.raises(ValidationError, match="prompt"):
        completion(prompt=prompt)


@pytest.mark.parametrize(
    ("model_id", "short"),
    [
        ("HuggingFaceTB/SmolLM2-360M-Instruct", "SmolLM2-360M-Instruct"),
        ("/models/small/", "small"),
        ("a", "a"),
    ],
)
def test_the_last_part_of_an_id_is_a_name_of_the_model(model_id: str, short: str) -> None:
    assert openai.base_model_names(model_id) == {"tgi", "dummy", short}
