"""Messages of `shard.proto` as plain values, and back. Checks only what the values cannot express."""

from typing import Any

import numpy as np
from headrace_proto import shard_pb2 as pb

from headrace_shard.batch import IntArray
from headrace_shard.errors import InvalidStep
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.step import NewSequence, PromptLogprobs, Step, StepResult


def from_step_request(request: pb.StepRequest, *, is_decode: bool) -> Step:
    """The step a message asks for. Raises InvalidStep for sampling parameters out of range."""
    return Step(
        id=request.step_id,
        is_decode=is_decode,
        dropped_ids=request.dropped_ids[:],
        new_sequences=[_new_sequence(sequence) for sequence in request.new_sequences],
        ids=request.ids[:],
        num_tokens=_array(request.num_tokens),
        num_new_blocks=_array(request.num_new_blocks),
        new_blocks=_array(request.new_blocks),
    )


def to_step_response(step_id: int, result: StepResult) -> pb.StepResponse:
    """The message that answers step `step_id`."""
    return pb.StepResponse(
        step_id=step_id,
        ids=result.ids,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        top_counts=result.top_counts,
        top_token_ids=result.top_token_ids,
        top_logprobs=result.top_logprobs,
        prompt_logprobs=[_prompt_logprobs(part) for part in result.prompt_logprobs],
        errors=[pb.SequenceError(id=number, message=message) for number, message in result.errors],
        forward_seconds=result.forward_seconds,
        sample_seconds=result.sample_seconds,
        total_seconds=result.total_seconds,
        idle_seconds=result.idle_seconds,
        num_sequences=result.num_sequences,
    )


def _array(numbers: Any) -> IntArray:
    # A slice of a repeated field is a list, made several times faster than by iterating over the field.
    return np.array(numbers[:], dtype=np.int64)


def _new_sequence(message: pb.NewSequence) -> NewSequence:
    return NewSequence(
        id=message.id,
        token_ids=_array(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        sampling=_sampling(message),
        num_top=message.top_n_tokens,
        num_prompt_top=message.prompt_top_n_tokens if message.prompt_logprobs else None,
    )


def _sampling(message: pb.NewSequence) -> SamplingParams:
    sampling = message.sampling
    if len(sampling.bias_token_ids) != len(sampling.bias_values):
        raise InvalidStep(
            f"sequence {message.id}: bias_token_ids and bias_values must be of one length, "
            f"got {len(sampling.bias_token_ids)} and {len(sampling.bias_values)}"
        )
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=tuple(zip(sampling.bias_token_ids, sampling.bias_values, strict=True)),
            min_new_tokens=sampling.min_new_tokens,
            suppressed_token_ids=tuple(sampling.suppressed_token_ids),
        )
    except ValueError as error:
        raise InvalidStep(f"sequence {message.id}: {error}") from error


def _prompt_logprobs(part: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        id=part.id,
        start=part.start,
        logprobs=part.logprobs,
        num_top=part.num_top,
        top_token_ids=part.top_token_ids,
        top_logprobs=part.top_logprobs,
    )
