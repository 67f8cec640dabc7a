"""What the device has computed as plain values: tokens, alternatives, prompts; rows that are not sound."""

import math
from typing import cast

import numpy as np
import pytest
import torch
from headrace_shard.batch import Batch
from headrace_shard.prepare import prepare
from headrace_shard.results import put_prompt_logprobs, put_tokens
from headrace_shard.runner import Runner
from headrace_shard.sampling.sampler import NO_TOKEN
from headrace_shard.step import StepResult
from hypothesis import given
from hypothesis import strategies as st

VOCAB_SIZE = 7


def logits_of(*rows: dict[int, float]) -> torch.Tensor:
    """[R, V]: logarithms of these probabilities, so that logits are log-probabilities; the rest is shared."""
    filled = []
    for row in rows:
        rest = (1 - sum(row.values())) / (VOCAB_SIZE - len(row))
        filled.append([math.log(row.get(column, rest)) for column in range(VOCAB_SIZE)])
    return torch.tensor(filled)


def test_tokens_with_as_many_alternatives_as_each_wants() -> None:
    result = StepResult()
    logits = logits_of({3: 0.5, 1: 0.3}, {0: 0.9}, {6: 0.4, 2: 0.35, 5: 0.15})
    failed = put_tokens(result, [11, 12, 13], logits, torch.tensor([1, 0, 6]), np.array([1, 0, 3]))
    assert not failed
    assert (result.ids, result.token_ids) == ([11, 12, 13], [1, 0, 6])
    assert result.logprobs == pytest.approx([math.log(0.3), math.log(0.9), math.log(0.4)], abs=1e-6)
    assert (result.top_counts, result.top_token_ids) == ([1, 0, 3], [3, 6, 2, 5])
    assert [math.exp(value) for value in result.top_logprobs] == pytest.approx([0.5, 0.4, 0.35, 0.15])


def test_rows_without_a_distribution_are_left_out() -> None:
    result = StepResult()
    logits = logits_of({3: 0.5}, {2: 0.5}, {1: 0.5}, {4: 0.5})
    logits[0, 2] = torch.nan
    logits[2] = torch.inf
    sampled = torch.tensor([NO_TOKEN, 2, NO_TOKEN, 4])
    failed = put_tokens(result, [1, 2, 3, 4], logits, sampled, np.array([2, 1, 0, 1]))
    assert failed == [1, 3]
    assert (result.ids, result.token_ids) == ([2, 4], [2, 4])
    assert (result.top_counts, result.top_token_ids) == ([1, 1], [2, 4])
    assert np.isfinite(result.logprobs + result.top_logprobs).all()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, VOCAB_SIZE)), min_size=1, max_size=6))
def test_lists_fit_each_other_whoever_fails(rows: list[tuple[bool, int]]) -> None:
    result = StepResult()
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(len(rows)))
    sampled = torch.tensor([2 if is_sound else NO_TOKEN for is_sound, _ in rows])
    ids = list(range(100, 100 + len(rows)))
    failed = put_tokens(result, ids, logits, sampled, np.array([num_top for _, num_top in rows]))
    sound = [index for index, (is_sound, _) in enumerate(rows) if is_sound]
    assert sorted(failed + result.ids) == ids
    assert result.ids == [ids[index] for index in sound]
    assert len(result.ids) == len(result.token_ids) == len(result.logprobs)
    assert result.top_counts == [rows[index][1] for index in sound]
    best = torch.log_softmax(logits, dim=1).sort(dim=1, descending=True)
    expected = [
        (int(best.indices[index, place]), float(best.values[index, place]))
        for index in sound
        for place in range(rows[index][1])
    ]
    assert result.top_token_ids == [token_id for token_id, _ in expected]
    assert result.top_logprobs == pytest.approx([value for _, value in expected])


class LogitsAsHidden:
    """In the place of a runner: hidden states are the logits themselves."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_prompt_logprobs_go_to_whoever_wants_them() -> None:
    batch = Batch(torch.device("cpu"), block_size=4)
    # A prompt from its third token on, one that wants nothing, and one with an output token already.
    for number, (token_ids, num_prompt, num_computed, num_prompt_top) in {
        21: ([1, 2, 3, 4, 5], 5, 2, 2),
        22: ([1, 2], 2, 0, None),
        23: ([6, 5, 4], 2, 0, 0),
    }.items():
        batch.add(
            number,
            np.array(token_ids),
            num_prompt=num_prompt,
            num_computed=num_computed,
            num_top=0,
            num_prompt_top=num_prompt_top,
        )
    ids = [22, 21, 23]
    rows = batch.rows(ids)
    batch.grow_blocks(rows, np.array([1, 2, 1]), np.array([0, 1, 2, 3]))
    step = prepare(batch, rows, np.array([2, 2, 3]))
    # Rows 2 and 3 of sequence 21 speak of its tokens 4 and 5, row 0 of sequence 23 of its token 5.
    hidden = logits_of({4: 0.5, 0: 0.25}, {6: 0.75, 5: 0.125}, {5: 0.625})
    result = StepResult()
    put_prompt_logprobs(result, ids, batch, rows, step, cast(Runner, LogitsAsHidden()), hidden)
    first, second = result.prompt_logprobs
    assert (first.id, first.start, first.num_top) == (21, 3, 2)
    assert first.logprobs == pytest.approx([math.log(0.5), math.log(0.125)])
    assert first.top_token_ids == [4, 0, 6, 5]
    assert [math.exp(value) for value in first.top_logprobs] == pytest.approx([0.5, 0.25, 0.75, 0.125])
    assert (second.id, second.start, second.num_top) == (23, 1, 0)
    assert second.logprobs == pytest.approx([math.log(0.625)])
    assert second.top_token_ids == second.top_logprobs == []
