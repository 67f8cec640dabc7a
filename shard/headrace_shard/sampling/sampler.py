"""Logits in, token ids out, for all rows of a step at once. Knows no model, no cache and no text.

What happens to a row, and why in this order:

    logit bias, suppression   the caller's own changes to the model; all that follows sees them
    repetition penalty        multiplies, so it must come before anything is subtracted
    presence, frequency       subtract from logits, as OpenAI defines them
    temperature               the penalised logits are the distribution that is sharpened or flattened
    top-k                     a plain count first, so that the shares below are of what it leaves
    typical-p                 needs the shape of the distribution, so it comes before the tail is cut by mass
    top-p                     a share of the mass of what is left
    min-p                     relative to the best that is left
    draw                      one uniform number of the row's own generator, against the cumulative weights

A row pays for what its own parameters use. Greedy rows take the best token after the penalties; a truncated
row works on few candidates wherever that is exact. Nothing in `sample` and `observe` waits for a GPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_shard.sampling.edits import LogitEdits
from headrace_shard.sampling.generator import uniforms
from headrace_shard.sampling.groups import RowGroup, Way, way_of
from headrace_shard.sampling.state import SequenceSampling, lay_progress

NO_TOKEN = -1
"""Given to a row without a distribution: its highest logit is NaN, infinite, or -inf like all others."""

_NUM_UNIFORMS = 16
"""Random numbers made at once for each row, for so many steps."""


class SamplingBatch:
    """The sequences of the rows of a step, prepared for as many steps as the rows stay the same.

    It counts on for the sequences; a batch that was built earlier over one of them must not be used again.
    """

    def __init__(self, sequences: Sequence[SequenceSampling]) -> None:
        """One sequence per row of logits, in order; at least one, all of one table."""
        self.num_rows = len(sequences)
        self.vocab_size = sequences[0].table.vocab_size
        self._device = sequences[0].table.device
        self._progress = lay_progress(sequences)
        self._seeds = np.array([[s.params.seed] for s in sequences], dtype=np.uint64)
        self._uniforms: Tensor | None = None
        self._column = 0
        self.edits = LogitEdits(sequences, self.vocab_size, self._device)
        ways = [way_of(s.params, self.vocab_size, self._device) for s in sequences]
        self.groups = [
            RowGroup(
                way,
                rows := [row for row, other in enumerate(ways) if other is way],
                [sequences[row].params for row in rows],
                self.vocab_size,
                self._device,
            )
            for way in dict.fromkeys(ways)
        ]
        self._draws = any(way is not Way.GREEDY for way in ways)

    def uniforms(self) -> Tensor:
        """[R] float64 in [0, 1): each row's number for the token it is about to choose; 0 if no row draws."""
        if not self._draws:
            return torch.zeros(self.num_rows, dtype=torch.float64, device=self._device)
        if self._uniforms is None or self._column == _NUM_UNIFORMS:
            indices = self._progress[:, None] + np.arange(_NUM_UNIFORMS)
            # One row per step, so that what a step reads lies together.
            made = torch.tensor(uniforms(self._seeds, indices.astype(np.uint64)).T)
            if self._device.type == "cuda":
                made = made.pin_memory()
            self._uniforms = made.to(self._device, non_blocking=True)
            self._column = 0
        return self._uniforms[self._column]

    def observe(self, token_ids: Tensor) -> None:
        """Tells which token each row has gained: [R] int64 on the device, as `sample` returned them."""
        self._progress += 1
        self._column += 1
        self.edits.observe(token_ids.clamp(min=0))


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Raw logits [R, V] float32, which are left as they are -> token ids [R] int64, on the same device.

    A row without a distribution gets NO_TOKEN: its sequence has to be failed, and its id never be looked up.
    The same call gives the same ids until `observe`. Does not wait for a GPU.
    """
    edited = batch.edits.apply(logits)
    numbers = batch.uniforms()
    if len(batch.groups) == 1:
        token_ids, maxima = batch.groups[0].choose(edited, numbers)
    else:
        token_ids = torch.empty(batch.num_rows, dtype=torch.int64, device=logits.device)
        maxima = torch.empty(batch.num_rows, dtype=logits.dtype, device=logits.device)
        for group in batch.groups:
            chosen, highest = group.choose(
                edited.index_select(0, group.rows), numbers.index_select(0, group.rows)
            )
            token_ids[group.rows] = chosen
            maxima[group.rows] = highest
    return torch.where(maxima.isfinite(), token_ids, NO_TOKEN)
