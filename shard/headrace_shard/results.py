"""From what a step has left on the device to the plain values of its result. Here the host waits for it."""

import numpy as np
from torch import Tensor

from headrace_shard.batch import Batch, IntArray
from headrace_shard.prepare import PreparedStep
from headrace_shard.runner import Runner
from headrace_shard.sampling.logprobs import chosen_and_top, prompt_logprobs
from headrace_shard.step import PromptLogprobs, StepResult

NOT_FINITE = "the model gave logits that are not finite numbers for this sequence"


def put_tokens(
    result: StepResult, ids: list[int], logits: Tensor, sampled: Tensor, num_top: IntArray
) -> list[int]:
    """Enter the tokens `sampled` [R] of the sequences `ids`, and their alternatives, `num_top` [R] for each.

    `logits` [R, vocabulary] are raw, in float32. Gives the sequences for which there was nothing to sample
    from, since their logits are not finite; no token of theirs is entered.
    """
    logprobs, top, top_logprobs = chosen_and_top(logits, sampled, int(num_top.max()))
    values = logprobs.numpy(force=True)
    token_ids = sampled.numpy(force=True)
    # It is NaN where the sampler has found no distribution.
    is_sound = np.isfinite(values)
    failed: list[int] = []
    wanted = np.arange(top.shape[1]) < num_top[:, None]
    if not is_sound.all():
        failed = [number for number, sound in zip(ids, is_sound.tolist(), strict=True) if not sound]
        ids = [number for number, sound in zip(ids, is_sound.tolist(), strict=True) if sound]
        values, token_ids, num_top = values[is_sound], token_ids[is_sound], num_top[is_sound]
        wanted &= is_sound[:, None]
    result.ids = ids
    result.token_ids = token_ids.tolist()
    result.logprobs = values.tolist()
    result.top_counts = num_top.tolist()
    result.top_token_ids = top.numpy(force=True)[wanted].tolist()
    result.top_logprobs = top_logprobs.numpy(force=True)[wanted].tolist()
    return failed


def put_prompt_logprobs(
    result: StepResult,
    ids: list[int],
    batch: Batch,
    rows: IntArray,
    prepared: PreparedStep,
    runner: Runner,
    hidden: Tensor,
) -> None:
    """Enter log-probabilities of prompt tokens, given the hidden states [P, hidden] of `prompt_parts`."""
    end = 0
    for part in prepared.prompt_parts:
        start, end = end, end + part.count
        num_top = int(batch.num_prompt_top[rows[part.index]])
        logprobs, top_token_ids, top_logprobs = prompt_logprobs(
            hidden[start:end], prepared.prompt_targets[start:end], runner.logits, num_top
        )
        result.prompt_logprobs.append(
            PromptLogprobs(
                id=ids[part.index],
                start=part.start,
                logprobs=logprobs.tolist(),
                num_top=num_top,
                top_token_ids=top_token_ids.flatten().tolist(),
                top_logprobs=top_logprobs.flatten().tolist(),
            )
        )
