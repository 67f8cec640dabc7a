"""What one forward pass is given, and nothing else. Knows neither sequences nor requests.

`prepare.py` builds it once per step; models hand it on unread; attention alone reads it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Prompt chunks and decodes of one step, end to end in one row of tokens.

    T tokens in all, S sequences, R rows whose logits are wanted. A sequence with n tokens in this step and c
    in `context_lens` computes positions c - n to c - 1 and attends to everything up to its own position.
    """

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: position in its sequence, from 0."""
    slots: Tensor
    """[T] int64: block * block_size + offset, where the token's keys and values go."""
    query_starts: Tensor
    """[S + 1] int32: the tokens of sequence i are rows query_starts[i] to query_starts[i + 1] - 1."""
    context_lens: Tensor
    """[S] int32: tokens of the sequence in the KV cache once this step has written its own."""
    block_tables: Tensor
    """[S, max_blocks] int32, contiguous: blocks in sequence order; entries past the end are unread."""
    logit_rows: Tensor
    """[R] int64: rows of the hidden states whose logits are wanted."""
    host_query_lens: npt.NDArray[np.int64]
    """[S]: tokens of each sequence in this step, where no device has to be asked for them."""
    host_context_lens: npt.NDArray[np.int64]
    """[S]: the same as `context_lens`."""
    max_seconds: float = 0.0
    """How long the blocks should take; 0: as long as they take. A network that sees itself fall behind may
    leave the last tokens out, and give fewer hidden states; the others do not depend on them."""
    min_tokens: int = 0
    """The first so many tokens are computed at whatever cost; none of `logit_rows` is behind them."""
