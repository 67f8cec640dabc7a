"""Sequences that begin in the middle: over blocks held by several, and over blocks that were copied."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from headrace_proto import shard_pb2 as pb
from headrace_shard.errors import InvalidStep

from tests.shard.small_router import (
    GREEDY,
    LONG,
    SHORT,
    VARIED,
    SmallRouter,
    execute_on,
    load_tiny,
    make_engine,
    sampling,
    transformers_greedy,
    transformers_logprobs,
)

KINDS = pytest.mark.parametrize("parameters", [GREEDY, VARIED], ids=["greedy", "varied"])


@pytest.fixture(params=["sdpa", "cpu"])
def fresh(folder: Path, request: pytest.FixtureRequest) -> Callable[[], SmallRouter]:
    """Makes routers, each with an engine of its own, over either layout of the cache."""
    return lambda: SmallRouter(execute_on(make_engine(load_tiny(folder, attention=request.param))))


@KINDS
@pytest.mark.parametrize("num_computed", [16, 48, 64, 1, 37, 69])
def test_sequence_over_blocks_of_another_gives_what_it_gives_alone(
    fresh: Callable[[], SmallRouter], parameters: pb.SamplingParams, num_computed: int
) -> None:
    alone = fresh()
    alone.add(2, LONG, parameters)
    expected = alone.run(20)[2]
    router = fresh()
    router.add(1, LONG)
    first = router.run(2)[1]
    router.add(2, LONG, parameters)
    router.share(2, of=1, num_computed=num_computed)
    outputs = router.run(20, chunk=9)
    assert outputs[2] == expected
    assert outputs[1][:2] == first


def test_siblings_go_their_own_ways(fresh: Callable[[], SmallRouter], folder: Path) -> None:
    seeds = {number: sampling(temperature=1.5, seed=number) for number in range(1, 6)}
    expected = {}
    for number, parameters in seeds.items():
        alone = fresh()
        alone.add(number, LONG, parameters)
        expected[number] = alone.run(30)[number]
    router = fresh()
    router.add(1, LONG, seeds[1])
    router.run(1)
    for number in (2, 3, 4, 5):
        router.add(number, LONG, seeds[number])
        router.share(number, of=1, num_computed=len(LONG) - 1)
    # All four arrive in one step, over copies of one block, while the first goes on in that block.
    response = router.step({1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    assert list(response.ids) == [1, 2, 3, 4, 5]
    assert router.run(30) == expected
    assert len({tuple(output) for output in expected.values()}) == 5


def test_shared_blocks_outlive_who_computed_them(fresh: Callable[[], SmallRouter], folder: Path) -> None:
    router = fresh()
    router.add(1, LONG)
    router.run(1)
    router.add(2, LONG[:60])
    router.share(2, of=1, num_computed=48)
    router.step({2: 1})
    router.drop(1)
    router.reuse_last_blocks()
    router.add(3, [7] * 90)
    assert router.run(12)[2] == transformers_greedy(folder, LONG[:60], 12)


def test_sequence_comes_back_over_its_own_output(fresh: Callable[[], SmallRouter]) -> None:
    undisturbed, disturbed = fresh(), fresh()
    for router in (undisturbed, disturbed):
        router.add(1, LONG, VARIED)
        router.add(2, LONG, VARIED)
    expected = undisturbed.run(40, chunk=32)
    disturbed.run(30, chunk=32)
    disturbed.preempt(1)
    # What the other has generated is the same, so that its blocks reach beyond the prompt.
    disturbed.share(1, of=2, num_computed=96)
    assert disturbed.run(40, chunk=1) == expected


def test_penalties_count_the_part_of_the_prompt_that_is_not_computed_here(
    fresh: Callable[[], SmallRouter], folder: Path
) -> None:
    prompt = [(7 * number) % 300 + 3 for number in range(300)]
    # Not penalised, a token wins that stands in the shared part.
    assert transformers_greedy(folder, prompt, 1)[0] in prompt[:288]
    forbidding = sampling(temperature=0.0, repetition_penalty=1000.0)
    router = fresh()
    router.add(1, prompt, forbidding)
    expected = router.run(6)[1]
    router.add(2, prompt, forbidding)
    router.share(2, of=1, num_computed=288)
    assert router.run(6)[2] == expected
    assert not set(expected) & set(prompt)


@pytest.mark.parametrize("chunk", [128, 5, 1])
@pytest.mark.parametrize("num_computed", [48, 50])
def test_prompt_logprobs_come_for_what_is_computed(
    fresh: Callable[[], SmallRouter], folder: Path, chunk: int, num_computed: int
) -> None:
    router = fresh()
    router.add(1, LONG)
    router.run(1)
    known = router.add(2, LONG)
    known.prompt_logprobs, known.prompt_top_n_tokens = True, 2
    router.share(2, of=1, num_computed=num_computed)
    router.run(1, chunk=chunk)
    logprobs: list[float] = []
    tops: list[int] = []
    for part in known.prompt_parts:
        # The first token that is computed here is predicted by one that is not.
        assert part.start == num_computed + 1 + len(logprobs)
        logprobs += part.logprobs
        tops += part.top_token_ids
    expected = transformers_logprobs(folder, LONG)[num_computed:-1]
    chosen = expected.gather(1, torch.tensor(LONG[num_computed + 1 :])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), chosen, atol=1e-4, rtol=0)
    assert torch.tensor(tops).view(-1, 2).tolist() == expected.topk(2).indices.tolist()


# ---- nobody writes to what several hold


def test_continuing_in_a_shared_block_is_refused(router: SmallRouter, folder: Path) -> None:
    router.add(1, LONG)
    router.run(1)
    last = router.sequences[1].blocks[-1]
    # The last of these blocks is not full, and is not copied.
    for number, num_computed in ((2, 69), (3, 65)):
        known = router.add(number, LONG)
        known.num_computed, known.blocks = num_computed, list(router.sequences[1].blocks)
        with pytest.raises(InvalidStep, match=f"block {last} would be written to, but others hold it"):
            router.step({number: 1})
        # It is forgotten, and a step that was sent ahead is told so.
        response = router.step({number: 1})
        assert [(error.id, "would be written to" in error.message) for error in response.errors] == [
            (number, True)
        ]
        router.drop(number)
    assert router.run(8)[1] == transformers_greedy(folder, LONG, 8)


def test_shared_block_is_not_continued_by_who_had_it_first(router: SmallRouter) -> None:
    router.add(1, LONG)
    router.run(1)
    # It says that the first has computed more than it has, up to the end of its last block.
    known = router.add(3, [*LONG, *LONG[:20]])
    known.num_computed, known.blocks = 80, list(router.sequences[1].blocks)
    assert list(router.step({3: 10}).ids) == [3]
    with pytest.raises(InvalidStep, match=f"block {known.blocks[4]} would be written to"):
        router.step({1: 1})
    assert router.step({3: 1}).num_sequences == 1


def test_block_dealt_out_twice_is_refused(router: SmallRouter) -> None:
    router.add(1, SHORT)
    router.run(1)
    request = pb.StepRequest(
        new_sequences=[
            pb.NewSequence(id=number, token_ids=SHORT, num_prompt_tokens=3, sampling=GREEDY)
            for number in (5, 6)
        ],
        ids=[5, 6],
        num_tokens=[3, 3],
        num_new_blocks=[1, 1],
        new_blocks=[60, 60],
    )
    with pytest.raises(InvalidStep, match="block 60 would be written to, but others hold it"):
        router.execute(request, False)
    request.new_blocks[1] = router.sequences[1].blocks[0]
    with pytest.raises(InvalidStep, match=f"block {request.new_blocks[1]} would be written to"):
        router.execute(request, False)
    # It may be, when who holds it is dropped first.
    request.dropped_ids.append(1)
    response = router.execute(request, False)
    assert list(response.ids) == [5, 6]
    assert response.num_sequences == 2


def test_copy_over_a_block_that_is_held_is_refused(router: SmallRouter, folder: Path) -> None:
    router.add(1, LONG)
    router.run(1)
    held = router.sequences[1].blocks[2]
    router.add(2, LONG)
    router.share(2, of=1, num_computed=32)
    request, _ = router.request({2: 1})
    request.copied_from.append(50)
    request.copied_to.append(held)
    with pytest.raises(InvalidStep, match=f"block {held} would be written to, but others hold it"):
        router.execute(request, False)
    router.drop(2)
    assert router.run(8)[1] == transformers_greedy(folder, LONG, 8)
