"""Conversion: a step and its result survive the wire."""

from headrace_proto import shard_pb2 as pb
from headrace_router.scheduling.limits import Capacity, Plan
from headrace_router.scheduling.request import Request, SamplingParams, Sequence
from headrace_router.scheduling.step import Arrival, PromptLogprobs, SampledToken, Step
from headrace_router.shards import convert


def _sequence(number: int, **fields: object) -> Sequence:
    values = {"prompt_ids": (5, 6, 7), "sampling": SamplingParams(), "max_new_tokens": 3} | fields
    return Sequence(id=number, request=Request(**values), arrived_at=0.0)  # type: ignore[arg-type]


def _arrival(sequence: Sequence, *, num_computed: int = 0) -> Step:
    """A step of one new sequence."""
    arrival = Arrival(sequence=sequence, num_computed=num_computed)
    return Step(id=8, sequences=[sequence], num_tokens=[1], num_new_blocks=[0], arrivals=[arrival])


PARAMS = SamplingParams(
    temperature=0.5,
    top_k=4,
    top_p=0.75,
    min_p=0.25,
    typical_p=0.5,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    seed=2**64 - 1,
    logit_bias=((3, -1.5), (4, 100.0)),
)


def test_new_sequences_travel_in_full_and_known_ones_as_differences() -> None:
    ends = {"eos_token_ids": frozenset({9, 1}), "stop_token_ids": frozenset({4}), "min_new_tokens": 2}
    tops = {"top_n_tokens": 3, "prompt_logprobs": True, "prompt_top_n_tokens": 5}
    new = _sequence(2**63, sampling=PARAMS, **ends, **tops)
    message = convert.to_step_request(
        Step(
            id=8,
            sequences=[_sequence(1), new],
            num_tokens=[1, 2],
            num_new_blocks=[1, 2],
            new_blocks=[7, 1, 2],
            copies=[(9, 1), (9, 2)],
            arrivals=[Arrival(sequence=new, num_computed=1)],
            dropped_ids=[4, 5],
            total_tokens=3,
            max_seconds=0.25,
        )
    )
    sampling = pb.SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        seed=2**64 - 1,
        bias_token_ids=[3, 4],
        bias_values=[-1.5, 100.0],
        min_new_tokens=2,
        suppressed_token_ids=[1, 4, 9],
    )
    assert message == pb.StepRequest(
        step_id=8,
        dropped_ids=[4, 5],
        ids=[1, 2**63],
        num_tokens=[1, 2],
        num_new_blocks=[1, 2],
        new_blocks=[7, 1, 2],
        copied_from=[9, 9],
        copied_to=[1, 2],
        max_seconds=0.25,
        new_sequences=[
            pb.NewSequence(
                id=2**63,
                token_ids=[5, 6, 7],
                num_prompt_tokens=3,
                num_computed_tokens=1,
                top_n_tokens=3,
                prompt_logprobs=True,
                prompt_top_n_tokens=5,
                sampling=sampling,
            )
        ],
    )


def test_a_preempted_sequence_brings_its_output_and_wants_no_prompt_logprobs_again() -> None:
    sequence = _sequence(1, prompt_logprobs=True, prompt_top_n_tokens=2)
    sequence.output_ids = [8, 9]
    (new,) = convert.to_step_request(_arrival(sequence, num_computed=4)).new_sequences
    assert (list(new.token_ids), new.num_prompt_tokens) == ([5, 6, 7, 8, 9], 3)
    assert new.num_computed_tokens == 4
    assert (new.prompt_logprobs, new.prompt_top_n_tokens) == (False, 0)
    assert not new.sampling.suppressed_token_ids


def test_a_result() -> None:
    result = convert.from_step_response(
        pb.StepResponse(
            ids=[1, 2],
            token_ids=[10, 20],
            logprobs=[-0.5, -1.0],
            top_counts=[0, 2],
            top_token_ids=[20, 21],
            top_logprobs=[-1.0, -2.0],
            prompt_logprobs=[
                pb.PromptLogprobs(
                    id=1,
                    start=1,
                    logprobs=[-1.0, -2.0],
                    num_top=1,
                    top_token_ids=[4, 5],
                    top_logprobs=[-0.5, -0.25],
                ),
                pb.PromptLogprobs(id=2, start=4, logprobs=[-1.0]),
            ],
            errors=[pb.SequenceError(id=9, message="no")],
            forward_seconds=0.5,
            sample_seconds=0.25,
            idle_seconds=0.125,
            num_sequences=2,
            shortened_id=2**63,
            num_left=7,
        )
    )
    assert result.tokens == [
        SampledToken(sequence_id=1, token_id=10, logprob=-0.5),
        SampledToken(sequence_id=2, token_id=20, logprob=-1.0, top=[(20, -1.0), (21, -2.0)]),
    ]
    assert result.prompt_logprobs == [
        PromptLogprobs(sequence_id=1, start=1, logprobs=[-1.0, -2.0], top=[[(4, -0.5)], [(5, -0.25)]]),
        PromptLogprobs(sequence_id=2, start=4, logprobs=[-1.0], top=[[]]),
    ]
    assert result.errors == [(9, "no")]
    assert (result.num_sequences, result.idle_seconds) == (2, 0.125)
    assert (result.forward_seconds, result.sample_seconds) == (0.5, 0.25)
    assert (result.shortened_id, result.num_left) == (2**63, 7)


def test_a_step_takes_its_time_and_leaves_nothing_unless_it_says_so() -> None:
    assert convert.to_step_request(_arrival(_sequence(1))).max_seconds == 0
    assert convert.from_step_response(pb.StepResponse(ids=[1], token_ids=[2], logprobs=[-1.0])).num_left == 0


def test_info_and_warmup() -> None:
    info = convert.from_info_response(
        pb.InfoResponse(model_type="llama", block_size=16, eos_token_ids=[2, 0, 2], instance="x", notes=["n"])
    )
    assert (info.model_type, info.block_size, info.eos_token_ids) == ("llama", 16, frozenset({0, 2}))
    assert (info.instance, info.notes) == ("x", ("n",))
    planned = Plan(max_step_tokens=512, max_step_sequences=8, max_cache_tokens=0)
    assert convert.to_warmup_request(planned) == pb.WarmupRequest(max_step_tokens=512, max_step_sequences=8)
    assert convert.from_warmup_response(
        pb.WarmupResponse(
            num_blocks=3,
            block_bytes=4,
            step_seconds=0.5,
            available_bytes=6,
            step_costs=[pb.StepCost(num_tokens=1, seconds=0.25), pb.StepCost(num_tokens=64, seconds=0.375)],
        )
    ) == Capacity(
        num_blocks=3,
        block_bytes=4,
        step_seconds=0.5,
        available_bytes=6,
        step_costs=((1, 0.25), (64, 0.375)),
    )
