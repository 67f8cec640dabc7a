"""Ranges of sampling parameters, and what follows from them."""

import math

import pytest
from headrace_shard.sampling.params import SamplingParams


def test_defaults_change_nothing() -> None:
    params = SamplingParams()
    assert not params.is_greedy
    assert not params.uses_history


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 2.0),
        ("typical_p", -1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("min_new_tokens", -1),
        ("logit_bias", ((1, math.inf),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
    ],
)
def test_refuses_what_is_out_of_range(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_names_value_and_range() -> None:
    with pytest.raises(ValueError, match=r"top_p is 1\.5; it must be at least 0 and at most 1"):
        SamplingParams(top_p=1.5)


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(top_k=1), True),
        (SamplingParams(top_p=0), True),
        (SamplingParams(temperature=0, top_p=0.5), True),
        # Typical-p may take the best token away before top-p is asked.
        (SamplingParams(top_p=0, typical_p=0.5), False),
        (SamplingParams(temperature=1e-6), False),
        (SamplingParams(min_p=1), False),
    ],
)
def test_is_greedy_where_one_token_remains(params: SamplingParams, is_greedy: bool) -> None:
    assert params.is_greedy is is_greedy


def test_history_is_used_by_any_penalty() -> None:
    assert SamplingParams(repetition_penalty=1.1).uses_history
    assert SamplingParams(presence_penalty=-0.1).uses_history
    assert SamplingParams(frequency_penalty=0.1).uses_history
