"""What one sequence keeps between steps for its sampling. Knows no logits and no other sequence's tokens.

    SequenceSampling ──several, side by side──► Penalties (counts [P + 1, V], history [P, C])
            ▲                                        │
            └── looks at its own row ────────────────┘

Laying sequences side by side moves their state into the newest batch; each of them then looks at its row of
it. So the newest batch over a sequence is the only one that may go on.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_shard.sampling.params import SamplingParams

IntArray = npt.NDArray[np.int64]

_SPARE_COLUMNS = 64


class SequenceSampling:
    """The sampling of one sequence: what was asked, how far it is, and which tokens its penalties touch."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | IntArray,
        output_ids: Sequence[int] | IntArray,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """After a preemption, `output_ids` is what was generated before it: the rest follows unchanged.

        Raises ValueError for an id outside the vocabulary, or an empty prompt.
        """
        self.params = params
        self.vocab_size = vocab_size
        self.device = device
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        output = np.asarray(output_ids, dtype=np.int64)
        if len(prompt) == 0:
            raise ValueError("the prompt has no token; it must have at least one")
        bias = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        suppressed = np.array(params.suppressed_token_ids, dtype=np.int64)
        for name, ids in (
            ("prompt", prompt),
            ("output", output),
            ("logit_bias", bias),
            ("suppressed_token_ids", suppressed),
        ):
            _check_ids(name, ids, vocab_size)
        self.progress: IntArray = np.array([len(output)], dtype=np.int64)
        """Array of which element `row` is the number of tokens generated; shared by a batch."""
        self.row = 0
        self.counts: Tensor | None = None
        """[V] int32: how often each token is in the output; only where the parameters use it."""
        self.history: Tensor | None = None
        """[at least num_history] int64: the tokens that penalties touch, with repeats."""
        self.num_prompt_history = len(prompt) if params.repetition_penalty != 1 else 0
        if params.uses_counts:
            counts = np.bincount(output, minlength=vocab_size).astype(np.int32)
            self.counts = torch.tensor(counts, device=device)
        if params.uses_history:
            touched = np.concatenate([prompt, output]) if self.num_prompt_history else output
            self.history = torch.tensor(touched, device=device)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far: the index of the next one."""
        return int(self.progress[self.row])

    @property
    def num_history(self) -> int:
        """Entries of `history` that count."""
        return self.num_prompt_history + self.num_generated


class Penalties:
    """Counts and histories of P sequences that use them, and the penalties themselves, as tensors."""

    def __init__(self, sequences: Sequence[SequenceSampling]) -> None:
        """Takes over the state of the sequences, all of which use a history."""
        self._sequences = list(sequences)
        self._device = sequences[0].device
        self._vocab_size = sequences[0].vocab_size
        self.repetition = self._column([s.params.repetition_penalty for s in sequences])
        """[P, 1] float32, as are the next two."""
        self.presence = self._column([s.params.presence_penalty for s in sequences])
        self.frequency = self._column([s.params.frequency_penalty for s in sequences])
        self._lay_counts()
        self._lay_history()

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device).unsqueeze(1)

    def _lay_counts(self) -> None:
        counting = [s for s in self._sequences if s.counts is not None]
        # The last row stays zero, for sequences without counts.
        self._counts = torch.zeros(
            (len(counting) + 1, self._vocab_size), dtype=torch.int32, device=self._device
        )
        row_of = {}
        for row, sequence in enumerate(counting):
            assert sequence.counts is not None
            self._counts[row] = sequence.counts
            sequence.counts = self._counts[row]
            row_of[id(sequence)] = row
        rows = [row_of.get(id(s), len(counting)) for s in self._sequences]
        self._starts = torch.tensor(rows, device=self._device).unsqueeze(1) * self._vocab_size
        increments = [int(s.counts is not None) for s in self._sequences]
        self._increments = torch.tensor(increments, dtype=torch.int32, device=self._device)

    def _lay_history(self) -> None:
        lengths = [s.num_history for s in self._sequences]
        self._width = max(lengths)
        self._history = torch.zeros(
            (len(lengths), self._width + _SPARE_COLUMNS), dtype=torch.int64, device=self._device
        )
        for row, (sequence, length) in enumerate(zip(self._sequences, lengths, strict=True)):
            assert sequence.history is not None
            if length:
                # A repeated id changes nothing, so the first one fills what is unused.
                self._history[row] = sequence.history[0]
                self._history[row, :length] = sequence.history[:length]
            sequence.history = self._history[row]
        self._ends = torch.tensor(lengths, device=self._device).unsqueeze(1)

    def touched(self) -> tuple[Tensor, Tensor]:
        """Ids [P, C] int64 that penalties touch, with repeats, and how often each is in the output, int32.

        A sequence without any is given ids whose count is 0 and whose repetition penalty is 1.
        """
        ids = self._history[:, : self._width]
        return ids, self._counts.view(-1)[self._starts + ids]

    def append(self, token_ids: Tensor) -> None:
        """Counts one more generated token of each sequence; [P] int64, none negative."""
        if self._width == self._history.shape[1]:
            self._widen()
        index = self._starts.squeeze(1) + token_ids
        self._counts.view(-1).index_add_(0, index, self._increments)
        self._history.scatter_(1, self._ends, token_ids.unsqueeze(1))
        self._ends += 1
        self._width += 1

    def _widen(self) -> None:
        spare = self._history[:, :1].expand(-1, self._history.shape[1])
        self._history = torch.cat([self._history, spare], dim=1)
        for row, sequence in enumerate(self._sequences):
            sequence.history = self._history[row]


def lay_progress(sequences: Sequence[SequenceSampling]) -> IntArray:
    """[R] int64: tokens generated by each sequence; the sequences look at it from now on."""
    progress = np.array([s.num_generated for s in sequences], dtype=np.int64)
    for row, sequence in enumerate(sequences):
        sequence.progress, sequence.row = progress, row
    return progress


def _check_ids(name: str, ids: IntArray, vocab_size: int) -> None:
    """Raises ValueError unless every id is in the vocabulary."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ValueError(f"{name} has token id {wrong[0]}; ids must be from 0 to {vocab_size - 1}")
