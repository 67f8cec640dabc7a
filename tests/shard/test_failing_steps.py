"""What a failing step leaves: of others everything, of its own sequences nothing; and nothing piles up."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from headrace_shard.engine import Engine
from headrace_shard.errors import ShardError
from headrace_shard.inputs import ForwardInputs
from headrace_shard.loading import LoadedModel

from tests.shard.small_router import (
    LONG,
    SHORT,
    VARIED,
    SmallRouter,
    execute_on,
    load_tiny,
    make_engine,
    sampling,
    transformers_greedy,
)

POISON = 383
PREFIX = LONG[:48]
"""Three whole blocks."""


@pytest.fixture(params=["sdpa", "cpu"])
def loaded(folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A model that fails where `POISON` is computed, once all keys and values of the step are written."""
    loaded = load_tiny(folder, attention=request.param)
    real = loaded.model.forward

    def forward(inputs: ForwardInputs) -> torch.Tensor:
        hidden = real(inputs)
        if (inputs.token_ids == POISON).any():
            raise RuntimeError("poisoned")
        return hidden

    monkeypatch.setattr(loaded.model, "forward", forward)
    return loaded


def fail(router: SmallRouter, plan: dict[int, int]) -> None:
    """A step that must fail; its sequences will be sent again in full, over what others share with them."""
    with pytest.raises(ShardError, match="RuntimeError: poisoned"):
        router.step(plan)
    for number in plan:
        router.preempt(number)
        router.sequences[number].num_promised = 0


def test_blocks_of_a_failed_step_that_others_hold_are_as_they_were(
    router: SmallRouter, engine: Engine, folder: Path
) -> None:
    prompts = {1: LONG, 2: PREFIX + SHORT, 3: [*PREFIX, POISON], 4: [*PREFIX, 9, 8]}
    for number, prompt in prompts.items():
        router.add(number, prompt)
        if number > 1:
            router.share(number, of=1, num_computed=48)
        if number != 3:
            router.step({number: router.sequences[number].num_pending})
    fail(router, {1: 1, 2: 1, 3: 1})
    assert list(engine._batch.row_of) == [4]
    router.drop(3)
    router.reuse_last_blocks()
    # The neighbours come back over the blocks that the failed step read, the fourth has gone on meanwhile.
    router.step({4: 1})
    for number in (1, 2):
        router.share(number, of=4, num_computed=48)
    outputs = router.run(16)
    for number, output in outputs.items():
        assert output == transformers_greedy(folder, prompts[number], 16)


def test_source_of_a_copy_in_a_failed_step_is_as_it_was(router: SmallRouter, folder: Path) -> None:
    router.add(1, LONG)
    router.run(1)
    router.add(2, [*LONG[:60], POISON])
    router.share(2, of=1, num_computed=60)
    fail(router, {2: 1})
    router.drop(2)
    router.add(3, LONG)
    router.share(3, of=1, num_computed=69)
    expected = transformers_greedy(folder, LONG, 12)
    assert router.run(12) == {1: expected, 3: expected}


def test_one_who_makes_steps_fail_is_found_by_halves(router: SmallRouter, folder: Path) -> None:
    prompts = {number: LONG[number : number + 12] for number in range(8)}
    prompts[5] = [*LONG[5:16], POISON]
    for number, prompt in prompts.items():
        router.add(number, prompt, VARIED if number % 2 else sampling(temperature=0.0))
    suspects = list(prompts)
    fail(router, dict.fromkeys(suspects, 12))
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        if 5 in half:
            fail(router, dict.fromkeys(half, 12))
            suspects = half
        else:
            assert list(router.step(dict.fromkeys(half, 12)).ids) == half
            suspects = suspects[len(half) :]
    assert suspects == [5]
    router.drop(5)
    outputs = router.run(10)
    assert len(outputs) == 7
    assert outputs[4] == transformers_greedy(folder, prompts[4], 10)
    alone = SmallRouter(execute_on(make_engine(load_tiny(folder))))
    alone.add(3, prompts[3], VARIED)
    assert alone.run(10)[3] == outputs[3]


def test_steps_that_were_sent_before_the_failure_was_known(router: SmallRouter, folder: Path) -> None:
    router.add(1, SHORT)
    router.add(2, [*SHORT, POISON])
    router.add(3, LONG)
    router.add(4, SHORT[::-1])
    router.step({1: 3, 4: 3})
    first, _ = router.request({1: 1, 2: 4})
    second, _ = router.request({1: 1, 2: 1, 3: 70})
    third, _ = router.request({3: 1, 2: 1, 4: 1})
    with pytest.raises(ShardError, match="poisoned"):
        router.execute(first, False)
    response = router.note(router.execute(second, False))
    assert list(response.ids) == [3]
    assert [error.id for error in response.errors] == [1, 2]
    assert all("poisoned" in error.message for error in response.errors)
    response = router.note(router.execute(third, True))
    assert list(response.ids) == [3, 4]
    assert [error.id for error in response.errors] == [2]
    # One comes back dropped and new in one step, one new alone: both are as if they had never failed.
    router.preempt(1)
    router.sequences[1].num_promised = 0
    router.drop(2)
    router.add(2, LONG[30:50])
    router._dropped.remove(2)
    outputs = router.run(8)
    for number, prompt in {1: SHORT, 2: LONG[30:50], 3: LONG, 4: SHORT[::-1]}.items():
        assert outputs[number] == transformers_greedy(folder, prompt, 8)


# ---- nothing piles up


def size_of(value: object, seen: set[int]) -> int:
    """Bytes of tensors and entries of everything else that can be reached, but for the model."""
    if id(value) in seen or isinstance(value, LoadedModel | torch.nn.Module | torch.device | type | Callable):
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return 1 + sum(size_of(entry, seen) for pair in value.items() for entry in pair)
    if isinstance(value, list | tuple | set):
        return 1 + sum(size_of(entry, seen) for entry in value)
    names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
    return 1 + sum(size_of(getattr(value, name, None), seen) for name in names)


def test_sequences_that_come_and_go_leave_nothing(router: SmallRouter, engine: Engine) -> None:
    kinds = [sampling(temperature=0.0), VARIED, sampling(temperature=-1.0), sampling(bias={5: 1.0}), VARIED]
    sizes = []
    for turn in range(100):
        numbers = range(1000 * turn, 1000 * turn + 30)
        for number in numbers:
            router.add(number, [*SHORT, number % 300], kinds[number % len(kinds)])
        # Some end before they have begun, the third of each five is refused, the last of a turn are poisoned.
        router.sequences[numbers[-1]].prompt.append(POISON)
        plan = {number: router.sequences[number].num_pending for number in numbers[:25]}
        response = router.step(plan)
        assert len(response.errors) == 5
        running = dict.fromkeys(list(response.ids), 1)
        router.step(running)
        with pytest.raises(ShardError):
            router.step({number: router.sequences[number].num_pending for number in numbers[25:]})
        for number in numbers:
            router.drop(number)
        assert router.step({}).num_sequences == 0
        sizes.append(size_of(engine, set()))
    assert not engine._failed
    assert len(router._free) == 64
    # Whatever is kept for later was made in the first turns.
    assert len(set(sizes[2:])) == 1, sizes


def test_failed_sequences_nobody_drops_are_forgotten_in_time(
    router: SmallRouter, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_shard.engine._MAX_FAILED", 50)
    for number in range(200):
        router.add(number, SHORT, sampling(temperature=-1.0))
        router.step({number: 3})
        router.drop(number)
        router._dropped.clear()
    assert list(engine._failed) == list(range(150, 200))
