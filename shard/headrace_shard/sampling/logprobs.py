"""Natural logarithms of the probabilities the model gave, before anything sampling does to them.

In float32, from raw logits. Knows no sequence and no sampling parameter.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headrace_shard.sampling.shortlist import top_columns

_CHUNK_ROWS = 64
"""Rows whose logits are in memory at once: 40 MB of them for a vocabulary of 150,000."""


def chosen_and_top(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens that were chosen, and the most likely tokens.

    Raw logits [R, V] float32, token ids [R] int64, `num_top` from 0 to V -> logprobs [R] float32, top ids
    [R, num_top] int64, top logprobs [R, num_top] float32. Higher logits come first, the lower id among
    equals. The log-probability of a negative id (`sampler.NO_TOKEN`) is NaN.
    """
    all_logprobs = torch.log_softmax(logits, dim=1)
    chosen = all_logprobs.gather(1, token_ids.clamp(min=0).unsqueeze(1)).squeeze(1)
    chosen = torch.where(token_ids >= 0, chosen, torch.nan)
    if num_top == 0:
        empty = token_ids.new_empty((logits.shape[0], 0))
        return chosen, empty, empty.to(torch.float32)
    top_ids = top_columns(logits, num_top)
    return chosen, top_ids, all_logprobs.gather(1, top_ids)


def prompt_logprobs(
    hidden: Tensor, token_ids: Tensor, compute_logits: Callable[[Tensor], Tensor], num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of prompt tokens, each from the hidden state of the token before it.

    hidden [T, hidden_size], token ids [T] int64 that follow them -> as `chosen_and_top`, with T rows. Logits
    are computed for 64 rows at a time, so that memory does not grow with T times the vocabulary.
    """
    parts = [
        chosen_and_top(compute_logits(rows).to(torch.float32), ids, num_top)
        for rows, ids in zip(
            torch.split(hidden, _CHUNK_ROWS), torch.split(token_ids, _CHUNK_ROWS), strict=True
        )
    ]
    logprobs, top_ids, top_logprobs = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(top_ids), torch.cat(top_logprobs)
