"""Drawing one column of each row by inverse transform of its cumulative weights.

Weights are whole numbers in float64, so their sums are exact: a column without weight adds nothing and is
never drawn, and a row's draw does not depend on what else is drawn with it.
"""

import torch
from torch import Tensor

from headrace_shard.sampling.processors import weights

_BLOCK = 128
_ONE = 2.0**52
"""Probability 1 of a block, as a whole number."""


def draw(scaled: Tensor, uniforms: Tensor, vocab_size: int) -> Tensor:
    """Scaled values [R, S] and numbers [R] float64 in [0, 1) -> positions [R, 1] int64."""
    cumulative = weights(scaled - scaled.amax(1, keepdim=True), vocab_size).cumsum(1)
    return torch.searchsorted(cumulative, _thresholds(cumulative, uniforms), right=True)


def draw_from_all(scaled: Tensor, uniforms: Tensor) -> Tensor:
    """As `draw`, for rows of which nothing was dropped: first a block is drawn, then a column in it."""
    num_rows, num_columns = scaled.shape
    num_whole = num_columns // _BLOCK
    shares = torch.softmax(scaled, dim=1)
    sums = shares[:, : num_whole * _BLOCK].view(num_rows, num_whole, _BLOCK).sum(2, dtype=torch.float64)
    if num_whole * _BLOCK < num_columns:
        rest = shares[:, num_whole * _BLOCK :].sum(1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, rest], dim=1)
    mass = sums.mul_(_ONE).floor_()
    cumulative = mass.cumsum(1)
    thresholds = _thresholds(cumulative, uniforms)
    # A row without a distribution ends in the last block.
    block = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=mass.shape[1] - 1)
    drawn = mass.gather(1, block)
    # Where the number falls inside the block is as uniform as where it fell in the row.
    inside = (thresholds - cumulative.gather(1, block) + drawn) / drawn

    columns = block * _BLOCK + torch.arange(_BLOCK, device=scaled.device)
    values = scaled.gather(1, columns.clamp(max=num_columns - 1))
    values = values.masked_fill_(columns >= num_columns, -torch.inf)
    position = draw(values, inside.squeeze(1), _BLOCK)
    return (block * _BLOCK + position).clamp(max=num_columns - 1)


def _thresholds(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """[R, 1]: the column is drawn whose cumulative weight is the first above this."""
    total = cumulative[:, -1:]
    # A number just below 1 may round up to the total, which no column exceeds.
    return torch.minimum(uniforms.unsqueeze(1) * total, total - 1)
