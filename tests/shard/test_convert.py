"""Messages become plain values and come back: every field, and what no value can express."""

import numpy as np
import pytest
from headrace_proto import shard_pb2 as pb
from headrace_shard.convert import from_step_request, to_step_response
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.step import PromptLogprobs, StepResult

SAMPLING = pb.SamplingParams(
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    min_p=0.125,
    typical_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.0625,
    seed=2**64 - 1,
    bias_token_ids=[3, 1],
    bias_values=[2.5, -1.0],
    min_new_tokens=9,
    suppressed_token_ids=[2, 0],
)


def test_every_field_of_a_request() -> None:
    request = pb.StepRequest(
        step_id=4,
        dropped_ids=[8, 2**63],
        new_sequences=[
            pb.NewSequence(
                id=5,
                token_ids=[1, 2, 3],
                num_prompt_tokens=2,
                num_computed_tokens=1,
                sampling=SAMPLING,
                top_n_tokens=4,
                prompt_logprobs=True,
                prompt_top_n_tokens=6,
            )
        ],
        ids=[5, 6],
        num_tokens=[2, 1],
        num_new_blocks=[1, 0],
        new_blocks=[30],
        copied_from=[7, 8],
        copied_to=[9, 10],
        max_seconds=0.375,
    )
    step = from_step_request(request, is_decode=False)
    assert step.max_seconds == 0.375
    assert (step.is_decode, step.dropped_ids, step.ids, step.refused) == (False, [8, 2**63], [5, 6], {})
    for array, expected in (
        (step.num_tokens, [2, 1]),
        (step.num_new_blocks, [1, 0]),
        (step.new_blocks, [30]),
        (step.copied_from, [7, 8]),
        (step.copied_to, [9, 10]),
    ):
        assert array.dtype == np.int64 and array.tolist() == expected
    (new,) = step.new_sequences
    assert (new.id, new.token_ids.tolist(), new.num_prompt_tokens, new.num_computed_tokens) == (
        5,
        [1, 2, 3],
        2,
        1,
    )
    assert (new.num_top, new.num_prompt_top) == (4, 6)
    assert new.sampling == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.125,
        typical_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.0625,
        seed=2**64 - 1,
        logit_bias=((3, 2.5), (1, -1.0)),
        min_new_tokens=9,
        suppressed_token_ids=(2, 0),
    )


def test_empty_request_is_a_step_of_nothing() -> None:
    step = from_step_request(pb.StepRequest(), is_decode=True)
    assert step.is_decode
    assert not step.ids and not step.new_sequences and not step.dropped_ids
    assert step.num_tokens.dtype == np.int64 and len(step.num_tokens) == 0
    assert step.max_seconds == 0


@pytest.mark.parametrize("num_wanted", [0, 3])
def test_prompt_alternatives_count_only_with_prompt_logprobs(num_wanted: int) -> None:
    message = pb.NewSequence(id=1, sampling=SAMPLING, prompt_top_n_tokens=num_wanted)
    (without,) = from_step_request(pb.StepRequest(new_sequences=[message]), is_decode=False).new_sequences
    assert without.num_prompt_top is None
    message.prompt_logprobs = True
    (new,) = from_step_request(pb.StepRequest(new_sequences=[message]), is_decode=False).new_sequences
    assert new.num_prompt_top == num_wanted


def test_what_no_value_expresses_is_refused_by_itself() -> None:
    request = pb.StepRequest(ids=[1, 2, 3], num_tokens=[1, 1, 1], num_new_blocks=[0, 0, 0])
    for number in (1, 2, 3):
        request.new_sequences.add(id=number, token_ids=[number], num_prompt_tokens=1).sampling.CopyFrom(
            SAMPLING
        )
    request.new_sequences[0].sampling.temperature = float("inf")
    request.new_sequences[2].sampling.bias_values.append(0.0)
    step = from_step_request(request, is_decode=False)
    assert [sequence.id for sequence in step.new_sequences] == [2]
    assert step.ids == [1, 2, 3]
    assert step.refused == {
        1: "temperature is inf; it must be at least 0 and finite",
        3: "bias_token_ids and bias_values must be of one length, got 2 and 3",
    }
    without = step.without(step.refused)
    assert (without.ids, without.refused, without.num_tokens.tolist()) == ([2], {}, [1])


def test_every_field_of_a_result() -> None:
    response = to_step_response(
        StepResult(
            ids=[5, 6],
            token_ids=[10, 11],
            logprobs=[-0.5, -1.0],
            top_counts=[2, 0],
            top_token_ids=[12, 10],
            top_logprobs=[-0.25, -0.5],
            prompt_logprobs=[
                PromptLogprobs(
                    id=6, start=3, logprobs=[-2.0], num_top=1, top_token_ids=[9], top_logprobs=[-1.5]
                )
            ],
            errors=[(7, "no")],
            forward_seconds=0.5,
            sample_seconds=0.25,
            total_seconds=1.0,
            idle_seconds=0.125,
            num_sequences=3,
            shortened_id=2**63,
            num_left=40,
        )
    )
    assert response == pb.StepResponse(
        ids=[5, 6],
        token_ids=[10, 11],
        logprobs=[-0.5, -1.0],
        top_counts=[2, 0],
        top_token_ids=[12, 10],
        top_logprobs=[-0.25, -0.5],
        prompt_logprobs=[
            pb.PromptLogprobs(
                id=6, start=3, logprobs=[-2.0], num_top=1, top_token_ids=[9], top_logprobs=[-1.5]
            )
        ],
        errors=[pb.SequenceError(id=7, message="no")],
        forward_seconds=0.5,
        sample_seconds=0.25,
        idle_seconds=0.125,
        num_sequences=3,
        shortened_id=2**63,
        num_left=40,
    )
