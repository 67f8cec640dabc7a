"""Broken steps are refused with the reason, and leave the shard as it was."""

from collections.abc import Callable

import pytest
from headrace_proto import shard_pb2 as pb
from headrace_shard.errors import InvalidStep

from tests.shard.small_router import GREEDY, LONG, SHORT, VARIED, SmallRouter, sampling


def change(request: pb.StepRequest, **fields: object) -> pb.StepRequest:
    """The request with some fields replaced; lists replace lists."""
    changed = pb.StepRequest()
    changed.CopyFrom(request)
    for name, value in fields.items():
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
    "empty prompt": (alone(new(5, token_ids=[], num_prompt_tokens=0)), False, "num_prompt_tokens must be"),
    "prompt too long": (alone(new(5, num_prompt_tokens=4)), False, r"number of token_ids \(3\), got 4"),
    "nothing to compute": (alone(new(5, num_computed_tokens=3)), False, "must leave one of its 3 tokens"),
    "token out of vocabulary": (alone(new(5, token_ids=[5, 384, 7])), False, "vocabulary size 384, got 384"),
    "bias out of vocabulary": (
        alone(new(5, sampling=sampling(bias={999: 1.0}))),
        False,
        "bias_token_ids: token ids must be below",
    ),
    "bias of two lengths": (
        alone(new(5, sampling=pb.SamplingParams(bias_token_ids=[9]))),
        False,
        "must be of one length, got 1 and 0",
    ),
    "suppressed out of vocabulary": (
        alone(new(5, sampling=sampling(suppressed=[999]))),
        False,
        "suppressed_token_ids: token ids must be below",
    ),
    "temperature out of range": (
        alone(new(5, sampling=pb.SamplingParams(temperature=-1.0))),
        False,
        "sequence 5: temperature is -1",
    ),
    "too many alternatives": (alone(new(5, top_n_tokens=385)), False, "top_n_tokens must be at most 384"),
    "blocks too few": (alone(new(5, token_ids=[1] * 17), 17), False, "its 1 blocks of 16 .* cannot hold 17"),
    "context too long": (
        alone(new(5, token_ids=[1] * 513, num_computed_tokens=512), 1),
        False,
        "a context of 513 tokens is over the model's 512",
    ),
    "tokens too many": (alone(new(5, token_ids=[1] * 200), 129), False, "the step has 129 tokens; .* 128"),
    "no decode": (alone(new(5)), True, "Decode takes known sequences"),
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


def test_too_many_sequences_are_refused(router: SmallRouter) -> None:
    for number in range(33):
        router.add(number, [1, 2])
    with pytest.raises(InvalidStep, match="the step has 33 sequences; Warmup was told of at most 32"):
        router.step(router.plan(2))
