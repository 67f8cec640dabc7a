"""Who leaves the queue for a step: turns, the knobs that hold back, and who may pass whom."""

import pytest
from headrace_router.scheduling.admission import MAX_OVERTAKEN
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.request import Status
from headrace_router.scheduling.scheduler import Scheduler

from tests.router.scheduling.simulation import Simulation, limits_of, request_of


def test_no_more_run_than_a_step_may_carry() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_sequences=2)))
    for _ in range(5):
        simulation.add(request_of(4, 4))
    simulation.step()
    assert (simulation.scheduler.num_running, simulation.scheduler.num_waiting) == (2, 3)
    assert simulation.scheduler.num_waiting_tokens == 12
    simulation.run()
    simulation.check_over()


def test_tenants_take_turns() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_sequences=1)))
    for tenant in "aaaab":
        simulation.add(request_of(4, 4, tenant=tenant))
    simulation.run()
    order = [sequence.request.tenant for step in simulation.steps for sequence in step.admitted]
    assert order == ["a", "b", "a", "a", "a"]


@pytest.mark.parametrize(("num_prompt", "max_new_tokens"), [(24, 1), (1, 24)])
def test_tenants_pay_for_prompts_and_for_answers(num_prompt: int, max_new_tokens: int) -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_sequences=1)))
    simulation.add(request_of(num_prompt, max_new_tokens, variant=1, tenant="a"))
    for tenant in "abbbbb":
        simulation.add(request_of(1, 6, variant=25, tenant=tenant))
    simulation.run()
    order = "".join(sequence.request.tenant for step in simulation.steps for sequence in step.admitted)
    # 25 tokens of the one are worth four requests of the other.
    assert order == "abbbbab"


def test_tenants_pay_for_answers_while_they_grow() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=300, max_step_sequences=3)))
    for tenant, max_new_tokens in (("a", 200), ("a", 200), ("b", 60)):
        simulation.add(request_of(1, max_new_tokens, tenant=tenant))
    first, second = (simulation.add(request_of(1, 1, tenant=tenant)) for tenant in "ab")
    while second.admitted_at is None:
        assert first.admitted_at is None, "both answers of the one tenant go on, and have had more together"
        simulation.step()
    simulation.run()
    simulation.check_over()


def test_waiting_ones_are_admitted_once_they_are_enough() -> None:
    policy = Policy(waiting_served_ratio=0.5, max_waiting_tokens=1000)
    simulation = Simulation(Scheduler(limits_of(), policy))
    for _ in range(4):
        simulation.add(request_of(2, 100))
    simulation.step()
    assert simulation.scheduler.num_running == 4
    simulation.add(request_of(2, 100))
    for _ in range(5):
        simulation.step()
    assert (simulation.scheduler.num_running, simulation.scheduler.num_waiting) == (4, 1)
    simulation.add(request_of(2, 100))
    simulation.step()
    assert simulation.scheduler.num_running == 6
    assert not simulation.steps[-1].is_overdue


def test_waiting_ones_are_admitted_after_max_waiting_tokens() -> None:
    policy = Policy(waiting_served_ratio=2.0, max_waiting_tokens=3)
    simulation = Simulation(Scheduler(limits_of(), policy))
    simulation.add(request_of(2, 100))
    simulation.step()
    simulation.add(request_of(2, 100))
    for expected in (1, 1, 1, 2):
        simulation.step()
        assert simulation.scheduler.num_running == expected
    assert simulation.steps[-1].is_overdue


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_joins_in_the_steps_that_preempt(depth: int) -> None:
    scheduler = Scheduler(limits_of(num_blocks=16, block_size=4, max_step_tokens=64))
    simulation = Simulation(scheduler, depth=depth)
    simulation.add(request_of(8, 50))
    young = simulation.add(request_of(30, 30, variant=20))
    simulation.step()
    fresh = simulation.add(request_of(20, 20, variant=40))
    while not young.num_preemptions:
        simulation.step()
    # The blocks that it gave up would do for the fresh one.
    assert scheduler.blocks.num_available > 6
    while not fresh.output_ids:
        assert fresh.status is Status.WAITING or young.status is not Status.WAITING
        simulation.step()
    assert fresh.num_preemptions == 0
    simulation.run()
    simulation.check_over()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_sequence_is_not_passed(depth: int) -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=16, block_size=4)), depth=depth)
    _, young = simulation.add(request_of(8, 50)), simulation.add(request_of(8, 50, variant=20))
    while not young.num_preemptions:
        simulation.step()
    assert simulation.scheduler.blocks.num_available > 4
    short = simulation.add(request_of(1, 1, variant=40))
    while young.status is Status.WAITING:
        assert short.status is Status.WAITING
        simulation.step()
    simulation.run()
    simulation.check_over()


def test_the_front_of_the_queue_is_passed_only_so_often() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=20, block_size=4, max_step_tokens=64)))
    simulation.add(request_of(30, 40))
    simulation.step()
    large = simulation.add(request_of(60, 4, variant=40))
    passed = 0
    while large.status is Status.WAITING:
        simulation.add(request_of(2, 1))
        simulation.step()
        if large.status is Status.WAITING:
            passed += len(simulation.steps[-1].admitted)
    assert passed == MAX_OVERTAKEN
    simulation.run()
    simulation.check_over()


def test_a_prompt_is_not_admitted_into_blocks_that_others_are_about_to_take() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=10, block_size=4, max_step_tokens=64)))
    for variant in range(3):
        simulation.add(request_of(7, 5, variant=10 * variant))
    simulation.step()
    late = simulation.add(request_of(8, 4, variant=40))
    simulation.step()
    # Four blocks are free, but three of them will be wanted by those that run.
    assert simulation.scheduler.blocks.num_available == 4
    assert late.status is Status.WAITING
    simulation.run()
    assert all(sequence.num_preemptions == 0 for sequence in simulation.sequences)
