"""What sequences keep between steps for their sampling. Knows no logits.

    SequenceSampling ──has, if its penalties need it──► row of PenaltyTable ◄──of some── Penalties of a batch

Rows stay where they are while batches come and go, so that a sequence that joins or leaves costs the others
nothing. Only how many tokens were generated is counted by the newest batch over a sequence, so that no older
one may go on.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_shard.sampling.params import SamplingParams

IntArray = npt.NDArray[np.int64]

_FIRST_NUM_ROWS = 4
_FIRST_NUM_COLUMNS = 256


class PenaltyTable:
    """Output counts and touched tokens of every sequence with penalties, a row each, on the device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.counts: Tensor = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        """[rows, V]: how often each token is in the output."""
        self.history: Tensor = torch.zeros((0, _FIRST_NUM_COLUMNS), dtype=torch.int32, device=device)
        """[rows, C]: the tokens that penalties touch, in order; behind the last any of them, or 0."""
        self._free: list[int] = []

    def add(self, touched: IntArray, output: IntArray) -> int:
        """A row for a sequence whose penalties touch these tokens by now, of which some are in the output."""
        if not self._free:
            self._grow_rows()
        row = self._free.pop()
        self.reserve(len(touched))
        counts = np.bincount(output, minlength=self.vocab_size).astype(np.int32)
        self.counts[row] = torch.from_numpy(counts).to(self.device)
        # A repeated id changes nothing, so the first one fills what is unused.
        filled = np.full(self.history.shape[1], touched[0] if len(touched) else 0, dtype=np.int32)
        filled[: len(touched)] = touched
        self.history[row] = torch.from_numpy(filled).to(self.device)
        return row

    def free(self, row: int) -> None:
        """Its sequence is gone."""
        self._free.append(row)

    def reserve(self, num_columns: int) -> None:
        """Have room for so many touched tokens in each row."""
        missing = num_columns - self.history.shape[1]
        if missing > 0:
            spare = self.history[:, :1].expand(-1, max(missing, self.history.shape[1]))
            self.history = torch.cat([self.history, spare], dim=1)

    def _grow_rows(self) -> None:
        old = len(self.counts)
        new = max(_FIRST_NUM_ROWS, old)
        self.counts = torch.cat([self.counts, self.counts.new_zeros((new, self.vocab_size))])
        self.history = torch.cat([self.history, self.history.new_zeros((new, self.history.shape[1]))])
        self._free += range(old + new - 1, old - 1, -1)


class SequenceSampling:
    """The sampling of one sequence: what was asked, how far it is, and which tokens its penalties touch."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | IntArray,
        output_ids: Sequence[int] | IntArray,
        table: PenaltyTable,
    ) -> None:
        """After a preemption, `output_ids` is what was generated before it: the rest follows unchanged.

        Raises ValueError for an id outside the vocabulary, or an empty prompt.
        """
        self.params = params
        self.table = table
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
            _check_ids(name, ids, table.vocab_size)
        self.progress: IntArray = np.array([len(output)], dtype=np.int64)
        """Array of which element `place` is the number of tokens generated; shared by a batch."""
        self.place = 0
        self.num_prompt_history = len(prompt) if params.repetition_penalty != 1 else 0
        self.row: int | None = None
        """In the table; None where the parameters use no history."""
        if params.uses_history:
            touched = np.concatenate([prompt, output]) if self.num_prompt_history else output
            self.row = table.add(touched, output)

    def close(self) -> None:
        """The sequence is gone; it is in no batch any more."""
        if self.row is not None:
            self.table.free(self.row)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far: the index of the next one."""
        return int(self.progress[self.place])

    @property
    def num_history(self) -> int:
        """Tokens that penalties touch."""
        return self.num_prompt_history + self.num_generated


class Penalties:
    """Of the P sequences of a batch that use a history: rows in the table, and the penalties themselves."""

    def __init__(self, sequences: Sequence[SequenceSampling]) -> None:
        self._table = sequences[0].table
        self._device = self._table.device
        self.repetition = self._column([s.params.repetition_penalty for s in sequences])
        """[P, 1] float32, as are the next two."""
        self.presence = self._column([s.params.presence_penalty for s in sequences])
        self.frequency = self._column([s.params.frequency_penalty for s in sequences])
        self._rows = torch.tensor([s.row for s in sequences], dtype=torch.int64, device=self._device)
        self._starts = self._rows.unsqueeze(1) * self._table.vocab_size
        self._ones = torch.ones(len(sequences), dtype=torch.int32, device=self._device)
        lengths = [s.num_history for s in sequences]
        self._width = max(lengths)
        self._ends = torch.tensor(lengths, dtype=torch.int64, device=self._device)

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device).unsqueeze(1)

    def touched(self) -> tuple[Tensor, Tensor]:
        """Ids [P, C] int64 that penalties touch, with repeats, and how often each is in the output, int32.

        A sequence without any is given ids whose count is 0 and whose repetition penalty is 1.
        """
        ids = self._table.history[:, : self._width].index_select(0, self._rows).long()
        return ids, self._table.counts.view(-1)[self._starts + ids]

    def append(self, token_ids: Tensor) -> None:
        """Counts one more generated token of each sequence; [P] int64, none negative."""
        table = self._table
        table.reserve(self._width + 1)
        table.counts.view(-1).index_add_(0, self._starts.squeeze(1) + token_ids, self._ones)
        table.history[self._rows, self._ends] = token_ids.to(table.history.dtype)
        self._ends += 1
        self._width += 1


def lay_progress(sequences: Sequence[SequenceSampling]) -> IntArray:
    """[R] int64: tokens generated by each sequence; the sequences look at it from now on."""
    progress = np.array([s.num_generated for s in sequences], dtype=np.int64)
    for row, sequence in enumerate(sequences):
        sequence.progress, sequence.place = progress, row
    return progress


def _check_ids(name: str, ids: IntArray, vocab_size: int) -> None:
    """Raises ValueError unless every id is in the vocabulary."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ValueError(f"{name} has token id {wrong[0]}; ids must be from 0 to {vocab_size - 1}")
