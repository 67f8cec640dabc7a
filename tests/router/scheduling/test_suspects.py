"""A step that fails as a whole: the one at fault is found and fails alone, the others lose nothing."""

import math

import pytest
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.request import FinishReason, Sequence, Status
from headrace_router.scheduling.scheduler import Scheduler
from headrace_router.scheduling.step import Step
from headrace_router.scheduling.suspects import Suspects

from tests.router.scheduling.simulation import Simulation, counts, limits_of, request_of


def _simulation(depth: int = 2, num_requests: int = 8, **limits: int) -> Simulation:
    policy = Policy(max_step_slowdown=0)
    simulation = Simulation(Scheduler(limits_of(**({"num_blocks": 200} | limits)), policy), depth=depth)
    for variant in range(num_requests):
        simulation.add(request_of(6, 12, variant=6 * variant))
    return simulation


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("poisoned", [1, 4, 8])
@pytest.mark.parametrize("position", [0, 3, 6, 9, 15])
def test_a_poisoned_request_fails_alone(depth: int, poisoned: int, position: int) -> None:
    simulation = _simulation(depth)
    simulation.device.poisons[poisoned] = position
    simulation.run()
    for sequence in simulation.sequences:
        failed = sequence.id == poisoned
        assert sequence.finish_reason is (FinishReason.FAILED if failed else FinishReason.LENGTH)
    # The step itself, its halves, their halves.
    assert simulation.num_failed_steps <= 1 + math.ceil(math.log2(8)) + 1
    simulation.check_over()


@pytest.mark.parametrize("num_requests", [1, 8])
def test_what_a_poisoned_request_had_computed_is_found_by_nobody(num_requests: int) -> None:
    simulation = _simulation(num_requests=num_requests)
    poisoned = simulation.sequences[-1]
    simulation.device.poisons[poisoned.id] = 13
    simulation.run()
    assert poisoned.finish_reason is FinishReason.FAILED
    assert simulation.scheduler.blocks.lookup("", poisoned.keys, 3) == 0
    simulation.check_over()


@pytest.mark.parametrize("depth", [1, 2])
def test_several_poisoned_requests_are_found(depth: int) -> None:
    simulation = _simulation(depth)
    simulation.device.poisons |= {2: 0, 3: 8, 7: 8}
    simulation.run()
    failed = [s.id for s in simulation.sequences if s.finish_reason is FinishReason.FAILED]
    assert failed == [2, 3, 7]
    simulation.check_over()


def test_nobody_but_suspects_is_computed_while_there_are_any() -> None:
    simulation = _simulation(num_requests=7, max_step_tokens=24)
    simulation.device.poisons[2] = 0
    # Four fit into the first step. The others come with the second, which is in flight when the first fails.
    simulation.schedule()
    simulation.schedule()
    first, second = simulation.steps
    suspects = set(counts(first))
    bystanders = set(counts(second)) - suspects
    assert (len(suspects), len(bystanders)) == (4, 3)
    simulation.answer()
    assert simulation.schedule() is None, "a step is in flight still"
    simulation.answer()
    others = [simulation.sequences[number - 1] for number in sorted(bystanders)]
    assert all(len(sequence.output_ids) == 1 for sequence in others)
    while simulation.sequences[1].status is not Status.FINISHED:
        step = simulation.schedule()
        assert step is not None and set(counts(step)) < suspects
        assert simulation.scheduler.schedule(0.0) is None
        simulation.answer()
    simulation.run()
    simulation.check_over()


def test_suspects_start_again_from_what_was_confirmed() -> None:
    simulation = _simulation(num_requests=2)
    simulation.device.poisons[2] = 12
    while not simulation.num_failed_steps:
        simulation.step()
    assert simulation.scheduler.num_waiting == 2
    step = simulation.schedule()
    if step is None:
        simulation.answer()
        step = simulation.schedule()
    assert step is not None
    (arrival,) = step.arrivals
    assert arrival.num_computed == 12
    simulation.run()
    simulation.check_over()


@pytest.mark.parametrize("cancelled", [1, 2, 3, 4])
def test_a_suspect_may_be_cancelled(cancelled: int) -> None:
    simulation = _simulation(num_requests=4)
    simulation.device.poisons[2] = 9
    while not simulation.num_failed_steps:
        simulation.step()
    simulation.scheduler.finish(simulation.sequences[cancelled - 1], FinishReason.CANCELLED)
    simulation.run()
    ends = {sequence.finish_reason for sequence in simulation.sequences if sequence.id not in (2, cancelled)}
    assert ends == {FinishReason.LENGTH}
    simulation.check_over()


def test_a_suspect_of_a_group_that_is_cancelled_in_its_step_is_not_held_against_the_others() -> None:
    simulation = _simulation(num_requests=2, depth=1)
    simulation.device.poisons[1] = 0
    simulation.schedule()
    simulation.scheduler.finish(simulation.sequences[0], FinishReason.CANCELLED)
    simulation.answer()
    assert simulation.num_failed_steps == 1
    assert simulation.sequences[1].status is Status.WAITING
    simulation.run()
    simulation.check_over()


def test_a_step_of_one_that_was_cancelled_fails_nobody() -> None:
    simulation = _simulation(num_requests=1)
    simulation.device.poisons[1] = 0
    simulation.schedule()
    simulation.scheduler.finish(simulation.sequences[0], FinishReason.CANCELLED)
    simulation.answer()
    simulation.check_over()


def test_a_shard_that_is_lost_clears_everybody() -> None:
    simulation = _simulation(num_requests=4)
    simulation.device.poisons[2] = 0
    simulation.step()
    simulation.in_flight.clear()
    simulation.lose_shard()
    simulation.device.poisons.clear()
    step = simulation.schedule()
    assert step is not None and len(step.sequences) == 4
    simulation.run()
    simulation.check_over()


@pytest.mark.parametrize("num_blocks", [8, 9, 11, 14])
@pytest.mark.parametrize("max_step_tokens", [3, 8, 32])
def test_suspects_get_blocks_from_everybody_else(num_blocks: int, max_step_tokens: int) -> None:
    limits = limits_of(num_blocks=num_blocks, max_step_tokens=max_step_tokens)
    simulation = Simulation(Scheduler(limits), depth=2)
    for variant in range(4):
        simulation.add(request_of(8 + variant, 16, variant=11 * variant))
    simulation.device.poisons |= {1: 19, 3: 13}
    simulation.run()
    assert simulation.num_failed_steps
    simulation.check_over()


def test_a_step_that_is_refused_with_nothing_changed_is_tried_again() -> None:
    simulation = _simulation()
    simulation.step()
    leaving = simulation.sequences[3]
    simulation.scheduler.finish(leaving, FinishReason.CANCELLED)
    simulation.device.refuses = True
    while not simulation.num_failed_steps:
        simulation.step()
    simulation.run()
    assert all(s.finish_reason is FinishReason.LENGTH for s in simulation.sequences if s is not leaving)
    # The shard was told again to forget what a refused step had told it to.
    simulation.check_over()


def test_suspects_copy_nothing_from_somebody_who_may_have_to_make_room() -> None:
    simulation = _simulation(num_requests=0)
    request = request_of(6, 12)
    leader = simulation.add(request)
    simulation.step()
    siblings = [simulation.add(request) for _ in range(4)]
    simulation.device.poisons[siblings[0].id] = 0
    simulation.run()
    assert leader.finish_reason is FinishReason.LENGTH
    first, *others = [step for step in simulation.steps if step.arrivals and leader not in step.admitted]
    assert len(first.copies) == 4
    assert not any(step.copies for step in others)
    simulation.check_over()


def test_when_nobody_has_a_block_to_go_on_with_somebody_makes_room() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=12, max_step_tokens=8)))
    old, young = [simulation.add(request_of(20, 1, variant=variant)) for variant in (0, 25)]
    simulation.step()
    blocks = simulation.scheduler.blocks
    taken = blocks.open("", [], 0)
    blocks.grow(taken, blocks.num_available)
    assert (old.status, young.status) == (Status.RUNNING, Status.RUNNING)
    step = simulation.scheduler.schedule(0.0)
    assert step is not None
    assert (counts(step), step.num_preempted, young.status) == ({old.id: 4}, 1, Status.WAITING)


def test_who_makes_room_for_suspects_may_stand_before_them() -> None:
    simulation = _simulation(num_requests=0, num_blocks=12)
    other = simulation.add(request_of(8, 4, priority=-1))
    suspects = [simulation.add(request_of(4, 4, variant=variant)) for variant in (10, 20)]
    simulation.schedule()
    blocks = simulation.scheduler.blocks
    blocks.grow(blocks.open("", [], 0), blocks.num_available)
    step = Step(id=9)
    simulation.scheduler._placement.fill(step, suspects, 0.0)
    assert other.status is Status.WAITING
    assert step.sequences == suspects


# ---- Suspects alone


def _sequences(count: int) -> list[Sequence]:
    return [Sequence(id=number, request=request_of(4, 4), arrived_at=0.0) for number in range(1, count + 1)]


def test_groups_are_halves_and_a_cleared_one_leaves() -> None:
    suspects, sequences = Suspects(), _sequences(5)
    certain: dict[int, int] = {}
    suspects.accuse((sequence, 7) for sequence in sequences)

    def group() -> list[int]:
        return [sequence.id for sequence in suspects.next_group(lambda s: certain.get(s.id, 0))]

    assert group() == [1, 2, 3]
    certain = {1: 7, 2: 6, 3: 8}
    assert group() == [2]
    certain[2] = 7
    assert group() == [4, 5]
    suspects.accuse((sequence, 9) for sequence in sequences[3:])
    # One that fails earlier the next time still has to get as far.
    suspects.accuse((sequence, 3) for sequence in sequences[3:])
    assert group() == [4]
    sequences[3].status = Status.FINISHED
    certain[5] = 8
    assert group() == [5]
    certain[5] = 9
    assert group() == []
    assert not suspects


def test_those_of_a_group_that_were_not_in_the_failed_step_stay_a_group() -> None:
    suspects, sequences = Suspects(), _sequences(8)
    suspects.accuse((sequence, 7) for sequence in sequences)
    suspects.accuse((sequence, 7) for sequence in sequences[:2])
    groups = []
    while group := suspects.next_group(lambda s: 0):
        groups.append([sequence.id for sequence in group])
        for sequence in group:
            sequence.status = Status.FINISHED
    assert groups == [[1], [2], [3, 4], [5, 6, 7, 8]]
