"""Which way a row is chosen, and that every way chooses the same."""

import pytest
import torch
from headrace_shard.sampling import groups
from headrace_shard.sampling.groups import RowGroup, Way, way_of
from headrace_shard.sampling.params import SamplingParams
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.sampling.rows import CPU, model_like_logits, random_logits

_VOCAB_SIZE = 6000


@pytest.mark.parametrize(
    ("params", "vocab_size", "way"),
    [
        (SamplingParams(temperature=0, top_p=0.5), _VOCAB_SIZE, Way.GREEDY),
        (SamplingParams(top_k=1), _VOCAB_SIZE, Way.GREEDY),
        (SamplingParams(temperature=0.5), _VOCAB_SIZE, Way.WHOLE),
        (SamplingParams(top_k=_VOCAB_SIZE), _VOCAB_SIZE, Way.WHOLE),
        (SamplingParams(top_k=40), _VOCAB_SIZE, Way.LISTED),
        (SamplingParams(top_k=4000, typical_p=0.5), _VOCAB_SIZE, Way.LISTED),
        (SamplingParams(top_p=0.9), _VOCAB_SIZE, Way.HOPEFUL),
        (SamplingParams(min_p=0.1, top_k=10**6), _VOCAB_SIZE, Way.HOPEFUL),
        (SamplingParams(top_p=0.9), 1000, Way.FULL),
        (SamplingParams(typical_p=0.9, min_p=0.1), _VOCAB_SIZE, Way.TYPICAL),
    ],
)
def test_the_way_follows_from_the_parameters(params: SamplingParams, vocab_size: int, way: Way) -> None:
    assert way_of(params, vocab_size, CPU) is way


def test_a_gpu_is_never_hopeful() -> None:
    assert way_of(SamplingParams(top_p=0.9), _VOCAB_SIZE, torch.device("cuda")) is Way.FULL


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0.1, 1.0, 100.0]),
    st.sampled_from([0, 2, 50, 500]),
    st.sampled_from([1.0, 0.99, 0.9, 0.2]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.integers(0, 1000),
    st.sampled_from(["flat", "coarse", "model", "equal"]),
)
def test_candidates_draw_what_the_whole_row_would(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, shape: str
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    way = way_of(params, _VOCAB_SIZE, CPU)
    num_rows = 5
    logits = {
        "flat": lambda: random_logits(num_rows, _VOCAB_SIZE, seed=seed),
        "coarse": lambda: random_logits(num_rows, _VOCAB_SIZE, seed=seed, is_coarse=True),
        "model": lambda: model_like_logits(num_rows, _VOCAB_SIZE, seed=seed),
        "equal": lambda: torch.zeros(num_rows, _VOCAB_SIZE),
    }[shape]()
    numbers = torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    chosen, full = (
        RowGroup(one, range(num_rows), [params] * num_rows, _VOCAB_SIZE, CPU).choose(logits, numbers)
        for one in (way, Way.FULL)
    )
    assert torch.equal(chosen[0], full[0])
    assert torch.equal(chosen[1], full[1])


def test_a_row_that_outgrows_its_list_is_drawn_from_all_that_could_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [SamplingParams(top_p=0.9), SamplingParams(min_p=0.001, top_p=0.999), SamplingParams(min_p=0.5)]
    logits = random_logits(3, _VOCAB_SIZE)
    numbers = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    wide = RowGroup(Way.HOPEFUL, range(3), params, _VOCAB_SIZE, CPU).choose(logits, numbers)[0]
    monkeypatch.setattr(groups, "_NUM_HOPEFUL_BLOCKS", 2)
    narrow = RowGroup(Way.HOPEFUL, range(3), params, _VOCAB_SIZE, CPU).choose(logits, numbers)[0]
    assert torch.equal(wide, narrow)
