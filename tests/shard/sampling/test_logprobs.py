"""Log-probabilities against float64, their order, and chunks of a prompt."""

import pytest
import torch
from headrace_shard.sampling.logprobs import chosen_and_top, prompt_logprobs
from headrace_shard.sampling.sampler import NO_TOKEN
from torch import Tensor, nn

from tests.shard.sampling.rows import random_logits


@pytest.mark.parametrize("vocab_size", [1, 5, 100, 5000])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_logprobs_are_those_of_the_raw_distribution(vocab_size: int, num_top: int, is_coarse: bool) -> None:
    num_top = min(num_top, vocab_size)
    logits = random_logits(4, vocab_size, is_coarse=is_coarse)
    token_ids = torch.arange(4) % vocab_size
    chosen, top_ids, top = chosen_and_top(logits, token_ids, num_top)
    exact = logits.to(torch.float64).log_softmax(1)
    assert chosen.dtype == top.dtype == torch.float32
    assert top_ids.shape == top.shape == (4, num_top)
    torch.testing.assert_close(chosen.to(torch.float64), exact[torch.arange(4), token_ids])
    torch.testing.assert_close(top.to(torch.float64), exact.gather(1, top_ids))
    for row, ids in zip(logits.tolist(), top_ids.tolist(), strict=True):
        assert ids == sorted(range(vocab_size), key=lambda i: (-row[i], i))[:num_top]


def test_the_chosen_token_has_the_same_value_among_the_top() -> None:
    logits = random_logits(8, 3000)
    best = logits.argmax(1)
    chosen, top_ids, top = chosen_and_top(logits, best, 3)
    assert torch.equal(top_ids[:, 0], best)
    assert torch.equal(top[:, 0], chosen)
    assert (top.diff(dim=1) <= 0).all()


def test_a_row_alone_has_the_values_it_has_among_others() -> None:
    logits = random_logits(5, 40_000)
    token_ids = torch.arange(5)
    together = chosen_and_top(logits, token_ids, 4)
    for row in range(5):
        alone = chosen_and_top(logits[row : row + 1], token_ids[row : row + 1], 4)
        for mine, ours in zip(alone, together, strict=True):
            assert torch.equal(mine[0], ours[row])


def test_a_row_without_a_token_is_nan_and_harms_no_other() -> None:
    logits = random_logits(2, 100)
    logits[0] = torch.nan
    chosen, top_ids, _ = chosen_and_top(logits, torch.tensor([NO_TOKEN, 3]), 2)
    assert chosen.isnan().tolist() == [True, False]
    assert ((top_ids >= 0) & (top_ids < 100)).all()


def test_impossible_tokens_have_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf]])
    chosen, top_ids, top = chosen_and_top(logits, torch.tensor([1]), 2)
    assert chosen.tolist() == [-torch.inf]
    assert top_ids.tolist() == [[0, 1]]
    assert top.tolist() == [[0.0, -torch.inf]]


def test_prompt_logprobs_are_computed_in_chunks_of_rows() -> None:
    torch.manual_seed(0)
    output = nn.Linear(16, 500, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(150, 16, dtype=torch.bfloat16)
    token_ids = torch.randint(0, 500, (150,))
    sizes = []

    def compute_logits(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        logits: Tensor = output(rows)
        return logits

    with torch.inference_mode():
        found = prompt_logprobs(hidden, token_ids, compute_logits, 3)
        expected = chosen_and_top(output(hidden).to(torch.float32), token_ids, 3)
    assert sizes == [64, 64, 22]
    assert [part.shape for part in found] == [(150,), (150, 3), (150, 3)]
    torch.testing.assert_close(found[0], expected[0], atol=0.05, rtol=0.01)


def test_a_prompt_without_tokens_has_no_logprobs() -> None:
    found = prompt_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), nn.Linear(4, 9), 2)
    assert [part.shape for part in found] == [(0,), (0, 2), (0, 2)]
