"""Steps that take longer than they should: their last tokens are left, and nothing comes out different."""

from collections.abc import Callable
from pathlib import Path

import pytest
from headrace_proto import shard_pb2 as pb

from tests.shard.small_router import (
    LONG,
    SHORT,
    VARIED,
    SmallRouter,
    execute_on,
    load_tiny,
    make_engine,
    sampling,
)
from tests.tiny import make_checkpoint

AT_ONCE = 1e-9
"""Seconds after which any step has fallen behind."""

KEPT = 16
"""Tokens, those of a block, that the last sequence computes all the same."""

Fresh = Callable[[], SmallRouter]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with more blocks than one behind the cut: the last one's keys do not feel it."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_layers=6)


@pytest.fixture(params=["float32", "bfloat16"])
def fresh(folder: Path, request: pytest.FixtureRequest) -> Fresh:
    """Makes routers, each with an engine of its own whose kernels run all blocks in one call."""
    return lambda: SmallRouter(
        execute_on(make_engine(load_tiny(folder, dtype=request.param, attention="cpu")))
    )


@pytest.fixture
def router(fresh: Fresh) -> SmallRouter:
    return fresh()


def begin(router: SmallRouter) -> None:
    """One sequence that decodes, and one with all of its prompt before it."""
    router.add(1, SHORT, VARIED)
    router.run(2)
    known = router.add(2, LONG)
    known.top_n_tokens = 2


def assert_outputs_equal(ours: SmallRouter, theirs: SmallRouter, num_tokens: int = 10) -> None:
    """The next tokens of all sequences, with their log-probabilities and alternatives."""
    assert ours.run(num_tokens, chunk=60) == theirs.run(num_tokens, chunk=60)
    for number, known in ours.sequences.items():
        other = theirs.sequences[number]
        assert known.logprobs[:num_tokens] == other.logprobs[:num_tokens]
        assert known.tops[:num_tokens] == other.tops[:num_tokens]


def left(response: pb.StepResponse) -> tuple[int, int]:
    return response.shortened_id, response.num_left


def test_prompt_that_is_cut_short_again_and_again(fresh: Fresh) -> None:
    disturbed, undisturbed = fresh(), fresh()
    for router in (disturbed, undisturbed):
        begin(router)
    undisturbed.run(8)
    for count in (30, 17, 36):
        response = disturbed.step({1: 1, 2: count}, max_seconds=AT_ONCE)
        assert list(response.ids) == [1]
        assert left(response) == (2, count - KEPT)
    response = disturbed.step({1: 1, 2: 22})
    assert list(response.ids) == [1, 2]
    assert left(response) == (0, 0)
    assert_outputs_equal(disturbed, undisturbed)


def test_steps_that_were_sent_before_the_cut_was_known(fresh: Fresh) -> None:
    """They go on from where the prompt really is; the last two would have sampled, and do not."""
    disturbed, undisturbed = fresh(), fresh()
    for router in (disturbed, undisturbed):
        begin(router)
    undisturbed.run(8)
    known = disturbed.sequences[2]
    requests = [disturbed.request({1: 1, 2: count}) for count in (30, 20, 20, 1)]
    for request, _ in requests[:2]:
        request.max_seconds = AT_ONCE
    assert [is_decode for _, is_decode in requests] == [False, False, False, True]
    responses = [disturbed.note(disturbed.execute(*request)) for request in requests]
    assert [list(response.ids) for response in responses] == [[1]] * 4
    assert [left(response) for response in responses] == [(2, 14), (2, 4), (0, 0), (0, 0)]
    # 16, 16, 20 and 1 of 70 were computed; two tokens were promised.
    assert known.num_computed == 71 - 18
    assert known.num_promised == 2 and not known.output
    known.num_promised = 0
    response = disturbed.step({1: 1, 2: known.num_pending})
    assert list(response.ids) == [1, 2]
    assert_outputs_equal(disturbed, undisturbed)


def test_step_that_no_longer_samples_may_be_cut_itself(fresh: Fresh) -> None:
    disturbed, undisturbed = fresh(), fresh()
    for router in (disturbed, undisturbed):
        begin(router)
    requests = [disturbed.request({1: 1, 2: count})[0] for count in (30, 40)]
    for request, num_left in zip(requests, (14, 24), strict=True):
        request.max_seconds = AT_ONCE
        assert left(disturbed.note(disturbed.execute(request, False))) == (2, num_left)
    disturbed.sequences[2].num_promised = 0
    assert disturbed.sequences[2].num_computed == 2 * KEPT
    assert_outputs_equal(disturbed, undisturbed)


def test_last_sequence_that_samples_is_computed_to_its_end(fresh: Fresh) -> None:
    hurried, unhurried = fresh(), fresh()
    for router, max_seconds in ((hurried, AT_ONCE), (unhurried, 0.0)):
        begin(router)
        response = router.step({1: 1, 2: 70}, max_seconds=max_seconds)
        assert list(response.ids) == [1, 2]
        assert left(response) == (0, 0)
    assert_outputs_equal(hurried, unhurried)


def test_no_sequence_but_the_last_is_cut(fresh: Fresh) -> None:
    hurried, unhurried = fresh(), fresh()
    for router in (hurried, unhurried):
        begin(router)
        router.add(3, LONG[5:65], sampling(seed=9))
    # The last is a decode.
    assert left(hurried.step({2: 30, 1: 1}, max_seconds=AT_ONCE)) == (0, 0)
    assert left(hurried.step({2: 20, 1: 1, 3: 40}, max_seconds=AT_ONCE)) == (3, 24)
    response = hurried.step({2: 20, 3: 40}, max_seconds=AT_ONCE)
    assert list(response.ids) == [2]
    assert left(response) == (3, 24)
    assert {number: known.num_computed for number, known in hurried.sequences.items() if number > 1} == {
        2: 70,
        3: 2 * KEPT,
    }
    assert_outputs_equal(hurried, unhurried)


def test_a_block_of_tokens_is_always_computed(router: SmallRouter) -> None:
    begin(router)
    for count in (1, 2, KEPT):
        assert left(router.step({2: count}, max_seconds=AT_ONCE)) == (0, 0)
    assert left(router.step({2: KEPT + 1}, max_seconds=AT_ONCE)) == (2, 1)
    assert router.sequences[2].num_computed == 3 + 2 * KEPT


def test_prompt_whose_logprobs_are_wanted_is_not_cut(fresh: Fresh) -> None:
    hurried, unhurried = fresh(), fresh()
    for router, max_seconds in ((hurried, AT_ONCE), (unhurried, 0.0)):
        begin(router)
        known = router.sequences[2]
        known.prompt_logprobs, known.prompt_top_n_tokens = True, 3
        router.add(3, LONG[5:65])
        assert left(router.step({1: 1, 2: 30}, max_seconds=max_seconds)) == (0, 0)
        # Another one behind it may be.
        response = router.step({2: 25, 3: 33}, max_seconds=max_seconds)
        assert left(response) == ((3, 17) if max_seconds else (0, 0))
    assert_outputs_equal(hurried, unhurried)
    ours, theirs = (router.sequences[2].prompt_parts for router in (hurried, unhurried))
    assert [(part.start, len(part.logprobs)) for part in ours] == [(1, 30), (31, 25), (56, 14)]
    assert ours == theirs


def test_when_the_last_sequence_is_refused_the_one_before_is_the_last(fresh: Fresh) -> None:
    disturbed, undisturbed = fresh(), fresh()
    for router in (disturbed, undisturbed):
        begin(router)
    disturbed.add(3, SHORT, sampling(temperature=-1.0))
    response = disturbed.step({1: 1, 2: 30, 3: 3}, max_seconds=AT_ONCE)
    assert [error.id for error in response.errors] == [3]
    assert left(response) == (2, 14)
    disturbed.drop(3)
    assert_outputs_equal(disturbed, undisturbed)


def test_sequence_that_was_cut_may_be_dropped_and_sent_again(fresh: Fresh) -> None:
    disturbed, undisturbed = fresh(), fresh()
    for router in (disturbed, undisturbed):
        begin(router)
    assert left(disturbed.step({1: 1, 2: 50}, max_seconds=AT_ONCE)) == (2, 34)
    disturbed.preempt(2)
    assert_outputs_equal(disturbed, undisturbed)


@pytest.mark.parametrize(("attention", "mlp_bias"), [("sdpa", False), ("cpu", True)])
def test_blocks_that_are_called_one_by_one_know_no_limit(
    tmp_path: Path, attention: str, mlp_bias: bool
) -> None:
    folder = make_checkpoint(tmp_path, mlp_bias=mlp_bias)
    hurried, unhurried = (
        SmallRouter(execute_on(make_engine(load_tiny(folder, attention=attention)))) for _ in range(2)
    )
    for router, max_seconds in ((hurried, AT_ONCE), (unhurried, 0.0)):
        begin(router)
        response = router.step({1: 1, 2: 30}, max_seconds=max_seconds)
        assert list(response.ids) == [1]
        assert left(response) == (0, 0)
    assert_outputs_equal(hurried, unhurried)
