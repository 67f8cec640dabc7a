"""The router's plain values as messages of `shard.proto`, and back. Knows no connection and no policy."""

from headrace_proto import shard_pb2 as pb

from headrace_router.scheduling.limits import Capacity, Plan, ShardInfo
from headrace_router.scheduling.request import SamplingParams, Sequence
from headrace_router.scheduling.step import Arrival, PromptLogprobs, SampledToken, Step, StepResult


def to_step_request(step: Step) -> pb.StepRequest:
    """The message of `Prefill` or `Decode`."""
    return pb.StepRequest(
        step_id=step.id,
        dropped_ids=step.dropped_ids,
        new_sequences=[_new_sequence(arrival) for arrival in step.arrivals],
        ids=[sequence.id for sequence in step.sequences],
        num_tokens=step.num_tokens,
        num_new_blocks=step.num_new_blocks,
        new_blocks=step.new_blocks,
        copied_from=[source for source, _ in step.copies],
        copied_to=[target for _, target in step.copies],
        max_seconds=step.max_seconds,
    )


def _new_sequence(arrival: Arrival) -> pb.NewSequence:
    sequence, request = arrival.sequence, arrival.sequence.request
    return pb.NewSequence(
        id=sequence.id,
        token_ids=[*request.prompt_ids, *sequence.output_ids],
        num_prompt_tokens=len(request.prompt_ids),
        num_computed_tokens=arrival.num_computed,
        sampling=_sampling(request.sampling, sequence),
        top_n_tokens=request.top_n_tokens,
        prompt_logprobs=sequence.wants_prompt_logprobs,
        prompt_top_n_tokens=request.prompt_top_n_tokens if sequence.wants_prompt_logprobs else 0,
    )


def _sampling(params: SamplingParams, sequence: Sequence) -> pb.SamplingParams:
    request = sequence.request
    # What would end the sequence cannot be chosen before it may end.
    suppressed = request.eos_token_ids | request.stop_token_ids if request.min_new_tokens else ()
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        bias_token_ids=[token_id for token_id, _ in params.logit_bias],
        bias_values=[bias for _, bias in params.logit_bias],
        min_new_tokens=request.min_new_tokens,
        suppressed_token_ids=sorted(suppressed),
    )


def from_step_response(response: pb.StepResponse) -> StepResult:
    """What a step brought back."""
    return StepResult(
        tokens=_tokens(response),
        prompt_logprobs=[_prompt_logprobs(part) for part in response.prompt_logprobs],
        errors=[(error.id, error.message) for error in response.errors],
        forward_seconds=response.forward_seconds,
        sample_seconds=response.sample_seconds,
        idle_seconds=response.idle_seconds,
        num_sequences=response.num_sequences,
        shortened_id=response.shortened_id,
        num_left=response.num_left,
    )


def _tokens(response: pb.StepResponse) -> list[SampledToken]:
    tokens = [
        SampledToken(sequence_id=sequence_id, token_id=token_id, logprob=logprob)
        for sequence_id, token_id, logprob in zip(
            response.ids, response.token_ids, response.logprobs, strict=True
        )
    ]
    if response.top_token_ids:
        alternatives = list(zip(response.top_token_ids, response.top_logprobs, strict=True))
        start = 0
        for token, count in zip(tokens, response.top_counts, strict=True):
            token.top = alternatives[start : start + count]
            start += count
    return tokens


def _prompt_logprobs(part: pb.PromptLogprobs) -> PromptLogprobs:
    alternatives = list(zip(part.top_token_ids, part.top_logprobs, strict=True))
    num_top, num_tokens = part.num_top, len(part.logprobs)
    return PromptLogprobs(
        sequence_id=part.id,
        start=part.start,
        logprobs=list(part.logprobs),
        top=[alternatives[row * num_top : (row + 1) * num_top] for row in range(num_tokens)],
    )


def to_warmup_request(planned: Plan) -> pb.WarmupRequest:
    return pb.WarmupRequest(
        max_step_tokens=planned.max_step_tokens,
        max_step_sequences=planned.max_step_sequences,
        max_total_tokens=planned.max_cache_tokens,
    )


def from_warmup_response(response: pb.WarmupResponse) -> Capacity:
    return Capacity(
        num_blocks=response.num_blocks,
        block_bytes=response.block_bytes,
        step_seconds=response.step_seconds,
        available_bytes=response.available_bytes,
        step_costs=tuple((cost.num_tokens, cost.seconds) for cost in response.step_costs),
    )


def from_info_response(response: pb.InfoResponse) -> ShardInfo:
    return ShardInfo(
        model_type=response.model_type,
        dtype=response.dtype,
        device=response.device,
        block_size=response.block_size,
        vocab_size=response.vocab_size,
        max_positions=response.max_positions,
        eos_token_ids=frozenset(response.eos_token_ids),
        weight_bytes=response.weight_bytes,
        version=response.version,
        instance=response.instance,
        notes=tuple(response.notes),
    )
