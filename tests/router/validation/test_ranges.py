"""Ranges and messages of single fields on both faces."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from headrace_router.errors import ModelNotFound, ValidationError
from headrace_router.scheduling.request import SamplingParams
from headrace_router.schemas.openai import SamplingRequest
from headrace_router.validation import ranges

from tests.router.validation.conftest import Front

NATIVE = [
    ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": -1}, "`best_of` must be > 0 and <= 2. Given: -1"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": -0.1}, "`temperature` must be strictly positive"),
    ({"temperature": 1e39}, "`temperature` must be >= 0.0 and <= 100000.0. Given: 1e+39"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"repetition_penalty": 1e6}, "`repetition_penalty` must be >= 1e-05 and <= 100000.0. Given: 1000000.0"),
    ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"presence_penalty": -2.1}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and <= 1.0"),
    ({"top_p": 1.1}, "`top_p` must be > 0.0 and <= 1.0"),
    ({"typical_p": 0}, "`typical_p` must be > 0.0 and <= 1.0"),
    ({"top_k": -2}, "`top_k` must be strictly positive, or 0 or -1 for none. Given: -2"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"max_new_tokens": -1}, "`max_new_tokens` must be strictly positive"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": ["a", ""]}, "`stop` cannot hold an empty string"),
    ({"stop": ""}, "`stop` cannot hold an empty string"),
    ({"stop": "a" * 5000}, "`stop` supports up to 4096 characters. Given: 5000"),
    ({"seed": -1}, "`seed` must be >= 0 and < 2**64. Given: -1"),
    ({"seed": 2**64}, f"`seed` must be >= 0 and < 2**64. Given: {2**64}"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"inputs": ""}, "`inputs` cannot be empty"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 16. Given: 0"),
    ({"truncate": 17}, "`truncate` must be strictly positive and less than 16. Given: 17"),
    ({"priority": 1001}, "`priority` must be >= -1000 and <= 1000. Given: 1001"),
    ({"priority": -1001}, "`priority` must be >= -1000 and <= 1000. Given: -1001"),
    ({"cache_salt": ""}, "`cache_salt` must have 1 to 256 characters. Given: 0"),
    ({"cache_salt": "水" * 257}, "`cache_salt` must have 1 to 256 characters. Given: 257"),
    ({"watermark": True}, "`watermark` is not supported"),
    ({"adapter_id": "no/such"}, "the adapter `no/such` does not exist"),
    ({"grammar": {"type": "regex", "value": "a"}}, "grammar is not supported"),
]


@pytest.mark.parametrize(("parameters", "message"), NATIVE)
def test_native_messages(front: Front, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, ModelNotFound)) as caught:
        front.generate(**parameters)
    assert caught.value.message == f"Input validation error: {message}"
    assert (caught.value.status, caught.value.error_type) == (422, "validation")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
    ],
)
def test_what_cannot_be_streamed(front: Front, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        front.generate(is_stream=True, **parameters)
    assert caught.value.openai_message == message


def test_the_first_mistake_in_the_order_of_tgi_is_told(front: Front) -> None:
    """Everything is wrong; what has been told is put right, one field after the other."""
    wrong: dict[str, Any] = {
        "best_of": 3,
        "temperature": -1,
        "repetition_penalty": 0,
        "frequency_penalty": 3,
        "top_p": 2,
        "typical_p": 2,
        "top_k": -5,
        "max_new_tokens": 0,
        "stop": ["a"] * 5,
        "seed": -1,
        "top_n_tokens": 6,
        "inputs": "",
        "truncate": 0,
        "priority": 5000,
        "cache_salt": "",
    }
    while wrong:
        field = next(iter(wrong))
        with pytest.raises(ValidationError, match=f"`{field}`"):
            front.generate(**wrong)
        del wrong[field]
    front.generate()


def test_best_of_can_be_forbidden(make_front: Callable[..., Front]) -> None:
    front = make_front(max_best_of=1)
    with pytest.raises(ValidationError, match="`best_of` != 1 is not allowed for this endpoint"):
        front.generate(best_of=2, do_sample=True)


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": 0},
        {"best_of": 2, "do_sample": True, "seed": 1},
        {"frequency_penalty": 2.0, "presence_penalty": -2},
        {"truncate": 16, "top_n_tokens": 5, "stop": "a"},
        {"priority": 1000, "cache_salt": "水" * 256},
        {"priority": -1000, "cache_salt": " "},
        {"watermark": False, "grammar": None, "adapter_id": None, "do_sample": None, "stop": None},
        {"stop": ["a", "b", "c", "d"], "details": True},
    ],
)
def test_native_edges_are_inside(front: Front, parameters: dict[str, Any]) -> None:
    front.generate(**parameters)


OPENAI = [
    ("temperature", 2.1),
    ("temperature", -0.1),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("min_p", 1.1),
    ("typical_p", 0),
    ("top_k", -2),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("repetition_penalty", 0),
    ("n", 0),
    ("n", 17),
    ("stop", ["a"] * 5),
    ("stop", ""),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("min_tokens", -1),
    ("priority", 1001),
    ("priority", -1001),
    ("cache_salt", ""),
    ("cache_salt", "a" * 257),
    ("stop_token_ids", [400]),
    ("stop_token_ids", [-1]),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", 17),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {" 1": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"400": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": -100.5}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("response_format", {"type": "json_object"}),
]
CHAT = [
    ("top_logprobs", 1),
    ("max_completion_tokens", 0),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("audio", {}),
]
COMPLETIONS = [
    ("logprobs", 21),
    ("logprobs", -1),
    ("best_of", 0),
    ("best_of", 17),
    ("suffix", "x"),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [400]),
    ("prompt", [-1]),
    ("prompt", [[]]),
    ("prompt", ["a"] * 5),
]


@pytest.mark.parametrize(("field", "value"), [*OPENAI, *CHAT])
def test_chat_ranges(front: Front, field: str, value: Any) -> None:
    check_refused(lambda: front.chat(**{field: value}), field)


@pytest.mark.parametrize(("field", "value"), [*OPENAI, *COMPLETIONS])
def test_completion_ranges(front: Front, field: str, value: Any) -> None:
    check_refused(lambda: front.completions(**{field: value}), field)


def check_refused(ask: Callable[[], object], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ask()
    assert caught.value.openai_status == 400 and caught.value.param == field
    assert field in caught.value.openai_message or "prompts" in caught.value.openai_message
    assert "Input validation error" not in caught.value.openai_message
    assert len(caught.value.openai_message) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2, "top_p": 0, "min_p": 1, "typical_p": 1, "top_k": -1, "n": 16},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"logit_bias": {"0": -100, "399": 100}, "stop_token_ids": [0, 399]},
        {"temperature": None, "stop": None, "n": None, "seed": None, "logit_bias": None, "logprobs": None},
        {"presence_penalty": 0, "truncate_prompt_tokens": 16, "min_tokens": 0},
    ],
)
def test_openai_edges_are_inside(front: Front, fields: dict[str, Any]) -> None:
    front.chat(**fields)
    front.completions(**fields)


def test_fields_that_contradict_each_other(front: Front) -> None:
    with pytest.raises(ValidationError, match="differ"):
        front.chat(max_tokens=1, max_completion_tokens=2)
    assert front.chat(max_tokens=2, max_completion_tokens=2).request.max_new_tokens == 2
    with pytest.raises(ValidationError, match="top_logprobs"):
        front.chat(logprobs=True, top_logprobs=21)
    with pytest.raises(ValidationError, match="`best_of` must be at least `n`"):
        front.completions(n=3, best_of=2)
    with pytest.raises(ValidationError, match="cannot be streamed"):
        front.completions(n=1, best_of=2, stream=True)
    front.completions(n=2, best_of=2, stream=True)
    with pytest.raises(ValidationError, match="min_tokens"):
        front.completions(max_tokens=2, min_tokens=3)


def test_what_is_no_number_is_outside(front: Front) -> None:
    """JSON has no NaN, but a range must not depend on that."""
    nan = float("nan")
    for name in ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty"):
        body = msgspec.structs.replace(SamplingRequest(), **{name: nan})
        with pytest.raises(ValidationError, match=name):
            ranges.check_openai(body, front.config, front.limits or pytest.fail())


# ---- what the values mean


def params(job: Any) -> SamplingParams:
    found: SamplingParams = job.request.sampling
    return found


def test_native_default_is_sampling_without_parameters_and_greedy_with(front: Front) -> None:
    assert params(front.sampled()).temperature == 1.0
    assert params(front.generate()).temperature == 0.0


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"do_sample": False}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 1.0}, 0.0),
        ({"temperature": 0, "do_sample": True}, 0.0),
        ({"temperature": 1e-9}, 0.0),
        ({"top_k": 5}, 1.0),
        ({"top_k": 0}, 0.0),
        ({"top_k": -1}, 0.0),
        ({"top_p": 0.5}, 1.0),
        ({"top_p": 1.0}, 0.0),
        ({"typical_p": 0.5}, 1.0),
        ({"typical_p": 1.0}, 0.0),
        ({"seed": 5}, 0.0),
        ({"repetition_penalty": 1.2}, 0.0),
    ],
)
def test_native_sampling_is_asked_for(front: Front, parameters: dict[str, Any], temperature: float) -> None:
    assert params(front.generate(**parameters)).temperature == temperature


def test_parameters_reach_the_request(front: Front) -> None:
    found = params(
        front.generate(
            temperature=0.5,
            top_k=7,
            top_p=0.9,
            typical_p=0.8,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            seed=2**64 - 1,
        )
    )
    assert found == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        typical_p=0.8,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        seed=2**64 - 1,
    )
    found = params(front.chat(temperature=0.5, min_p=0.1, logit_bias={"5": -1, "7": 2.5}, seed=-1))
    assert found == SamplingParams(
        temperature=0.5, min_p=0.1, logit_bias=((5, -1.0), (7, 2.5)), seed=2**64 - 1
    )


def test_greedy_keeps_penalties_and_drops_filters(front: Front) -> None:
    found = params(
        front.chat(temperature=0, top_p=0.5, top_k=3, min_p=0.2, typical_p=0.5, presence_penalty=1, seed=1)
    )
    assert found == SamplingParams(temperature=0.0, presence_penalty=1.0, seed=1)


def test_openai_samples_by_default(front: Front) -> None:
    assert params(front.chat()).temperature == params(front.completion()).temperature == 1.0


def test_the_narrowest_top_p_is_the_top_token(front: Front) -> None:
    for top_p in (0, 1e-30):
        found = params(front.chat(top_p=top_p))
        assert (found.top_k, found.top_p) == (1, 1.0)


def test_a_top_k_of_the_whole_vocabulary_is_off(front: Front) -> None:
    assert params(front.chat(top_k=10**30)).top_k == 0
    assert params(front.chat(top_k=399)).top_k == 399


def test_seeds_are_drawn_where_none_is_given(front: Front) -> None:
    seeds = {params(front.generate(do_sample=True)).seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**53 - 16 for seed in seeds)
    assert params(front.generate(seed=0)).seed == 0
