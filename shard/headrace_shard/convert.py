"""Messages of `shard.proto` as plain values, and back. Checks only what the values cannot express."""

from typing import Any

import numpy as np
from headrace_proto import shard_pb2 as pb

from headrace_shard.batch import IntArray
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.step import NewSequence, PromptLogprobs, Step, StepResult


def from_step_request(request: pb.StepRequest, *, is_decode: bool) -> Step:
    """The step a message asks for. A new sequence that no values can express is in its `refused`."""
    new_sequences: list[NewSequence] = []
    refused: dict[int, str] = {}
    for message in request.new_sequences:
        try:
            new_sequences.append(_new_sequence(message))
        except ValueError as error:
            refused[message.id] = str(error)
    return Step(
        is_decode=is_decode,
        dropped_ids=request.dropped_ids[:],
        new_sequences=new_sequences,
        refused=refused,
        ids=request.ids[:],
        num_tokens=_array(request.num_tokens),
        num_new_blocks=_array(request.num_new_blocks),
        new_blocks=_array(request.new_blocks),
        copied_from=_array(request.copied_from),
        copied_to=_array(request.copied_to),
        max_seconds=request.max_seconds,
    )


def to_step_response(result: StepResult) -> pb.StepResponse:
    """The message that answers a step."""
    return pb.StepResponse(
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
        idle_seconds=result.idle_seconds,
        num_sequences=result.num_sequences,
        shortened_id=result.shortened_id,
        num_left=result.num_left,
    )


def _array(numbers: Any) -> IntArray:
    # A slice of a repeated field is a list, made several times faster than by iterating over the field.
    return np.array(numbers[:], dtype=np.int64)


def _new_sequence(message: pb.NewSequence) -> NewSequence:
    """Raises ValueError for sampling parameters out of range."""
    return NewSequence(
        id=message.id,
        token_ids=_array(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        sampling=_sampling(message.sampling),
        num_top=message.top_n_tokens,
        num_prompt_top=message.prompt_top_n_tokens if message.prompt_logprobs else None,
    )


def _sampling(message: pb.SamplingParams) -> SamplingParams:
    if len(message.bias_token_ids) != len(message.bias_values):
        raise ValueError(
            "bias_token_ids and bias_values must be of one length, "
            f"got {len(message.bias_token_ids)} and {len(message.bias_values)}"
        )
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        typical_p=message.typical_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        logit_bias=tuple(zip(message.bias_token_ids, message.bias_values, strict=True)),
        min_new_tokens=message.min_new_tokens,
        suppressed_token_ids=tuple(message.suppressed_token_ids),
    )


def _prompt_logprobs(part: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        id=part.id,
        start=part.start,
        logprobs=part.logprobs,
        num_top=part.num_top,
        top_token_ids=part.top_token_ids,
        top_logprobs=part.top_logprobs,
    )
