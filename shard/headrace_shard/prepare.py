"""From a batch and a step to the tensors of one forward pass. Knows what is wanted, not how it is computed.

Everything is worked out on the host with whole-array operations from counts the host knows; only token values
are gathered on the device. A step of decodes therefore costs the same few operations for any number of rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_shard.batch import Batch, IntArray
from headrace_shard.inputs import ForwardInputs

_NONE: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens of one sequence whose log-probabilities this step gives."""

    index: int
    """Which sequence of the step."""
    start: int
    """Position of the first of them; row i of the forward pass speaks of the token at position i + 1."""
    count: int


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Inputs of the forward pass, and who is to get what of its rows.

    `inputs.logit_rows` holds first one row for each sequence that samples, then the rows of `prompt_parts`.
    """

    inputs: ForwardInputs
    sampled: IntArray
    """[R] host: which sequences of the step reach their last token and sample, ascending."""
    sampled_rows: Tensor
    """[R] int64: their rows in the batch."""
    sampled_columns: Tensor
    """[R] int64: where in these rows the new tokens go."""
    prompt_parts: list[PromptPart]
    blocks: npt.NDArray[np.int32]
    """[T] host: the block that each token's keys and values go to."""
    prompt_targets: Tensor
    """[P] int64: the prompt tokens that the last P of `logit_rows` predict."""


def prepare(batch: Batch, rows: IntArray, num_tokens: IntArray, max_seconds: float = 0.0) -> PreparedStep:
    """Inputs for the sequences in `rows` [S], which compute their next `num_tokens` [S] tokens.

    For the sake of `max_seconds` the last sequence may be left with a block of tokens, if nobody wants its
    rows: however slow the machine, it gets on.

    A prompt's token i + 1 is predicted by row i, so that the last row of a chunk speaks of the first token of
    the next chunk.
    """
    first = batch.num_computed[rows]
    context_lens = first + num_tokens
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(num_tokens, out=starts[1:])
    token_rows = np.repeat(rows, num_tokens)
    positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], num_tokens)
    block_size = batch.block_size
    blocks = batch.block_table[token_rows, positions // block_size]
    slots = blocks.astype(np.int64) * block_size
    slots += positions % block_size
    width = -(-int(context_lens.max()) // block_size)
    totals = batch.num_tokens[rows]
    sampled = np.flatnonzero(context_lens == totals)
    last_rows = starts[1:] - 1
    parts, part_rows = _prompt_parts(batch, rows, first, context_lens, starts)
    is_last_silent = context_lens[-1] < totals[-1] and batch.num_prompt_top[rows[-1]] < 0
    logit_rows = last_rows[sampled]
    if parts:
        logit_rows = np.concatenate((logit_rows, part_rows))
    where = (rows[sampled], totals[sampled], token_rows[part_rows], positions[part_rows] + 1)
    wide = _to_device(batch.device, token_rows, positions, slots, logit_rows, *where)
    device_token_rows, device_positions, device_slots, device_logit_rows, *places = wide
    sampled_rows, sampled_columns, target_rows, target_columns = places
    query_starts, device_lens, tables = _to_device(
        batch.device,
        starts.astype(np.int32),
        context_lens.astype(np.int32),
        batch.block_table[:, :width].take(rows, axis=0),
    )
    tokens = batch.tokens
    inputs = ForwardInputs(
        token_ids=tokens[device_token_rows, device_positions].long(),
        positions=device_positions,
        slots=device_slots,
        query_starts=query_starts,
        context_lens=device_lens,
        block_tables=tables,
        logit_rows=device_logit_rows,
        host_query_lens=num_tokens,
        host_context_lens=context_lens,
        max_seconds=max_seconds if is_last_silent else 0.0,
        min_tokens=int(starts[-2]) + min(block_size, int(num_tokens[-1])),
    )
    prompt_targets = tokens[target_rows, target_columns].long() if parts else target_rows
    return PreparedStep(inputs, sampled, sampled_rows, sampled_columns, parts, blocks, prompt_targets)


def _prompt_parts(
    batch: Batch, rows: IntArray, first: IntArray, context_lens: IntArray, starts: IntArray
) -> tuple[list[PromptPart], IntArray]:
    """Who gets prompt log-probabilities, and the rows [P] of the forward pass that give them."""
    parts: list[PromptPart] = []
    pieces: list[IntArray] = []
    for index in np.flatnonzero(batch.num_prompt_top[rows] >= 0).tolist():
        # The row of the last prompt token predicts an output token.
        count = int(min(context_lens[index], batch.num_prompt[rows[index]] - 1) - first[index])
        if count > 0:
            parts.append(PromptPart(index, int(first[index]) + 1, count))
            pieces.append(np.arange(starts[index], starts[index] + count))
    return parts, np.concatenate(pieces) if pieces else _NONE


def _to_device(device: torch.device, *arrays: npt.NDArray[np.generic]) -> list[Tensor]:
    """Arrays of one dtype as tensors on `device`, in a single copy where there is anything to copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).pin_memory()
    pieces = torch.split(packed.to(device, non_blocking=True), [array.size for array in arrays])
    return [piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]
