"""Chunking: how many prompt tokens the decodes can bear, and who gets them."""

import math

from headrace_router.scheduling.chunking import LIMIT, MAX_MIXED, TARGET, StepCosts, shares
from headrace_router.scheduling.request import Sequence
from hypothesis import given
from hypothesis import strategies as st

from tests.router.scheduling.simulation import request_of

COSTS = ((1, 0.010), (64, 0.020), (512, 0.100))


def _costs(costs: tuple[tuple[int, float], ...] = COSTS, max_slowdown: float = 3.0) -> StepCosts:
    return StepCosts(costs, max_slowdown, min_tokens=16)


def _seconds(num_tokens: float) -> float:
    """The line through `COSTS`."""
    if num_tokens <= 64:
        return 0.010 + 0.010 * (num_tokens - 1) / 63
    return 0.020 + 0.080 * (num_tokens - 64) / 448


def test_without_decodes_or_without_a_bound_the_budget_is_the_bound() -> None:
    assert _costs().max_prompt_tokens(0, 512) == 512
    assert _costs(max_slowdown=0).max_prompt_tokens(4, 508) == 508


def test_a_step_with_prompts_takes_at_most_so_many_times_as_long() -> None:
    for num_decodes in (1, 4, 40, 200):
        num_tokens = _costs().max_prompt_tokens(num_decodes, 10_000)
        bound = TARGET * 3.0 * _seconds(num_decodes)
        assert _seconds(num_decodes + num_tokens) <= bound < _seconds(num_decodes + num_tokens + 1)


def test_a_block_is_always_allowed_and_the_budget_never_exceeded() -> None:
    assert _costs(max_slowdown=1.0).max_prompt_tokens(1, 511) == 16
    assert _costs(max_slowdown=1.0).max_prompt_tokens(500, 12) == 12
    assert _costs(max_slowdown=100.0).max_prompt_tokens(1, 511) == 511


def test_what_steps_really_take_is_followed() -> None:
    costs = _costs()
    at_first = costs.max_prompt_tokens(4, 10_000)
    # Prompts come to cost half as much again as warm-up found: long contexts.
    for _ in range(20):
        costs.observe(5, 104, 1.5 * _seconds(104))
    slower = costs.max_prompt_tokens(4, 10_000)
    assert _seconds(4 + slower) * 1.5 <= TARGET * 3.0 * _seconds(4) * 1.01
    assert 16 < slower < at_first
    # Then decodes do as well.
    for _ in range(20):
        costs.observe(4, 4, 1.5 * _seconds(4))
    assert abs(costs.max_prompt_tokens(4, 10_000) - at_first) <= 1


def test_one_step_that_takes_long_changes_nothing() -> None:
    costs = _costs()
    usual = costs.max_prompt_tokens(4, 10_000)
    for is_decode in (True, False):
        for _ in range(3):
            costs.observe(4, 4 if is_decode else 104, _seconds(4 if is_decode else 104))
        costs.observe(4, 4 if is_decode else 104, 10.0)
        assert costs.max_prompt_tokens(4, 10_000) == usual


def test_decodes_are_measured_by_the_median_of_many() -> None:
    costs = _costs()
    usual = costs.max_seconds(4)
    for _ in range(31):
        costs.observe(4, 4, _seconds(4))
    # Half of the last ones take long, in whatever order: that is no new normal.
    for _ in range(15):
        costs.observe(4, 4, 5 * _seconds(4))
        assert math.isclose(costs.max_seconds(4), usual)
    # One more, and it is, at once.
    costs.observe(4, 4, 5 * _seconds(4))
    assert math.isclose(costs.max_seconds(4), 5 * usual)


def test_decodes_alone_are_measured_again_once_in_a_while() -> None:
    costs = _costs()
    for _ in range(MAX_MIXED):
        assert costs.max_prompt_tokens(4, 10_000) > 0
        costs.observe(5, 104, 2 * _seconds(104))
    before = costs.max_prompt_tokens(0, 512)
    assert (before, costs.max_prompt_tokens(4, 10_000)) == (512, 0)
    # The decodes' contexts have grown as well: so much more is allowed again.
    for _ in range(3):
        costs.observe(4, 4, 8 * _seconds(4))
    costs.observe(5, 104, 2 * _seconds(104))
    assert costs.max_prompt_tokens(4, 10_000) > _costs().max_prompt_tokens(4, 10_000)


def test_without_a_warm_up_the_first_steps_tell() -> None:
    costs = _costs(())
    assert costs.max_prompt_tokens(4, 508) == 508
    costs.observe(4, 4, 0.010)
    # Prompts were not seen yet: as if a token of theirs took as long as one of a decode. 40 decodes take as
    # long as 40 tokens, so 94 are aimed at.
    assert 53 <= costs.max_prompt_tokens(40, 472) <= 54
    costs.observe(5, 20, 0.011)
    # 4 decodes take 10 ms, 23.4 ms are aimed at, and a token takes 0.55 ms.
    assert costs.max_prompt_tokens(4, 508) == 42 - 4


def test_when_no_step_is_of_decodes_alone_those_with_prompts_tell() -> None:
    costs = _costs(())
    costs.observe(41, 512, 0.3)
    assert 53 <= costs.max_prompt_tokens(40, 472) <= 54


def test_times_that_were_not_measured_or_fall_teach_nothing() -> None:
    costs = _costs()
    before = costs.max_prompt_tokens(4, 508)
    costs.observe(4, 4, 0.0)
    assert costs.max_prompt_tokens(4, 508) == before
    fallen = _costs(((1, 0.010), (32, 0.009), (64, 0.020), (64, 0.030), (128, 0.015), (512, 0.100)))
    assert fallen.max_prompt_tokens(4, 508) == before


# ---- when a step is cut short


def test_the_limit_is_a_share_of_the_bound_and_above_what_is_aimed_at() -> None:
    costs = _costs()
    for num_decodes in (1, 4, 40, 200):
        seconds = costs.max_seconds(num_decodes)
        assert math.isclose(seconds, LIMIT * 3.0 * _seconds(num_decodes))
        num_tokens = num_decodes + costs.max_prompt_tokens(num_decodes, 10_000)
        assert _seconds(num_tokens) < seconds < 3.0 * _seconds(num_decodes)


def test_no_step_is_cut_short_without_a_bound_or_before_decodes_were_measured() -> None:
    without_bound = _costs(max_slowdown=0)
    without_bound.observe(4, 4, 0.010)
    assert without_bound.max_seconds(4) == 0
    costs = _costs(())
    assert costs.max_seconds(4) == 0
    # What comes with prompts in it bounds the prompts beside decodes, but is no measure for a limit.
    costs.observe(5, 104, 0.010)
    assert costs.max_seconds(4) == 0
    costs.observe(4, 4, 0.010)
    assert math.isclose(costs.max_seconds(4), LIMIT * 3.0 * 0.010)
    assert math.isclose(costs.max_seconds(8), LIMIT * 3.0 * 0.020)


def test_the_limit_follows_decodes_alone() -> None:
    costs = _costs()
    usual = costs.max_seconds(4)
    for _ in range(20):
        costs.observe(5, 104, 2 * _seconds(104))
    assert costs.max_seconds(4) == usual
    for _ in range(20):
        costs.observe(4, 4, 2 * _seconds(4))
    assert math.isclose(costs.max_seconds(4), 2 * usual)


@given(
    costs=st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 10)), max_size=6),
    steps=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 500), st.floats(0, 10)), max_size=20),
    num_decodes=st.integers(0, 512),
    budget=st.integers(0, 5000),
    first=st.floats(1e-6, 1),
)
def test_any_costs_give_a_bound(
    costs: list[tuple[int, float]],
    steps: list[tuple[int, int, float]],
    num_decodes: int,
    budget: int,
    first: float,
) -> None:
    # A warm-up begins with one decode.
    model = _costs(((1, first), *costs))
    for num_sequences, more, seconds in steps:
        model.observe(num_sequences, num_sequences + more, seconds)
    assert min(16, budget) <= model.max_prompt_tokens(num_decodes, budget) <= budget
    assert 0 <= model.max_seconds(max(num_decodes, 1)) < math.inf


# ---- shares


def _prompts(*lengths: tuple[int, int]) -> list[Sequence]:
    """(tokens, priority) each, the oldest first."""
    sequences = []
    for number, (num_tokens, priority) in enumerate(lengths, 1):
        request = request_of(num_tokens, 1, priority=priority)
        sequences.append(Sequence(id=number, request=request, arrived_at=0.0, num_prefill=num_tokens))
    return sequences


def _shares(*lengths: tuple[int, int], budget: int) -> list[tuple[int, int]]:
    return [(sequence.id, share) for sequence, share in shares(_prompts(*lengths), budget)]


def test_half_for_the_oldest_and_the_rest_for_the_shortest() -> None:
    assert _shares((90, 0), (20, 0), (5, 0), budget=30) == [(1, 15), (3, 5), (2, 10)]
    assert _shares((90, 0), (5, 0), budget=30) == [(1, 25), (2, 5)]
    assert _shares((4, 0), (50, 0), budget=30) == [(1, 4), (2, 26)]
    assert _shares((4, 0), budget=0) == []
    assert _shares(budget=10) == []


def test_an_eighth_for_the_oldest_beside_better_priorities() -> None:
    assert _shares((90, 1), (50, 0), (9, 1), budget=32) == [(1, 4), (2, 28)]
    assert _shares((90, 1), (10, 0), (9, 1), budget=32) == [(1, 13), (2, 10), (3, 9)]


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 2)), min_size=1, max_size=20), st.integers(1, 300)
)
def test_the_budget_is_used_up_and_nobody_gets_more_than_is_left(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    given_out = _shares(*lengths, budget=budget)
    assert sum(share for _, share in given_out) == min(budget, sum(length for length, _ in lengths))
    assert len(dict(given_out)) == len(given_out)
    assert all(1 <= share <= lengths[number - 1][0] for number, share in given_out)
    assert given_out[0][0] == 1
