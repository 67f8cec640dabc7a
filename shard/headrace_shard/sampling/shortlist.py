"""Finding the best of many columns without sorting them: only the blocks that can hold them are looked at.

The order of columns is: higher value first, lower column first among equals. Whatever is asked for here is
exact in that order. Knows tensors only; no tokens, no probabilities.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Columns of a block; a row of 50,000 columns has about 1,600 block maxima to compare."""


def can_be_asked(device: torch.device) -> bool:
    """Whether a size may depend on values: a CPU has them at hand, a GPU would have to be waited for."""
    return device.type == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """Some columns of each row in their own order, among them the best `num_blocks` that were asked for."""

    values: Tensor
    """[R, S]"""
    blocks: Tensor | None
    """[R, K] int64, ascending: blocks that are listed; None when every column is."""
    num_whole: int
    """Blocks a row has in all; the columns after them are all listed last."""
    maxima: Tensor
    """[R]: the highest value of each row, NaN if the row has one anywhere."""
    bounds: Tensor
    """[R]: no column that is not listed is higher; -inf when every column is listed."""

    def columns(self, positions: Tensor) -> Tensor:
        """Columns [R, n] int64 of positions [R, n] in the list."""
        if self.blocks is None:
            return positions
        num_blocks = self.blocks.shape[1]
        block, inside = positions // BLOCK, positions % BLOCK
        listed = self.blocks.gather(1, block.clamp(max=num_blocks - 1)) * BLOCK + inside
        return torch.where(block < num_blocks, listed, positions + (self.num_whole - num_blocks) * BLOCK)


def shortlist(values: Tensor, num_best: int) -> Shortlist:
    """[R, N] float32 -> a list that holds the best `num_best` columns of each row.

    A block's maximum stands for the block: each of the best n columns is in one of the best n blocks, since a
    block ahead of its own holds at least one column ahead of it.
    """
    num_whole = values.shape[1] // BLOCK
    if num_best >= num_whole:
        return list_all(values)
    tail = values[:, num_whole * BLOCK :]
    grouped = values[:, : num_whole * BLOCK].view(-1, num_whole, BLOCK)
    block_maxima = grouped.amax(2)
    is_single = num_best == 1  # quicker, and the first of equals too
    blocks = block_maxima.argmax(1, keepdim=True) if is_single else best_columns(block_maxima, num_best)
    listed = grouped.gather(1, blocks.unsqueeze(2).expand(-1, -1, BLOCK)).flatten(1)
    maxima = block_maxima.amax(1)
    if tail.shape[1]:
        listed = torch.cat([listed, tail], dim=1)
        maxima = torch.maximum(maxima, tail.amax(1))
    bounds = block_maxima.gather(1, blocks).amin(1)
    return Shortlist(values=listed, blocks=blocks, num_whole=num_whole, maxima=maxima, bounds=bounds)


def list_all(values: Tensor) -> Shortlist:
    """[R, N] float32 -> every column of it."""
    bounds = values.new_full((values.shape[0],), -torch.inf)
    return Shortlist(values=values, blocks=None, num_whole=0, maxima=values.amax(1), bounds=bounds)


def best_columns(values: Tensor, num_best: int) -> Tensor:
    """[R, N] float32 -> the best columns [R, num_best] int64, in ascending order."""
    return _keys(values).topk(num_best, dim=1, sorted=False).indices.sort(1).values


def ranked_columns(values: Tensor, num_best: int) -> Tensor:
    """[R, N] float32 -> the best columns [R, num_best] int64, best first."""
    return _keys(values).topk(num_best, dim=1).indices


def _keys(values: Tensor) -> Tensor:
    """[R, N] float32 -> int64, in the order of columns. A NaN is placed somewhere.

    No two are equal, so that what topk finds does not depend on how it treats equals.
    """
    bits = (values + 0.0).view(torch.int32)  # adding 0 makes one of the two zeros
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) - torch.arange(values.shape[1], device=values.device)


def argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """[R, N] float32 -> the best column [R] int64, and its value, NaN if the row has one anywhere."""
    listed = shortlist(values, 1)
    positions = listed.values.argmax(1, keepdim=True)
    return listed.columns(positions).squeeze(1), listed.maxima


def top_columns(values: Tensor, num_best: int) -> Tensor:
    """[R, N] float32 -> the best columns [R, num_best] int64, best first, of at most N."""
    listed = shortlist(values, num_best)
    return listed.columns(ranked_columns(listed.values, num_best))


def marked_columns(is_marked: Tensor) -> tuple[Tensor, Tensor]:
    """[R, N] bool -> the marked columns [R, C] int64, ascending, and which of these are real [R, C] bool.

    C is the largest number of a row, at least 1: only for a device that `can_be_asked`.
    """
    num_rows = is_marked.shape[0]
    rows, columns = is_marked.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=num_rows)
    positions = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    padded = columns.new_zeros((num_rows, max(1, int(counts.max()))))
    padded[rows, positions] = columns
    return padded, torch.arange(padded.shape[1]) < counts.unsqueeze(1)
