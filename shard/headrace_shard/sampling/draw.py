"""Drawing one column of each row by inverse transform of its cumulative weights.

Weights are whole numbers in float64, so their sums are exact: a column without weight adds nothing and is
never drawn, and a row's draw does not depend on what else is drawn with it.
"""

import torch
from torch import Tensor

from headrace_shard.sampling.processors import weights

_BLOCK = 128


def draw(scaled: Tensor, uniforms: Tensor, vocab_size: int) -> Tensor:
    """Scaled values [R, S] and numbers [R] float64 in [0, 1) -> positions [R, 1] int64."""
    mass = weights(scaled - scaled.amax(1, keepdim=True), vocab_size)
    cumulative = mass.cumsum(1)
    return torch.searchsorted(cumulative, _thresholds(cumulative, uniforms), right=True)


def draw_from_all(scaled: Tensor, uniforms: Tensor) -> Tensor:
    """As `draw`, for long rows of which nothing was dropped: first a block is drawn, then a column in it."""
    mass = torch.softmax(scaled, dim=1).to(torch.float64).mul_(2.0**52).floor_()
    num_rows, num_columns = mass.shape
    num_blocks = num_columns // _BLOCK
    sums = mass[:, : num_blocks * _BLOCK].view(num_rows, num_blocks, _BLOCK).sum(2)
    if num_blocks * _BLOCK < num_columns:
        sums = torch.cat([sums, mass[:, num_blocks * _BLOCK :].sum(1, keepdim=True)], dim=1)
    cumulative = sums.cumsum(1)
    thresholds = _thresholds(cumulative, uniforms)
    # The last block is what a row of NaN ends in.
    block = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=cumulative.shape[1] - 1)
    before = (cumulative - sums).gather(1, block)

    columns = block * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    inside = mass.gather(1, columns.clamp(max=num_columns - 1)).cumsum(1) + before
    position = torch.searchsorted(inside, thresholds, right=True)
    return (block * _BLOCK + position).clamp(max=num_columns - 1)


def _thresholds(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """[R, 1]: the column is drawn whose cumulative weight is the first above this."""
    total = cumulative[:, -1:]
    # A number just below 1 may round up to the total, which no column exceeds.
    return torch.minimum(uniforms.unsqueeze(1) * total, total - 1)
