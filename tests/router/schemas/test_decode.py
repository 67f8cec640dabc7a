"""What of a body is refused, and how the message names the place."""

import json
from typing import Any

import msgspec
import pytest
from headrace_router.errors import BadRequest, ValidationError
from headrace_router.schemas.decode import MAX_DEPTH, decode
from headrace_router.schemas.openai import ChatRequest
from headrace_router.schemas.tgi import GenerateRequest


def generate(parameters: dict[str, Any]) -> GenerateRequest:
    return decode(json.dumps({"inputs": "a", "parameters": parameters}).encode(), GenerateRequest)


def test_unknown_keys_are_ignored_and_null_is_absent() -> None:
    body = b'{"inputs": "a", "bogus": {"x": 1}, "parameters": {"bogus": 1, "top_k": null}}'
    assert decode(body, GenerateRequest) == decode(b'{"inputs":"a","parameters":{}}', GenerateRequest)
    assert decode(b'{"inputs":"a","parameters":null}', GenerateRequest).parameters is None


def test_floats_take_integers_and_integers_no_floats() -> None:
    parameters = generate({"temperature": 1}).parameters
    assert parameters is not None and parameters.temperature == 1.0
    for wrong in (1.0, "1", True):
        with pytest.raises(ValidationError, match="top_k"):
            generate({"top_k": wrong})
    for wrong in ("1", True):
        with pytest.raises(ValidationError, match="temperature"):
            generate({"temperature": wrong})


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"{}", "`inputs` is required", "inputs"),
        (b'{"inputs": 5}', "`inputs` is of the wrong type: expected `str`, got `int`", "inputs"),
        (b'{"inputs": ["a"]}', "`inputs` is of the wrong type: expected `str`, got `array`", "inputs"),
        (
            b'{"inputs": "a", "parameters": {"top_k": "x"}}',
            "`parameters.top_k` is of the wrong type: expected `int`, got `str`",
            "parameters.top_k",
        ),
        (
            b'{"inputs": "a", "parameters": {"stop": ["a", 1]}}',
            "`parameters.stop[1]` is of the wrong type: expected `str`, got `int`",
            "parameters.stop[1]",
        ),
        (b"[]", "the body is of the wrong shape: expected `object`, got `array`", None),
        (
            b'{"inputs": "a", "parameters": {"temperature": 1e999}}',
            "`parameters.temperature` is of the wrong type: number out of range",
            "parameters.temperature",
        ),
    ],
)
def test_a_wrong_shape_names_the_field(body: bytes, message: str, param: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        decode(body, GenerateRequest)
    assert caught.value.message == f"Input validation error: {message}"
    assert caught.value.openai_message == message
    assert caught.value.param == param


def test_a_field_inside_a_list_is_found() -> None:
    with pytest.raises(ValidationError) as caught:
        decode(b'{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}', ChatRequest)
    assert caught.value.openai_message == "`messages[1].role` is required"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"inputs": "a"',
        b'{"inputs": "a"} x',
        b'{"inputs": 5',
        b'{"inputs": "a", "parameters": {"temperature": NaN}}',
        b'{"inputs": "a", "parameters": {"temperature": Infinity}}',
        b"\xff\xfe",
        b'{"inputs": "\xff"}',
        b'{"inputs": "\xed\xa0\xbd"}',
        b"{'inputs': 'a'}",
    ],
)
def test_what_is_no_json_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest, match="as JSON"):
        decode(body, GenerateRequest)


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ud83d x", r"\ud83dA", r"\uD83D\ud83d"])
@pytest.mark.parametrize("key", ["inputs", "bogus"])
def test_half_a_surrogate_pair_is_refused(half: str, key: str) -> None:
    with pytest.raises(ValidationError, match="surrogate"):
        decode(f'{{"inputs": "a", "{key}": "{half}"}}'.encode(), GenerateRequest)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert decode(rb'{"inputs": "\ud83d\ude00"}', GenerateRequest).inputs == "😀"


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_depth_is_bounded(opening: str, closing: str) -> None:
    def body(depth: int) -> bytes:
        return f'{{"inputs": "a", "deep": {opening * (depth - 1)}1{closing * (depth - 1)}}}'.encode()

    decode(body(MAX_DEPTH), GenerateRequest)
    with pytest.raises(BadRequest, match="nested too deeply"):
        decode(body(MAX_DEPTH + 1), GenerateRequest)


def test_brackets_in_strings_are_no_depth() -> None:
    text = '[{"\\' * 1000
    assert decode(json.dumps({"inputs": text}).encode(), GenerateRequest).inputs == text


@pytest.mark.parametrize(
    "body", [b"[" * 10**6, b'"' + b'\\"' * 10**6 + b"[" * 200, b'"' * 10**6 + b"[" * 200]
)
def test_bodies_made_to_take_long_do_not(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decode(body, GenerateRequest)


def test_huge_numbers_are_refused_where_they_are_read() -> None:
    digits = "9" * 5000
    for name in ("seed", "temperature", "grammar"):
        with pytest.raises(ValidationError, match="out of range"):
            decode(f'{{"inputs": "a", "parameters": {{"{name}": {digits}}}}}'.encode(), GenerateRequest)


def test_types_of_the_standard_library_decode_too() -> None:
    assert set(decode(b'{"inputs": "a", "x": [1]}', dict[str, msgspec.Raw])) == {"inputs", "x"}
