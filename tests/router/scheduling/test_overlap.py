"""Two steps in flight: what is scheduled before the last one is answered; what becomes of late answers."""

import pytest
from headrace_router.scheduling.request import FinishReason, Sequence, Status
from headrace_router.scheduling.scheduler import MAX_IN_FLIGHT, Scheduler

from tests.router.scheduling.device import expected_output
from tests.router.scheduling.simulation import Simulation, counts, limits_of, request_of


def _simulation(**limits: int) -> Simulation:
    return Simulation(Scheduler(limits_of(**limits)), depth=2)


def test_a_sequence_is_decoded_before_its_last_token_is_known() -> None:
    simulation = _simulation()
    sequence = simulation.add(request_of(3, 9))
    assert simulation.schedule() is not None
    second = simulation.schedule()
    assert second is not None
    assert (counts(second), second.samplers, sequence.output_ids) == ({1: 1}, [sequence], [])
    assert simulation.scheduler.schedule(0.0) is None, f"{MAX_IN_FLIGHT} are in flight"
    simulation.answer()
    assert len(sequence.output_ids) == 1
    simulation.run()
    simulation.check_over()


def test_chunks_of_a_prompt_follow_each_other_unanswered() -> None:
    simulation = _simulation(max_step_tokens=8)
    simulation.add(request_of(12, 3))
    first, second = simulation.schedule(), simulation.schedule()
    assert first is not None and second is not None
    assert (counts(first), counts(second)) == ({1: 8}, {1: 4})
    simulation.run()
    simulation.check_over()


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 8])
def test_nothing_is_computed_past_the_last_token(max_new_tokens: int) -> None:
    simulation = _simulation()
    simulation.add(request_of(5, max_new_tokens))
    simulation.run()
    assert sum(step.total_tokens for step in simulation.steps) == 5 + max_new_tokens - 1
    simulation.check_over()


def test_an_end_found_late_costs_one_row() -> None:
    simulation = _simulation()
    requests = (request_of(5, 40, variant=variant, has_eos=True) for variant in range(50))
    request = next(request for request in requests if len(expected_output(request)) < 40)
    num_generated = len(expected_output(request))
    sequence = simulation.add(request)
    simulation.run()
    assert sequence.finish_reason is FinishReason.EOS
    assert sum(step.total_tokens for step in simulation.steps) == 5 + num_generated - 1 + 1
    simulation.check_over()


def test_a_cancelled_sequence_rides_along_and_its_blocks_are_handed_out_again() -> None:
    simulation = _simulation(num_blocks=4, block_size=4)
    victim = simulation.add(request_of(6, 10))
    simulation.step()
    assert len(simulation.in_flight) == 1
    simulation.scheduler.finish(victim, FinishReason.CANCELLED)
    assert simulation.scheduler.blocks.num_held == 0
    # Its blocks, and the step that writes into them still, go on before those who get them next.
    heir = simulation.add(request_of(13, 3, variant=30))
    step = simulation.schedule()
    assert step is not None
    assert (step.dropped_ids, len(step.new_blocks)) == ([victim.id], 4)
    assert len(victim.output_ids) == 1
    assert simulation.answer() == []
    simulation.run()
    assert heir.finish_reason is FinishReason.LENGTH
    simulation.check_over()


def _until_preempted(simulation: Simulation, sequence: Sequence) -> None:
    while not sequence.num_preemptions:
        simulation.schedule()
        if not sequence.num_preemptions and len(simulation.in_flight) == 2:
            simulation.answer()


def test_a_preempted_sequence_takes_the_token_that_is_on_its_way() -> None:
    simulation = _simulation(num_blocks=8, block_size=4)
    simulation.add(request_of(8, 20))
    young = simulation.add(request_of(8, 20, variant=20))
    _until_preempted(simulation, young)
    assert (young.status, young.num_late) == (Status.WAITING, 1)
    num_generated = len(young.output_ids)
    (update,) = (update for update in simulation.answer() if update.sequence is young)
    assert update.token is not None
    assert (len(young.output_ids), young.num_late) == (num_generated + 1, 0)
    simulation.run()
    simulation.check_over()


def test_a_preempted_sequence_may_end_by_the_token_that_is_on_its_way() -> None:
    simulation = _simulation(num_blocks=8, block_size=4)
    simulation.add(request_of(8, 20))
    young = simulation.add(request_of(8, 8, variant=20))
    while len(young.output_ids) < 6:
        simulation.step()
    # Its last token is on its way.
    simulation.schedule()
    assert young.num_computed == young.num_final
    simulation.scheduler._placement._preempt(young)
    while young.status is not Status.FINISHED:
        simulation.answer()
    assert young.finish_reason is FinishReason.LENGTH
    assert simulation.scheduler.num_waiting == 0
    simulation.run()
    simulation.check_over()


@pytest.mark.parametrize("fails", [True, False])
def test_a_preempted_sequence_may_be_cancelled_or_fail_before_its_late_answer(fails: bool) -> None:
    simulation = _simulation(num_blocks=8, block_size=4)
    simulation.add(request_of(8, 20))
    young = simulation.add(request_of(8, 20, variant=20))
    _until_preempted(simulation, young)
    num_generated = len(young.output_ids)
    if fails:
        simulation.device.faults[young.id] = 0
        (update,) = (update for update in simulation.answer() if update.sequence is young)
        assert (update.error, young.finish_reason) == ("a fault", FinishReason.FAILED)
    else:
        simulation.scheduler.finish(young, FinishReason.CANCELLED)
        assert all(update.sequence is not young for update in simulation.answer())
    assert (len(young.output_ids), simulation.scheduler.num_waiting) == (num_generated, 0)
    simulation.run()
    simulation.check_over()


def test_a_preempted_sequence_waits_for_what_is_on_its_way_even_if_there_is_room() -> None:
    simulation = _simulation()
    sequence = simulation.add(request_of(8, 20))
    simulation.step()
    simulation.scheduler._placement._preempt(sequence)
    assert sequence.num_late == 1
    assert simulation.schedule() is None
    simulation.answer()
    step = simulation.schedule()
    # The step that it made room for was never made; the next one tells.
    assert step is not None and step.num_preempted == 1
    simulation.run()
    simulation.check_over()


def test_a_sequence_that_failed_is_passed_over_in_the_step_after() -> None:
    simulation = _simulation()
    faulty, other = simulation.add(request_of(4, 8)), simulation.add(request_of(4, 8, variant=20))
    simulation.device.faults[faulty.id] = 5
    simulation.run()
    assert faulty.finish_reason is FinishReason.FAILED
    assert other.finish_reason is FinishReason.LENGTH
    simulation.check_over()


def test_a_lost_shard_takes_all_steps_with_it() -> None:
    simulation = _simulation(max_step_tokens=8)
    sequence = simulation.add(request_of(12, 3))
    simulation.schedule()
    simulation.schedule()
    assert simulation.lose_shard() == []
    assert (simulation.scheduler.num_in_flight, sequence.status) == (0, Status.WAITING)
    simulation.run()
    simulation.check_over()


def test_what_was_cached_is_what_the_shard_had_that_answers() -> None:
    simulation = _simulation(max_step_tokens=8)
    simulation.add(request_of(20, 1))
    simulation.run()
    long, other = simulation.add(request_of(40, 2)), simulation.add(request_of(40, 2))
    simulation.step()
    assert (long.num_cached, long.output_ids, other.num_cached) == (20, [], 0)
    simulation.lose_shard()
    assert long.num_cached == 0
    simulation.run()
    assert (long.num_cached, other.num_cached) == (0, 36)
    simulation.check_over()


def test_prompts_beside_decodes_are_bounded_by_what_the_decodes_can_bear() -> None:
    limits = limits_of(max_step_tokens=64)
    simulation = Simulation(Scheduler(limits, step_costs=((1, 0.01), (101, 0.11))), depth=2)
    simulation.add(request_of(4, 40))
    simulation.step()
    simulation.add(request_of(200, 4, variant=20))
    simulation.run()
    mixed = [step for step in simulation.steps[1:] if step.chunks]
    # A decode alone takes 10 ms, a token more 1 ms, and three times as long is allowed: 23.4 ms are aimed at.
    assert [step.total_tokens for step in mixed] == [14] * 15 + [6]
    simulation.check_over()
