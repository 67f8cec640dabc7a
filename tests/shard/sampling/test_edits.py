"""Bias, suppression and penalties on the logits of a batch."""

import torch
from headrace_shard.sampling.edits import LogitEdits
from headrace_shard.sampling.params import SamplingParams

from tests.shard.sampling.rows import CPU, random_logits, sequence


def test_nothing_to_edit_returns_the_logits_themselves() -> None:
    logits = random_logits(2, 20)
    edits = LogitEdits([sequence(SamplingParams(), 20), sequence(SamplingParams(top_k=3), 20)], 20, CPU)
    assert edits.apply(logits) is logits


def test_bias_and_suppression_come_before_penalties() -> None:
    params = SamplingParams(
        logit_bias=((1, 3.0), (2, -1.0)),
        min_new_tokens=2,
        suppressed_token_ids=(3,),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    sequences = [sequence(SamplingParams(), 5), sequence(params, 5, [1, 2, 3], [2])]
    edits = LogitEdits(sequences, 5, CPU)
    logits = torch.tensor([[1.0, 1.0, 0.5, 1.0, 1.0]] * 2)
    before = logits.clone()
    edited = edits.apply(logits)
    assert torch.equal(logits, before)
    assert torch.equal(edited[0], logits[0])
    # 1: (1 + 3) / 2; 2: (0.5 - 1) * 2 - 0.5 - 0.25; 3: suppressed.
    assert edited[1].tolist() == [1.0, 2.0, -1.75, -torch.inf, 1.0]


def test_suppression_ends_with_the_last_token_it_is_for() -> None:
    def suppressing(min_new_tokens: int, num_generated: int) -> SamplingParams:
        return SamplingParams(min_new_tokens=min_new_tokens, suppressed_token_ids=(0, 2))

    sequences = [
        sequence(suppressing(3, 0), 4),
        sequence(suppressing(3, 2), 4, [1], [1, 1]),
        sequence(suppressing(0, 0), 4),
    ]
    edits = LogitEdits(sequences, 4, CPU)
    logits = torch.zeros(3, 4)
    for step in range(4):
        is_suppressed = edits.apply(logits)[:, [0, 2]] == -torch.inf
        assert is_suppressed.tolist() == [[step < 3] * 2, [step < 1] * 2, [False] * 2]
        edits.observe(torch.tensor([1, 1, 1]))
    assert edits.apply(logits) is logits


def test_observed_tokens_are_penalised() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    edits = LogitEdits([sequence(SamplingParams(), 4), sequence(params, 4, [0, 1])], 4, CPU)
    logits = torch.zeros(2, 4)
    assert edits.apply(logits)[1].tolist() == [0, 0, 0, 0]
    edits.observe(torch.tensor([3, 2]))
    assert edits.apply(logits)[1].tolist() == [0, 0, -1.5, 0]
    edits.observe(torch.tensor([3, 2]))
    edits.observe(torch.tensor([3, 0]))
    assert edits.apply(logits).tolist() == [[0] * 4, [-1.5, 0, -2, 0]]
