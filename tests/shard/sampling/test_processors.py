"""Compared with transformers' own processors, whose definitions are the ones users know."""

import pytest
import torch
from headrace_shard.sampling import processors
from headrace_shard.sampling.processors import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    penalise,
    scale,
    smallest_set,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.shard.sampling.rows import model_like_logits, random_logits

_NO_IDS = torch.zeros(1, 1, dtype=torch.int64)


def _scaled(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return scale(logits, logits.amax(1, keepdim=True), torch.full((len(logits), 1), temperature))


def _kept_by(processor: LogitsProcessor, scaled: Tensor) -> Tensor:
    kept: Tensor = processor(_NO_IDS, scaled) > -torch.inf
    return kept


def _shares(value: float, count: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.float64)


_TABLES = [
    random_logits(4, 100, seed=1),
    random_logits(3, 5000, seed=2),
    model_like_logits(3, 5000, seed=3),
    random_logits(2, 3000, seed=4, spread=0.01),
    torch.where(random_logits(3, 3000, seed=5) > 0, random_logits(3, 3000, seed=6), -torch.inf),
]


@pytest.mark.parametrize("table", _TABLES)
@pytest.mark.parametrize("temperature", [1e-6, 0.3, 1.0, 100.0])
def test_temperature_is_transformers(table: Tensor, temperature: float) -> None:
    expected = TemperatureLogitsWarper(temperature)(_NO_IDS, table).softmax(1)
    torch.testing.assert_close(_scaled(table, temperature).softmax(1), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("table", _TABLES)
@pytest.mark.parametrize("top_k", [1, 2, 17, 99, 100, 2500])
def test_top_k_is_transformers(table: Tensor, top_k: int) -> None:
    scaled = _scaled(table)
    top_k = min(top_k, table.shape[1])
    kept = keep_top_k(scaled, torch.full((len(table),), top_k), top_k) > -torch.inf
    assert torch.equal(kept, _kept_by(TopKLogitsWarper(top_k), scaled))


@pytest.mark.parametrize("table", _TABLES)
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.95, 0.999])
def test_top_p_is_transformers(table: Tensor, top_p: float) -> None:
    scaled = _scaled(table).to(torch.float64)
    kept = keep_top_p(scaled, _shares(top_p, len(table)), None, table.shape[1]) > -torch.inf
    assert torch.equal(kept, _kept_by(TopPLogitsWarper(top_p), scaled))


@pytest.mark.parametrize("table", _TABLES)
@pytest.mark.parametrize("min_p", [1e-4, 0.05, 0.5, 1.0])
def test_min_p_is_transformers(table: Tensor, min_p: float) -> None:
    scaled = _scaled(table)
    kept = keep_min_p(scaled, _shares(min_p, len(table))) > -torch.inf
    assert torch.equal(kept, _kept_by(MinPLogitsWarper(min_p), scaled.to(torch.float64)))


@pytest.mark.parametrize("table", _TABLES)
@pytest.mark.parametrize("typical_p", [0.05, 0.5, 0.95, 0.99])
def test_typical_is_transformers(table: Tensor, typical_p: float) -> None:
    scaled = _scaled(table).to(torch.float64)
    kept = keep_typical(scaled, _shares(typical_p, len(table)), table.shape[1]) > -torch.inf
    assert torch.equal(kept, _kept_by(TypicalLogitsWarper(typical_p), scaled))


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    table = random_logits(3, 50)
    seen = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, table.clone()).gather(1, seen)
    neutral = torch.zeros(3, 1)
    counts = torch.ones_like(seen, dtype=torch.int32)
    found = penalise(table.gather(1, seen), counts, torch.full((3, 1), penalty), neutral, neutral)
    assert torch.equal(found, expected)


def test_presence_and_frequency_are_subtracted_after_repetition() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -torch.inf]])
    counts = torch.tensor([[3, 1, 0, 2]], dtype=torch.int32)
    found = penalise(logits, counts, torch.tensor([[2.0]]), torch.tensor([[0.5]]), torch.tensor([[0.25]]))
    assert found.tolist() == [[1 - 0.5 - 0.75, -4 - 0.5 - 0.25, 1.0, -torch.inf]]


def test_every_step_leaves_rows_alone_that_do_not_use_it() -> None:
    scaled = _scaled(random_logits(2, 5000))
    on_off = torch.tensor([0.5, 1.0], dtype=torch.float64)
    assert torch.equal(keep_top_k(scaled, torch.tensor([3, 0]), 3)[1], scaled[1])
    assert torch.equal(keep_top_p(scaled, on_off, None, 5000)[1], scaled[1])
    assert torch.equal(keep_typical(scaled, on_off, 5000)[1], scaled[1])
    assert torch.equal(keep_min_p(scaled, 1 - on_off)[1], scaled[1])


def test_a_share_of_nothing_leaves_one_token() -> None:
    scaled = _scaled(torch.tensor([[1.0, 3.0, 3.0, 2.0]]))
    zero = _shares(0.0, 1)
    assert (keep_top_p(scaled, zero, None, 4) > -torch.inf).tolist() == [[False, True, False, False]]
    assert (keep_typical(scaled, zero, 4) > -torch.inf).sum() == 1


def test_of_equals_the_first_ones_are_kept() -> None:
    scaled = torch.zeros(1, 6)
    assert (keep_top_k(scaled, torch.tensor([4]), 4) > -torch.inf).tolist() == [[True] * 4 + [False] * 2]
    assert (keep_top_p(scaled, _shares(0.4, 1), None, 6) > -torch.inf).sum() == 3


def test_weights_are_whole_and_their_sum_is_exact() -> None:
    for table in _TABLES:
        mass = weights(_scaled(table), table.shape[1])
        assert torch.equal(mass, mass.floor())
        assert mass.sum(1).max() < 2**53
        assert torch.equal(mass.sum(1), mass.flip(1).cumsum(1)[:, -1])
        assert (mass[table == -torch.inf] == 0).all()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 50, 700]),
    st.integers(0, 1000),
    st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999999, 1.0, 2.0]),
)
def test_buckets_find_the_set_that_sorting_finds(
    num_rows: int, num_columns: int, seed: int, spread: float, is_coarse: bool, share: float
) -> None:
    logits = random_logits(num_rows, num_columns, seed=seed, spread=spread, is_coarse=is_coarse)
    is_low = logits < logits.amax(1, keepdim=True) - 3 * spread
    scaled = _scaled(torch.where(is_low, -torch.inf, logits))
    mass = weights(scaled, num_columns)
    wanted = mass.sum(1) * share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, "_SORTED_COLUMNS", 0)
        by_buckets = smallest_set(-scaled, mass, wanted)
        patch.setattr(processors, "_SORTED_COLUMNS", 10**9)
        by_sorting = smallest_set(-scaled, mass, wanted)
    assert torch.equal(by_buckets[0], by_sorting[0])
    is_reached = by_sorting[0] < torch.inf
    assert torch.equal(by_buckets[1][is_reached], by_sorting[1][is_reached])
