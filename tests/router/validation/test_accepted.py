"""Whatever the router accepts, a shard can run: no body may spoil the step it shares with others."""

from typing import Any

import torch
from headrace_proto import shard_pb2 as pb
from headrace_router.errors import HeadraceError
from headrace_router.scheduling.request import Sequence
from headrace_router.scheduling.step import Arrival, Step
from headrace_router.shards.convert import to_step_request
from headrace_router.validation import Job
from headrace_shard.batch import Batch
from headrace_shard.convert import from_step_request
from headrace_shard.validation import StepLimits, check, check_lengths
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.router.validation.conftest import LIMITS, Front

SHARD_LIMITS = StepLimits(
    vocab_size=LIMITS.vocab_size,
    max_positions=LIMITS.max_total_tokens,
    num_blocks=LIMITS.num_blocks,
    max_step_tokens=LIMITS.max_step_tokens,
    max_step_sequences=LIMITS.max_step_sequences,
)

numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 2),
    st.sampled_from([1e39, 3.5e38, 1e-46, 5e-324, 1 - 2**-53, 1e-5, 1e5, 2.0, 0, 1]),
)
integers = st.one_of(
    st.integers(-1, 20), st.sampled_from([399, 400, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30])
)
keys = st.sampled_from(["5", "05", "005", "0", "00", "399", "0399", "400", "-0", "+5", "5_0", "5 "])
stops = st.lists(st.sampled_from(["a", "<|im_end|>", "<|endoftext|>"]), max_size=4)
SHARED = {
    "temperature": numbers,
    "top_p": numbers,
    "typical_p": numbers,
    "repetition_penalty": numbers,
    "presence_penalty": numbers,
    "frequency_penalty": numbers,
    "top_k": integers,
    "seed": integers,
    "stop": stops,
    "priority": integers,
    "cache_salt": st.text(max_size=300),
}
NATIVE = SHARED | {
    "do_sample": st.booleans(),
    "best_of": integers,
    "max_new_tokens": integers,
    "truncate": integers,
    "top_n_tokens": integers,
    "decoder_input_details": st.booleans(),
}
OPENAI = SHARED | {
    "min_p": numbers,
    "n": integers,
    "max_tokens": integers,
    "min_tokens": integers,
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(integers, max_size=3),
    "truncate_prompt_tokens": integers,
    "logit_bias": st.dictionaries(keys, numbers, max_size=4),
}
CHAT = OPENAI | {"logprobs": st.booleans(), "top_logprobs": integers, "max_completion_tokens": integers}
COMPLETION = OPENAI | {
    "prompt": st.lists(integers, min_size=1, max_size=3),
    "echo": st.booleans(),
    "logprobs": integers,
    "best_of": integers,
}


def bodies(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A few fields at a time, or hardly any body would be accepted."""
    return st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )


def check_can_run(job: Job) -> None:
    """As the only new sequence of a step, on its way through the wire."""
    sequence = Sequence(id=1, request=job.request, arrived_at=0.0)
    blocks = list(range(-(-sequence.num_tokens // LIMITS.block_size)))
    step = Step(
        id=1,
        sequences=[sequence],
        num_tokens=[sequence.num_tokens],
        num_new_blocks=[len(blocks)],
        new_blocks=blocks,
        arrivals=[Arrival(sequence=sequence, num_computed=0)],
        samplers=[sequence],
        admitted=[sequence],
        total_tokens=sequence.num_tokens,
    )
    message = pb.StepRequest.FromString(to_step_request(step).SerializeToString())
    taken = from_step_request(message, is_decode=False)
    check_lengths(taken)
    assert check(taken, Batch(torch.device("cpu"), LIMITS.block_size), SHARD_LIMITS) == {}


many = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(bodies(NATIVE))
@example({"temperature": 1e39})
def test_native_bodies(front: Front, parameters: dict[str, Any]) -> None:
    try:
        job = front.generate(**parameters)
    except HeadraceError:
        return
    check_can_run(job)


@many
@given(bodies(CHAT))
@example({"logit_bias": {"5": 1, "05": 2}})
def test_chats(front: Front, fields: dict[str, Any]) -> None:
    try:
        job = front.chat(**fields)
    except HeadraceError:
        return
    check_can_run(job)


@many
@given(bodies(COMPLETION))
@example({"logit_bias": {"5": 1, "05": 2}})
@example({"min_tokens": 1, "stop_token_ids": [399]})
def test_completions(front: Front, fields: dict[str, Any]) -> None:
    try:
        job = front.completion(**fields)
    except HeadraceError:
        return
    check_can_run(job)


def test_ends_that_the_model_does_not_have(front: Front) -> None:
    """A tokenizer may know more tokens than the model, its files may name more ends than it has."""
    front.with_limits(vocab_size=1, eos_token_ids=frozenset({0, 500}))
    request = front.completion(prompt=[0], min_tokens=1, stop=["<|im_end|>", "<|endoftext|>"]).request
    assert request.eos_token_ids == request.stop_token_ids == {0}
    assert front.generate(inputs="<|endoftext|>").request.eos_token_ids == {0}
