"""Changes to the logits of single tokens: bias, suppression and penalties, each row by its own parameters.

Only the logits of the tokens concerned are read and written. Knows no temperature and no random number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_shard.sampling.processors import penalise
from headrace_shard.sampling.state import Penalties, SequenceSampling


class LogitEdits:
    """What happens to the logits of one batch before temperature and truncation."""

    def __init__(self, sequences: Sequence[SequenceSampling], vocab_size: int, device: torch.device) -> None:
        """Of sequences in row order."""
        self._num_steps = 0
        self._lay_bias(sequences, vocab_size, device)
        self._lay_suppression(sequences, vocab_size, device)
        rows = [row for row, sequence in enumerate(sequences) if sequence.params.uses_history]
        self._penalties = Penalties([sequences[row] for row in rows]) if rows else None
        self._penalty_rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._penalty_starts = self._penalty_rows.unsqueeze(1) * vocab_size

    def _lay_bias(self, sequences: Sequence[SequenceSampling], vocab_size: int, device: torch.device) -> None:
        entries = [
            (row * vocab_size + token_id, value)
            for row, sequence in enumerate(sequences)
            for token_id, value in sequence.params.logit_bias
        ]
        self._bias_index = torch.tensor([index for index, _ in entries], dtype=torch.int64, device=device)
        self._bias = torch.tensor([value for _, value in entries], dtype=torch.float32, device=device)

    def _lay_suppression(
        self, sequences: Sequence[SequenceSampling], vocab_size: int, device: torch.device
    ) -> None:
        entries = [
            (row * vocab_size + token_id, sequence.params.min_new_tokens - sequence.num_generated)
            for row, sequence in enumerate(sequences)
            if sequence.num_generated < sequence.params.min_new_tokens
            for token_id in sequence.params.suppressed_token_ids
        ]
        self._max_suppressed_steps = max((steps for _, steps in entries), default=0)
        self._suppressed = torch.tensor([index for index, _ in entries], dtype=torch.int64, device=device)
        # Counted from the first step of this batch, so that the number of steps is all that changes.
        self._suppressed_steps = torch.tensor(
            [steps for _, steps in entries], dtype=torch.int64, device=device
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Raw logits [R, V] -> edited ones; a copy unless there is nothing to edit."""
        is_suppressing = self._num_steps < self._max_suppressed_steps
        if not (len(self._bias) or is_suppressing or self._penalties):
            return logits
        edited = logits.clone(memory_format=torch.contiguous_format)
        flat = edited.view(-1)
        if len(self._bias):
            flat.index_add_(0, self._bias_index, self._bias)
        if is_suppressing:
            is_suppressed = self._suppressed_steps > self._num_steps
            kept = flat[self._suppressed]
            flat[self._suppressed] = torch.where(is_suppressed, -torch.inf, kept)
        if self._penalties:
            token_ids, counts = self._penalties.touched()
            index = self._penalty_starts + token_ids
            # A repeated id is written more than once, with the same value.
            flat[index] = penalise(
                flat[index],
                counts,
                self._penalties.repetition,
                self._penalties.presence,
                self._penalties.frequency,
            )
        return edited

    def observe(self, token_ids: Tensor) -> None:
        """Counts one more generated token of each row; [R] int64, none negative."""
        self._num_steps += 1
        if self._penalties:
            self._penalties.append(token_ids.index_select(0, self._penalty_rows))
