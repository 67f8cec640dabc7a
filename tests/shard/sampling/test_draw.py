"""Draws follow the distribution and never leave it."""

import numpy as np
import pytest
import torch
from headrace_shard.sampling.draw import draw, draw_from_all
from headrace_shard.sampling.generator import uniforms
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.shard.sampling.rows import random_logits

_LAST_BELOW_ONE = 1 - 2.0**-53


def _scaled(logits: Tensor) -> Tensor:
    return logits - logits.amax(1, keepdim=True)


def _draw(logits: Tensor, numbers: Tensor, *, from_all: bool) -> Tensor:
    scaled = _scaled(logits)
    return draw_from_all(scaled, numbers) if from_all else draw(scaled, numbers, logits.shape[1])


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic of drawn counts [V] over columns that are expected at least five times."""
    expected = probabilities * counts.sum()
    is_frequent = expected >= 5
    rare = counts[~is_frequent].sum(), expected[~is_frequent].sum()
    statistic = ((counts - expected) ** 2 / expected)[is_frequent].sum()
    return float(statistic + ((rare[0] - rare[1]) ** 2 / rare[1] if rare[1] > 5 else 0))


@pytest.mark.parametrize("from_all", [False, True])
@pytest.mark.parametrize("num_columns", [1, 2, 40, 128, 129, 300])
def test_draws_follow_the_distribution(from_all: bool, num_columns: int) -> None:
    logits = random_logits(1, num_columns, seed=num_columns, spread=1.5)
    num_draws = 20_000
    seeds = np.full(num_draws, 11, dtype=np.uint64)
    numbers = torch.from_numpy(uniforms(seeds, np.arange(num_draws, dtype=np.uint64)))
    drawn = _draw(logits.expand(num_draws, -1), numbers, from_all=from_all)
    counts = torch.bincount(drawn.flatten(), minlength=num_columns)
    probabilities = logits[0].to(torch.float64).softmax(0)
    # Mean plus four standard deviations of the statistic.
    assert chi_square(counts, probabilities) <= num_columns + 4 * (2 * num_columns) ** 0.5


@pytest.mark.parametrize("from_all", [False, True])
def test_both_ends_of_the_numbers_draw_columns_that_can_be(from_all: bool) -> None:
    for num_columns in (1, 5, 200, 1000):
        logits = torch.full((3, num_columns), -torch.inf)
        middle = num_columns // 2
        logits[:, middle] = torch.tensor([0.0, 50.0, -1e30])
        for number in (0.0, 0.5, _LAST_BELOW_ONE):
            numbers = torch.full((3,), number, dtype=torch.float64)
            assert _draw(logits, numbers, from_all=from_all).tolist() == [[middle]] * 3


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 600),
    st.integers(0, 1000),
    st.sampled_from([0.1, 3.0, 40.0]),
    st.one_of(st.floats(0, _LAST_BELOW_ONE), st.sampled_from([0.0, _LAST_BELOW_ONE])),
    st.booleans(),
)
def test_nothing_without_probability_is_drawn(
    num_columns: int, seed: int, spread: float, number: float, from_all: bool
) -> None:
    logits = random_logits(2, num_columns, seed=seed, spread=spread)
    logits = torch.where(logits < spread / 4, -torch.inf, logits)
    logits[:, seed % num_columns] = 0.0
    numbers = torch.full((2,), number, dtype=torch.float64)
    drawn = _draw(logits, numbers, from_all=from_all)
    assert (logits.gather(1, drawn) > -torch.inf).all()


def test_the_number_walks_through_the_columns_in_order() -> None:
    logits = torch.tensor([[0.25, 0.5, 0.0, 0.25]]).log()
    for number, expected in ((0.0, 0), (0.2499, 0), (0.25, 1), (0.7499, 1), (0.7501, 3), (0.999, 3)):
        numbers = torch.tensor([number], dtype=torch.float64)
        assert draw(_scaled(logits), numbers, 4).item() == expected
