"""Whether a step fits what the shard holds; asked before anything of it is executed. Changes nothing.

What is wrong with a new sequence by itself concerns that sequence alone; what contradicts the shard or the
rest of the step concerns the whole step, which then leaves the shard as it was. What passes cannot fail for
its contents any more, but for `check_holders`, which is asked when all blocks of the step are dealt out.
"""

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_shard.batch import Batch, IntArray
from headrace_shard.errors import InvalidStep
from headrace_shard.step import NewSequence, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What a step is measured against; fixed by the model and by `Warmup`."""

    vocab_size: int
    max_positions: int
    num_blocks: int
    max_step_tokens: int
    max_step_sequences: int


def check_lengths(step: Step) -> None:
    """Raises InvalidStep when the lists of a step do not fit each other, or its time is none."""
    if not len(step.ids) == len(step.num_tokens) == len(step.num_new_blocks):
        raise InvalidStep(
            f"ids, num_tokens and num_new_blocks must be of one length, got {len(step.ids)}, "
            f"{len(step.num_tokens)} and {len(step.num_new_blocks)}"
        )
    if len(step.copied_from) != len(step.copied_to):
        raise InvalidStep(
            "copied_from and copied_to must be of one length, "
            f"got {len(step.copied_from)} and {len(step.copied_to)}"
        )
    if not 0 <= step.max_seconds < math.inf:
        raise InvalidStep(f"max_seconds must be a number from 0, got {step.max_seconds}")
    granted = int(step.num_new_blocks.sum())
    if granted != len(step.new_blocks):
        raise InvalidStep(f"num_new_blocks adds up to {granted}, but new_blocks has {len(step.new_blocks)}")


def check(step: Step, batch: Batch, limits: StepLimits) -> dict[int, str]:
    """Gives the new sequences that cannot be taken in, and why; without them the step can be executed.

    Raises InvalidStep, with the first thing that is wrong, if it cannot. The lengths of its lists have been
    checked.
    """
    arriving = {sequence.id: sequence for sequence in step.new_sequences}
    new = arriving.keys() | step.refused.keys()
    if len(new) != len(step.new_sequences) + len(step.refused):
        raise InvalidStep("a new sequence is given twice in new_sequences")
    _check_names(step, batch, new)
    if step.is_decode and (new or (step.num_tokens > 1).any()):
        raise InvalidStep("Decode takes known sequences with one token each; send this step as Prefill")
    refused = dict(step.refused)
    for sequence in step.new_sequences:
        fault = _fault(sequence, limits)
        if fault is not None:
            refused[sequence.id] = fault
    if refused:
        step = step.without(refused)
    if len(step.copied_to):
        _check_copies(step, limits)
    if step.ids:
        held = _Held(step, batch, arriving)
        _check_counts(step, held, limits)
        _check_blocks(step, held, batch.block_size, limits)
    return refused


def check_holders(written: npt.NDArray[np.integer[Any]], batch: Batch, *, most: int) -> None:
    """Raises InvalidStep when more than `most` sequences hold one of the blocks `written` [W].

    What several sequences hold, all of them read; so nobody may write to it.
    """
    index = _first(batch.num_holders(written) > most)
    if index is not None:
        raise InvalidStep(
            f"block {written[index]} would be written to, but others hold it; share only blocks that are "
            "computed, and copy one that is to be continued"
        )


class _Held:
    """What the scheduled sequences hold before the step; arrays [S]."""

    def __init__(self, step: Step, batch: Batch, arriving: dict[int, NewSequence]) -> None:
        # A new sequence may have the id of one that is dropped in the same step: then row 0 stands in for it.
        rows = np.array(
            [0 if arriving and number in arriving else batch.row_of[number] for number in step.ids],
            dtype=np.int64,
        )
        self.num_tokens: IntArray = batch.num_tokens[rows]
        self.num_computed: IntArray = batch.num_computed[rows]
        self.num_blocks: IntArray = batch.num_blocks[rows]
        if arriving:
            for index, number in enumerate(step.ids):
                if number in arriving:
                    self.num_tokens[index] = len(arriving[number].token_ids)
                    self.num_computed[index] = arriving[number].num_computed_tokens
                    self.num_blocks[index] = 0


def _check_names(step: Step, batch: Batch, new: Set[int]) -> None:
    scheduled = set(step.ids)
    if len(scheduled) != len(step.ids):
        twice = next(number for number in step.ids if step.ids.count(number) > 1)
        raise InvalidStep(f"sequence {twice} is scheduled twice")
    dropped = set(step.dropped_ids)
    again = next((number for number in new if number in batch.row_of and number not in dropped), None)
    if again is not None:
        raise InvalidStep(f"sequence {again} is sent as new, but the shard holds it; drop it first")
    unscheduled = new - scheduled
    if unscheduled:
        raise InvalidStep(f"sequence {min(unscheduled)} is new, but not scheduled")
    unknown = scheduled.difference(new).difference(batch.row_of.keys() - dropped if dropped else batch.row_of)
    if unknown:
        raise InvalidStep(f"sequence {min(unknown)} is not known to the shard; send it as a new one")


def _fault(sequence: NewSequence, limits: StepLimits) -> str | None:
    """What is wrong with a new sequence by itself."""
    count = len(sequence.token_ids)
    if not 1 <= sequence.num_prompt_tokens <= count:
        return (
            f"num_prompt_tokens must be from 1 to the number of token_ids ({count}), "
            f"got {sequence.num_prompt_tokens}"
        )
    if sequence.num_computed_tokens >= count:
        return (
            f"num_computed_tokens must leave one of its {count} tokens to compute, "
            f"got {sequence.num_computed_tokens}"
        )
    if count > limits.max_positions:
        return f"a context of {count} tokens is over the model's {limits.max_positions}"
    params = sequence.sampling
    for name, token_ids in (
        ("token_ids", sequence.token_ids),
        ("bias_token_ids", np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)),
        ("suppressed_token_ids", np.array(params.suppressed_token_ids, dtype=np.int64)),
    ):
        if len(token_ids) and int(token_ids.max()) >= limits.vocab_size:
            return (
                f"{name}: token ids must be below the vocabulary size {limits.vocab_size}, "
                f"got {int(token_ids.max())}"
            )
    for name, number in (
        ("top_n_tokens", sequence.num_top),
        ("prompt_top_n_tokens", sequence.num_prompt_top),
    ):
        if number is not None and number > limits.vocab_size:
            return f"{name} must be at most {limits.vocab_size}, got {number}"
    return None


def _check_counts(step: Step, held: _Held, limits: StepLimits) -> None:
    pending = held.num_tokens - held.num_computed
    index = _first((step.num_tokens < 1) | (step.num_tokens > pending))
    if index is not None:
        raise InvalidStep(
            f"sequence {step.ids[index]}: num_tokens must be from 1 to the {pending[index]} it has "
            f"to compute, got {step.num_tokens[index]}"
        )
    index = _first(held.num_computed + step.num_tokens > limits.max_positions)
    if index is not None:
        raise InvalidStep(
            f"sequence {step.ids[index]}: a context of {held.num_computed[index] + step.num_tokens[index]} "
            f"tokens is over the model's {limits.max_positions}"
        )
    total = int(step.num_tokens.sum())
    if total > limits.max_step_tokens:
        raise InvalidStep(f"the step has {total} tokens; Warmup was told of at most {limits.max_step_tokens}")
    if len(step.ids) > limits.max_step_sequences:
        raise InvalidStep(
            f"the step has {len(step.ids)} sequences; Warmup was told of at most {limits.max_step_sequences}"
        )


def _check_exist(blocks: IntArray, limits: StepLimits) -> None:
    if len(blocks) and int(blocks.max()) >= limits.num_blocks:
        raise InvalidStep(f"block {int(blocks.max())} does not exist; there are {limits.num_blocks}, from 0")


def _check_copies(step: Step, limits: StepLimits) -> None:
    """All copies are made at once, so none may depend on another."""
    _check_exist(np.concatenate((step.copied_from, step.copied_to)), limits)
    targets, counts = np.unique(step.copied_to, return_counts=True)
    if len(targets) < len(step.copied_to):
        raise InvalidStep(f"block {targets[counts.argmax()]} is copied to twice in one step")
    both = np.intersect1d(step.copied_from, targets)
    if len(both):
        raise InvalidStep(f"block {both[0]} is copied both from and to in one step")


def _check_blocks(step: Step, held: _Held, block_size: int, limits: StepLimits) -> None:
    _check_exist(step.new_blocks, limits)
    owned = held.num_blocks + step.num_new_blocks
    needed = held.num_computed + step.num_tokens
    index = _first(owned * block_size < needed)
    if index is not None:
        raise InvalidStep(
            f"sequence {step.ids[index]}: its {owned[index]} blocks of {block_size} tokens cannot hold "
            f"{needed[index]} tokens"
        )


def _first(wrong: npt.NDArray[np.bool_]) -> int | None:
    """Index of the first True."""
    return int(wrong.argmax()) if wrong.any() else None
