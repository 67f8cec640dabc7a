"""Broken steps are refused with the reason, and leave the shard as it was; broken sequences fail alone."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from headrace_proto import shard_pb2 as pb
from headrace_shard.errors import InvalidStep
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.shard.small_router import (
    GREEDY,
    LONG,
    SHORT,
    VARIED,
    SmallRouter,
    sampling,
    transformers_greedy,
)


def change(request: pb.StepRequest, **fields: object) -> pb.StepRequest:
    """The request with some fields replaced; lists replace lists."""
    changed = pb.StepRequest()
    changed.CopyFrom(request)
    for name, value in fields.items():
        if isinstance(value, float):
            setattr(changed, name, value)
        else:
            changed.ClearField(name)  # type: ignore[arg-type]
            getattr(changed, name).extend(value)
    return changed


def new(sequence_id: int, **fields: object) -> pb.NewSequence:
    values: dict[str, object] = {"token_ids": [5, 6, 7], "num_prompt_tokens": 3, "sampling": GREEDY} | fields
    return pb.NewSequence(id=sequence_id, **values)  # type: ignore[arg-type]


def alone(sequence: pb.NewSequence, num_tokens: int = 3) -> dict[str, object]:
    """Fields of a step in which only this new sequence runs, in block 60."""
    return {
        "new_sequences": [sequence],
        "ids": [sequence.id],
        "num_tokens": [num_tokens],
        "num_new_blocks": [1],
        "new_blocks": [60],
    }


BROKEN: dict[str, tuple[dict[str, object], bool, str]] = {
    "unknown sequence": ({"ids": [1, 77]}, True, "sequence 77 is not known"),
    "dropped sequence": ({"dropped_ids": [1]}, True, "sequence 1 is not known"),
    "scheduled twice": ({"ids": [2, 2]}, True, "sequence 2 is scheduled twice"),
    "lists of several lengths": ({"num_tokens": [1]}, True, "one length, got 2, 1 and 2"),
    "no tokens": ({"num_tokens": [1, 0]}, True, "sequence 2: num_tokens must be from 1 to the 1 .* got 0"),
    "more than pending": ({"num_tokens": [2, 1]}, False, "sequence 1: num_tokens .* the 1 it has .* got 2"),
    "block missing": ({"num_new_blocks": [1, 0]}, True, "adds up to 1, but new_blocks has 0"),
    "block too many": ({"new_blocks": [3]}, True, "adds up to 0, but new_blocks has 1"),
    "block unknown": ({"num_new_blocks": [1, 0], "new_blocks": [64]}, True, "block 64 does not exist"),
    "known sent as new": (alone(new(1)), False, "sequence 1 is sent as new, but the shard holds it"),
    "new twice": ({"new_sequences": [new(5), new(5)]}, False, "given twice"),
    "new, not scheduled": ({"new_sequences": [new(5)]}, False, "sequence 5 is new, but not scheduled"),
    "blocks too few": (alone(new(5, token_ids=[1] * 17), 17), False, "its 1 blocks of 16 .* cannot hold 17"),
    "tokens too many": (alone(new(5, token_ids=[1] * 200), 129), False, "the step has 129 tokens; .* 128"),
    "no decode": (alone(new(5)), True, "Decode takes known sequences"),
    "copies of two lengths": ({"copied_from": [1], "copied_to": [50, 51]}, True, "one length, got 1 and 2"),
    "copied block unknown": ({"copied_from": [64], "copied_to": [50]}, True, "block 64 does not exist"),
    "copied to unknown": ({"copied_from": [1], "copied_to": [64]}, True, "block 64 does not exist"),
    "copied to twice": ({"copied_from": [1, 2], "copied_to": [50, 50]}, True, "block 50 is copied to twice"),
    "copied on": ({"copied_from": [1, 50], "copied_to": [50, 51]}, True, "block 50 is copied both from and"),
    "copied to itself": ({"copied_from": [50], "copied_to": [50]}, True, "block 50 is copied both from and"),
    "less than no time": ({"max_seconds": -0.25}, True, "max_seconds must be a number from 0, got -0.25"),
    "time without end": ({"max_seconds": float("inf")}, True, "max_seconds must be .* from 0, got inf"),
    "time before all": ({"max_seconds": float("-inf")}, True, "max_seconds must be .* from 0, got -inf"),
    "time that is no number": ({"max_seconds": float("nan")}, True, "max_seconds must be .* 0, got nan"),
    "time without a step": (
        {name: [] for name in ("ids", "num_tokens", "num_new_blocks")} | {"max_seconds": -1.0},
        True,
        "max_seconds must be a number from 0, got -1.0",
    ),
    "copied without a step": (
        {name: [] for name in ("ids", "num_tokens", "num_new_blocks")}
        | {"copied_from": [1, 2], "copied_to": [50, 50]},
        True,
        "block 50 is copied to twice",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_step_is_refused_and_changes_nothing(fresh: Callable[[], SmallRouter], case: str) -> None:
    fields, is_decode, message = BROKEN[case]
    disturbed, undisturbed = fresh(), fresh()
    for router in (disturbed, undisturbed):
        router.add(1, LONG, VARIED)
        router.add(2, SHORT)
        router.run(3)
    good, _ = disturbed.request({1: 1, 2: 1})
    with pytest.raises(InvalidStep, match=message):
        disturbed.execute(change(good, **fields), is_decode)
    after = disturbed.note(disturbed.execute(good, True))
    assert list(after.ids) == [1, 2]
    assert after.num_sequences == 2
    assert disturbed.run(6) == undisturbed.run(6)


def test_broken_step_still_forgets_what_it_does_not_schedule(router: SmallRouter) -> None:
    for sequence_id in (1, 2, 3):
        router.add(sequence_id, SHORT)
    router.run(2)
    router.drop(3)
    request, _ = router.request({1: 1})
    with pytest.raises(InvalidStep, match="sequence 77 is not known"):
        router.execute(change(request, ids=[77]), True)
    # Its block may go to another at once.
    router.add(4, LONG)
    response = router.step({4: len(LONG), 2: 1})
    assert list(response.ids) == [4, 2]
    assert response.num_sequences == 3


def test_copies_alone_are_a_step(router: SmallRouter, folder: Path) -> None:
    router.add(1, LONG)
    router.run(1)
    request, _ = router.request({})
    old = list(router.sequences[1].blocks)
    request.copied_from.extend(old)
    request.copied_to.extend([40, 41, 42, 43, 44])
    assert router.execute(request, True).num_sequences == 1
    known = router.add(2, LONG)
    known.num_computed, known.blocks = len(LONG) - 1, [40, 41, 42, 43, 44]
    assert router.run(8)[2] == transformers_greedy(folder, LONG, 8)


BROKEN_SEQUENCES: dict[str, tuple[dict[str, object], str]] = {
    "empty prompt": ({"token_ids": [], "num_prompt_tokens": 0}, "num_prompt_tokens must be from 1"),
    "prompt too long": ({"num_prompt_tokens": 4}, r"number of token_ids \(3\), got 4"),
    "nothing to compute": ({"num_computed_tokens": 3}, "must leave one of its 3 tokens"),
    "context too long": ({"token_ids": [1] * 513}, "a context of 513 tokens is over the model's 512"),
    "token out of vocabulary": ({"token_ids": [5, 384, 7]}, "^token_ids: .* vocabulary size 384, got 384"),
    "bias out of vocabulary": ({"sampling": sampling(bias={999: 1.0})}, "bias_token_ids: token ids must be"),
    "bias of two lengths": (
        {"sampling": pb.SamplingParams(bias_token_ids=[9])},
        "must be of one length, got 1 and 0",
    ),
    "bias for one token twice": (
        {"sampling": pb.SamplingParams(repetition_penalty=1.0, bias_token_ids=[9, 9], bias_values=[1, 2])},
        "names a token twice among 2 entries",
    ),
    "suppressed out of vocabulary": (
        {"sampling": sampling(suppressed=[999])},
        "suppressed_token_ids: token ids must be",
    ),
    "temperature out of range": ({"sampling": sampling(temperature=-1.0)}, "temperature is -1"),
    "temperature over float32": ({"sampling": sampling(temperature=1e39)}, "temperature is inf"),
    "too many alternatives": ({"top_n_tokens": 385}, "^top_n_tokens must be at most 384"),
    "too many prompt alternatives": (
        {"prompt_logprobs": True, "prompt_top_n_tokens": 385},
        "prompt_top_n_tokens must be at most 384",
    ),
}


@pytest.mark.parametrize("case", BROKEN_SEQUENCES)
def test_broken_sequence_fails_alone(fresh: Callable[[], SmallRouter], case: str) -> None:
    fields, message = BROKEN_SEQUENCES[case]
    disturbed, undisturbed = fresh(), fresh()
    for router in (disturbed, undisturbed):
        router.add(1, LONG, VARIED)
        router.add(2, SHORT)
        router.run(3)
    request, _ = disturbed.request({1: 1, 2: 1})
    request.new_sequences.append(new(5, **fields))
    request.ids.insert(1, 5)
    request.num_tokens.insert(1, 3)
    request.num_new_blocks.insert(1, 1)
    request.new_blocks.insert(0, 60)
    response = disturbed.note(disturbed.execute(request, False))
    assert list(response.ids) == [1, 2]
    assert response.num_sequences == 2
    (error,) = response.errors
    assert error.id == 5
    assert re.search(message, error.message)
    # This step was sent before the failure was known.
    ahead, _ = disturbed.request({1: 1, 2: 1})
    ahead.ids.append(5)
    ahead.num_tokens.append(1)
    ahead.num_new_blocks.append(0)
    response = disturbed.note(disturbed.execute(ahead, True))
    assert list(response.ids) == [1, 2]
    assert [told.message for told in response.errors] == [error.message]
    assert disturbed.run(6) == undisturbed.run(6)


def test_broken_sequence_may_be_dropped_and_sent_again_sound(router: SmallRouter) -> None:
    fields = alone(new(5, sampling=sampling(temperature=-1.0)))
    response = router.execute(change(pb.StepRequest(), **fields), False)
    assert [error.id for error in response.errors] == [5]
    response = router.execute(change(pb.StepRequest(), **alone(new(5)), dropped_ids=[5]), False)
    assert list(response.ids) == [5]
    # Again a broken one, in the place of the sound one.
    response = router.execute(change(pb.StepRequest(), **fields, dropped_ids=[5]), False)
    assert [error.id for error in response.errors] == [5]
    assert response.num_sequences == 0


def test_broken_sequence_in_the_place_of_one_that_is_held_is_refused(router: SmallRouter) -> None:
    router.add(5, SHORT)
    router.run(1)
    fields = alone(new(5, sampling=sampling(temperature=-1.0)))
    with pytest.raises(InvalidStep, match="sequence 5 is sent as new, but the shard holds it"):
        router.execute(change(pb.StepRequest(), **fields), False)
    assert len(router.run(3)[5]) == 3


number = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e-30, 1e-45, 3e38, 1e39, float("nan"), float("-inf")])
small = st.sampled_from([0, 1, 2, 3, 383, 384, 2**32 - 1])
any_sampling = st.builds(
    pb.SamplingParams,
    temperature=number,
    top_k=small,
    top_p=number,
    min_p=number,
    typical_p=number,
    repetition_penalty=number,
    presence_penalty=number,
    frequency_penalty=number,
    seed=st.integers(0, 2**64 - 1),
    bias_token_ids=st.lists(small, max_size=3),
    bias_values=st.lists(number, max_size=3),
    min_new_tokens=small,
    suppressed_token_ids=st.lists(small, max_size=3),
)
any_sequence = st.builds(
    pb.NewSequence,
    id=st.just(5),
    token_ids=st.lists(small, min_size=3, max_size=3),
    num_prompt_tokens=small,
    sampling=any_sampling,
    top_n_tokens=small,
    prompt_logprobs=st.booleans(),
    prompt_top_n_tokens=small,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=any_sequence)
def test_no_new_sequence_whatever_it_asks_harms_another(
    router: SmallRouter, sequence: pb.NewSequence
) -> None:
    for known in list(router.sequences):
        router.drop(known)
    router.add(1, SHORT)
    router.step({1: len(SHORT)})
    request, _ = router.request({1: 1})
    request.dropped_ids.append(5)
    response = router.note(router.execute(change(request, **merged(request, alone(sequence))), False))
    assert 1 in response.ids
    assert {*response.ids, *(error.id for error in response.errors)} == {1, 5}


def merged(request: pb.StepRequest, fields: dict[str, object]) -> dict[str, object]:
    """The lists of a step with further ones behind them."""
    return {name: [*getattr(request, name), *value] for name, value in fields.items()}  # type: ignore[misc]


def test_too_many_sequences_are_refused(router: SmallRouter) -> None:
    for number in range(33):
        router.add(number, [1, 2])
    with pytest.raises(InvalidStep, match="the step has 33 sequences; Warmup was told of at most 32"):
        router.step(router.plan(2))
