"""What a shard keeps of its sequences between steps: tokens, lengths and block tables, one row each.

Token values live on the device, so that a sampled token is appended and read back by the next step without
the host. Counts and block tables live on the host in numpy, where the inputs of a step are worked out. Knows
neither the model nor sampling, and trusts its caller: `validation.py` has checked the step.

    free row ──add──► row of a sequence ──drop──► free row        (`Engine` alone moves them)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]

_FIRST_NUM_ROWS = 16
_FIRST_MAX_TOKENS = 256
_FIRST_MAX_BLOCKS = 16
_FIRST_NUM_HOLDERS = 64


def _grown(size: int, needed: int) -> int:
    """Doubled until it is enough, so that growing costs little per token."""
    while size < needed:
        size *= 2
    return size


class Batch:
    """Sequences by row. Arrays with one entry per row are [rows]; entries of free rows mean nothing."""

    def __init__(self, device: torch.device, block_size: int) -> None:
        self.device = device
        self.block_size = block_size
        self.row_of: dict[int, int] = {}
        """Sequence id to row, for every sequence held."""
        self.tokens: Tensor = torch.zeros(
            (_FIRST_NUM_ROWS, _FIRST_MAX_TOKENS), dtype=torch.int32, device=device
        )
        """[rows, longest] on the device: prompt and output ids."""
        self.block_table = np.zeros((_FIRST_NUM_ROWS, _FIRST_MAX_BLOCKS), dtype=np.int32)
        """[rows, most blocks]: blocks in the order of the sequence."""
        self.num_tokens: IntArray = np.zeros(_FIRST_NUM_ROWS, dtype=np.int64)
        self.num_prompt: IntArray = np.zeros(_FIRST_NUM_ROWS, dtype=np.int64)
        self.num_computed: IntArray = np.zeros(_FIRST_NUM_ROWS, dtype=np.int64)
        """Leading tokens whose keys and values are in the cache."""
        self.num_blocks: IntArray = np.zeros(_FIRST_NUM_ROWS, dtype=np.int64)
        self.num_top: IntArray = np.zeros(_FIRST_NUM_ROWS, dtype=np.int64)
        """Alternatives wanted with each generated token."""
        self.num_prompt_top: IntArray = np.full(_FIRST_NUM_ROWS, -1, dtype=np.int64)
        """Alternatives wanted with each prompt token's log-probability; -1 when none of these is wanted."""
        self._holders: IntArray = np.zeros(_FIRST_NUM_HOLDERS, dtype=np.int64)
        """[more than any block held]: how many sequences hold each block; the last is nobody's."""
        self._free = list(range(_FIRST_NUM_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.row_of)

    def add(
        self,
        sequence_id: int,
        token_ids: IntArray,
        *,
        num_prompt: int,
        num_computed: int,
        num_top: int,
        num_prompt_top: int | None,
    ) -> None:
        """Take in a sequence with `token_ids` [n]; its blocks come with `grow_blocks`."""
        count = len(token_ids)
        self._reserve_tokens(count + 1)
        if not self._free:
            self._grow_rows()
        row = self._free.pop()
        self.tokens[row, :count] = torch.from_numpy(token_ids).to(self.device)
        self.num_tokens[row] = count
        self.num_prompt[row] = num_prompt
        self.num_computed[row] = num_computed
        self.num_blocks[row] = 0
        self.num_top[row] = num_top
        self.num_prompt_top[row] = -1 if num_prompt_top is None else num_prompt_top
        self.row_of[sequence_id] = row

    def drop(self, sequence_ids: Iterable[int]) -> int:
        """Forget sequences; unknown ids are no error. Gives how many were known."""
        rows = [row for row in (self.row_of.pop(number, None) for number in sequence_ids) if row is not None]
        for row in rows:
            np.subtract.at(self._holders, self.block_table[row, : self.num_blocks[row]], 1)
        self._free += rows
        return len(rows)

    def num_holders(self, blocks: npt.NDArray[np.integer[Any]]) -> IntArray:
        """How many sequences hold each of `blocks` [B]."""
        return self._holders.take(blocks, mode="clip")

    def rows(self, sequence_ids: Sequence[int]) -> IntArray:
        """Rows [S] of known sequences."""
        return np.fromiter(map(self.row_of.__getitem__, sequence_ids), np.int64, len(sequence_ids))

    def grow_blocks(self, rows: IntArray, num_new: IntArray, new_blocks: IntArray) -> None:
        """Append blocks [B] to the tables of `rows` [S], `num_new` [S] each, in that order."""
        if len(new_blocks) == 0:
            return
        held = self.num_blocks[rows]
        totals = held + num_new
        self._reserve_blocks(int(totals.max()))
        starts = np.cumsum(num_new) - num_new
        columns = np.arange(len(new_blocks)) + np.repeat(held - starts, num_new)
        self.block_table[np.repeat(rows, num_new), columns] = new_blocks
        self.num_blocks[rows] = totals
        self._reserve_holders(int(new_blocks.max()) + 2)
        np.add.at(self._holders, new_blocks, 1)

    def append(self, rows: Tensor, columns: Tensor, token_ids: Tensor) -> None:
        """Write `token_ids` [R] behind the last tokens of `rows` [R], which are at `columns` [R] - 1.

        All on the device; `advance` counts them on the host.
        """
        self.tokens[rows, columns] = token_ids.to(self.tokens.dtype)

    def advance(self, rows: IntArray, num_computed: IntArray, sampled: IntArray) -> None:
        """Count `num_computed` [S] more tokens as computed, and one more token for the rows `sampled` [R]."""
        self.num_computed[rows] += num_computed
        if len(sampled):
            self.num_tokens[sampled] += 1
            self._reserve_tokens(int(self.num_tokens[sampled].max()) + 1)

    def _reserve_tokens(self, num_tokens: int) -> None:
        # Every row has room for the token that its next step may append.
        rows, size = self.tokens.shape
        if num_tokens > size:
            grown = torch.zeros((rows, _grown(size, num_tokens)), dtype=self.tokens.dtype, device=self.device)
            grown[:, :size] = self.tokens
            self.tokens = grown

    def _reserve_blocks(self, num_blocks: int) -> None:
        rows, size = self.block_table.shape
        if num_blocks > size:
            grown = np.zeros((rows, _grown(size, num_blocks)), dtype=np.int32)
            grown[:, :size] = self.block_table
            self.block_table = grown

    def _reserve_holders(self, count: int) -> None:
        size = len(self._holders)
        if count > size:
            self._holders = np.concatenate(
                (self._holders, np.zeros(_grown(size, count) - size, dtype=np.int64))
            )

    def _grow_rows(self) -> None:
        old = len(self.num_tokens)
        self.tokens = torch.cat((self.tokens, torch.zeros_like(self.tokens)))
        self.block_table = np.concatenate((self.block_table, np.zeros_like(self.block_table)))
        self.num_tokens = np.resize(self.num_tokens, 2 * old)
        self.num_prompt = np.resize(self.num_prompt, 2 * old)
        self.num_computed = np.resize(self.num_computed, 2 * old)
        self.num_blocks = np.resize(self.num_blocks, 2 * old)
        self.num_top = np.resize(self.num_top, 2 * old)
        self.num_prompt_top = np.resize(self.num_prompt_top, 2 * old)
        self._free += range(2 * old - 1, old - 1, -1)
