"""What sequences share: prefixes in the cache, prefixes that are being computed, prompts of one asker."""

from unittest.mock import patch

import pytest
from headrace_router.scheduling.admission import MAX_NEW_FOLLOWERS, MAX_PAUSE
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.request import FinishReason, Sequence, Status
from headrace_router.scheduling.scheduler import Scheduler

from tests.router.scheduling.simulation import Simulation, limits_of, prompt_of, request_of


def _simulation(depth: int = 2, policy: Policy | None = None, **limits: int) -> Simulation:
    return Simulation(Scheduler(limits_of(**limits), policy or Policy(max_step_slowdown=0)), depth=depth)


def _num_computed(simulation: Simulation, sequence: Sequence) -> int:
    """Tokens computed of it in all steps."""
    return sum(
        num_tokens
        for step in simulation.steps
        for other, num_tokens in zip(step.sequences, step.num_tokens, strict=True)
        if other is sequence
    )


# ---- the cache


def test_the_next_turn_of_a_chat_computes_only_what_is_new() -> None:
    simulation = _simulation()
    first = simulation.add(request_of(10, 12))
    simulation.run()
    # Of 22 tokens the last one was never computed; 5 blocks of 4 are whole.
    history = (*first.request.prompt_ids, *first.output_ids)
    second = simulation.add(request_of(0, 2, prompt_ids=(*history, 1, 2, 3)))
    simulation.run()
    assert (first.num_cached, second.num_cached) == (0, 20)
    assert _num_computed(simulation, second) == 25 - 20 + 1
    simulation.check_over()


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    simulation = _simulation()
    for _ in range(2):
        simulation.add(request_of(0, 1, prompt_ids=tuple(range(12))))
        simulation.run()
    assert simulation.sequences[1].num_cached == 8
    simulation.check_over()


def test_a_cancelled_prompt_leaves_what_was_answered() -> None:
    simulation = _simulation(max_step_tokens=8)
    first = simulation.add(request_of(40, 4))
    simulation.step()
    assert (first.num_computed, first.num_confirmed) == (16, 8)
    simulation.scheduler.finish(first, FinishReason.CANCELLED)
    second = simulation.add(request_of(40, 4))
    simulation.run()
    assert second.num_cached == 8
    simulation.check_over()


def test_salts_do_not_share() -> None:
    simulation = _simulation()
    for salt in ("", "a", "b", "a"):
        simulation.add(request_of(12, 1, cache_salt=salt))
        simulation.run()
    assert [sequence.num_cached for sequence in simulation.sequences] == [0, 0, 0, 8]
    simulation.check_over()


def test_prompt_logprobs_need_every_position_but_leave_them_to_others() -> None:
    simulation = _simulation()
    for prompt_logprobs in (True, True, False):
        simulation.add(request_of(12, 1, prompt_logprobs=prompt_logprobs))
        simulation.run()
    assert [sequence.num_cached for sequence in simulation.sequences] == [0, 0, 8]
    simulation.check_over()


def test_without_a_cache_nothing_is_shared() -> None:
    simulation = _simulation(policy=Policy(prefix_caching=False))
    for _ in range(2):
        simulation.add(request_of(12, 1))
        simulation.run()
    request = request_of(3, 9)
    for _ in range(2):
        simulation.add(request)
        simulation.step()
    simulation.run()
    assert not any(sequence.num_cached or sequence.keys for sequence in simulation.sequences)
    assert not any(step.copies for step in simulation.steps)
    assert simulation.scheduler.blocks.num_free == simulation.scheduler.blocks.num_blocks


def test_what_failed_by_itself_leaves_nothing_of_its_last_step() -> None:
    simulation = _simulation()
    first = simulation.add(request_of(12, 8))
    simulation.device.faults[first.id] = 0
    second = simulation.add(request_of(12, 8))
    simulation.run()
    assert (first.finish_reason, second.finish_reason) == (FinishReason.FAILED, FinishReason.LENGTH)
    assert second.num_cached == 0
    simulation.check_over()


def test_what_a_failed_sequence_has_generated_is_not_shared() -> None:
    simulation = _simulation()
    sequence = simulation.add(request_of(4, 30))
    simulation.device.faults[sequence.id] = 21
    simulation.run()
    assert len(sequence.output_ids) > 12
    assert simulation.scheduler.blocks.num_cached == 0
    simulation.check_over()


def test_what_a_sequence_had_computed_before_it_failed_is_found_by_nobody() -> None:
    simulation = _simulation(max_step_tokens=8)
    first = simulation.add(request_of(24, 4))
    simulation.device.faults[first.id] = 20
    simulation.run()
    assert first.finish_reason is FinishReason.FAILED
    assert simulation.scheduler.blocks.num_cached == 0
    second = simulation.add(request_of(24, 4))
    simulation.run()
    assert second.num_cached == 0
    simulation.check_over()


def test_what_others_hold_of_a_failed_sequence_is_forgotten_when_the_last_of_them_fails() -> None:
    simulation = _simulation(max_step_tokens=64)
    request = request_of(16, 20)
    first, second = simulation.add(request), simulation.add(request)
    while not second.output_ids:
        simulation.step()
    simulation.device.faults |= {first.id: 0, second.id: 25}
    while first.status is Status.RUNNING:
        simulation.step()
    assert simulation.scheduler.blocks.lookup("", second.keys, 4) == 4
    simulation.run()
    assert second.finish_reason is FinishReason.FAILED
    assert simulation.scheduler.blocks.num_cached == 0
    simulation.check_over()


# ---- leaders and followers


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_step_tokens", [8, 64])
def test_four_requests_with_one_new_prefix_compute_it_once(depth: int, max_step_tokens: int) -> None:
    simulation = _simulation(depth, max_step_tokens=max_step_tokens)
    stem = prompt_of(32)
    for tail in range(4):
        simulation.add(request_of(0, 2, prompt_ids=(*stem, 40 + tail)))
    simulation.run()
    assert [sequence.num_cached for sequence in simulation.sequences] == [0, 32, 32, 32]
    assert [_num_computed(simulation, sequence) for sequence in simulation.sequences] == [34, 2, 2, 2]
    admitted = [[sequence.id for sequence in step.admitted] for step in simulation.steps]
    assert [ids for ids in admitted if ids] == [[1], [2, 3, 4]]
    assert all(not sequence.num_overtaken for sequence in simulation.sequences)
    simulation.check_over()


def test_followers_are_passed_by_those_who_have_nothing_to_wait_for() -> None:
    simulation = _simulation(max_step_tokens=8)
    for tail in range(2):
        simulation.add(request_of(0, 2, prompt_ids=(*prompt_of(32), 40 + tail)))
    other = simulation.add(request_of(4, 2, variant=35))
    simulation.schedule()
    assert other.status is Status.RUNNING
    assert simulation.sequences[1].status is Status.WAITING
    simulation.run()
    assert simulation.sequences[1].num_overtaken == 0
    simulation.check_over()


@pytest.mark.parametrize("num_followers", [10, MAX_NEW_FOLLOWERS, 3 * MAX_NEW_FOLLOWERS])
def test_however_many_follow_others_need_not_wait_for_their_leader(num_followers: int) -> None:
    simulation = _simulation(num_blocks=400, max_step_tokens=16, max_step_sequences=8)
    document = tuple(position // 20 for position in range(400))
    for number in range(num_followers + 1):
        simulation.add(request_of(0, 1, prompt_ids=(*document, number % 50, number // 50)))
    other = simulation.add(request_of(4, 1, variant=35))
    for _ in range(1 + num_followers // MAX_NEW_FOLLOWERS):
        simulation.schedule()
        simulation.answer()
    assert other.status is Status.FINISHED
    assert simulation.scheduler.num_waiting == num_followers
    assert simulation.sequences[0].num_confirmed < 100
    simulation.run()
    assert sum(_num_computed(simulation, sequence) for sequence in simulation.sequences) < 2 * 400
    simulation.check_over()


def test_long_prompts_are_found_to_follow_over_several_steps() -> None:
    with patch("headrace_router.scheduling.admission.MAX_NEW_KEYS", 16):
        simulation = _simulation(max_step_tokens=8)
        for tail in range(5):
            simulation.add(request_of(0, 1, prompt_ids=(*prompt_of(32), 40 + tail)))
        other = simulation.add(request_of(4, 1, variant=35))
        num_found = []
        while other.status is Status.WAITING:
            simulation.schedule()
            num_found.append(sum(sequence.leader is not None for sequence in simulation.sequences))
            simulation.answer()
        assert num_found == [2, 4, 4]
        simulation.run()
        simulation.check_over()


def test_those_who_follow_are_looked_at_up_to_a_bound() -> None:
    with patch("headrace_router.scheduling.admission.MAX_FOLLOWERS", 3):
        simulation = _simulation(max_step_tokens=8)
        for tail in range(4):
            simulation.add(request_of(0, 1, prompt_ids=(*prompt_of(32), 40 + tail)))
        simulation.schedule()
        other = simulation.add(request_of(4, 1, variant=35))
        simulation.schedule()
        assert other.status is Status.WAITING
        simulation.run()
        simulation.check_over()


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_nobody_follows_one_of_worse_priority(priority: int) -> None:
    simulation = _simulation(max_step_tokens=8)
    leader = simulation.add(request_of(0, 2, prompt_ids=(*prompt_of(32), 40)))
    simulation.schedule()
    other = simulation.add(request_of(0, 2, prompt_ids=(*prompt_of(32), 41), priority=priority))
    simulation.schedule()
    assert leader.status is Status.RUNNING
    assert (other.status is Status.RUNNING) == (priority < 0)
    simulation.run()
    simulation.check_over()


def test_a_follower_waits_for_what_it_has_in_common_and_no_longer() -> None:
    simulation = _simulation(depth=1, max_step_tokens=8)
    leader = simulation.add(request_of(80, 2))
    follower = simulation.add(request_of(0, 2, prompt_ids=(*prompt_of(16), 49)))
    for num_computed in (8, 16):
        simulation.step()
        assert (leader.num_computed, follower.status) == (num_computed, Status.WAITING)
    simulation.step()
    assert follower.num_cached == 16
    assert leader.num_prefill > leader.num_computed
    simulation.run()
    simulation.check_over()


def test_followers_look_in_their_own_namespace() -> None:
    simulation = _simulation(max_step_tokens=64)
    for salt in ("", "a", "a"):
        simulation.add(request_of(24, 2, cache_salt=salt))
        if not salt:
            simulation.run()
    simulation.run()
    assert [sequence.num_cached for sequence in simulation.sequences] == [0, 0, 20]
    simulation.check_over()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_when_a_leader_leaves_the_next_one_leads(num_steps: int) -> None:
    simulation = _simulation(max_step_tokens=8)
    stem = prompt_of(32)
    leader, *followers = [
        simulation.add(request_of(0, 2, prompt_ids=(*stem, 40 + tail))) for tail in range(3)
    ]
    simulation.schedule()
    for _ in range(num_steps):
        simulation.step()
    simulation.scheduler.finish(leader, FinishReason.CANCELLED)
    simulation.run()
    assert [sequence.num_cached for sequence in followers] == [8 * num_steps, 32]
    simulation.check_over()


def test_nobody_waits_for_a_leader_that_does_not_get_on() -> None:
    simulation = _simulation(depth=1, max_step_tokens=8)
    leader, follower = [
        simulation.add(request_of(0, 2, prompt_ids=(*prompt_of(32), 40 + tail))) for tail in range(2)
    ]
    simulation.step()
    assert follower.leader is leader
    # As if there had been no block for it for some steps.
    leader.last_step_id -= MAX_PAUSE
    simulation.schedule()
    assert follower.status is Status.RUNNING
    simulation.answer()
    simulation.run()
    simulation.check_over()


def test_a_prompt_that_differs_within_the_first_block_is_not_waited_for() -> None:
    simulation = _simulation(max_step_tokens=64)
    simulation.add(request_of(0, 2, prompt_ids=(1, 2, 3, 4, 5)))
    simulation.add(request_of(0, 2, prompt_ids=(1, 2, 3, 9, 5)))
    simulation.schedule()
    assert simulation.scheduler.num_waiting == 0
    simulation.run()
    simulation.check_over()


# ---- siblings


def test_siblings_compute_one_token_each() -> None:
    simulation = _simulation(max_step_tokens=64)
    request = request_of(14, 6)
    siblings = [simulation.add(request) for _ in range(4)]
    simulation.run()
    assert [sequence.num_cached for sequence in siblings] == [0, 13, 13, 13]
    (admitting,) = (step for step in simulation.steps if len(step.admitted) == 3)
    source = {source for source, _ in admitting.copies}
    assert (len(source), len(admitting.copies)) == (1, 3)
    assert [arrival.num_computed for arrival in admitting.arrivals] == [13, 13, 13]
    assert all(sequence.output_ids == siblings[0].output_ids for sequence in siblings)
    simulation.check_over()


def test_a_sibling_that_comes_after_all_others_have_ended_finds_the_whole_blocks() -> None:
    simulation = _simulation()
    request = request_of(14, 2)
    simulation.add(request)
    simulation.run()
    late = simulation.add(request)
    simulation.run()
    assert late.num_cached == 12
    assert not any(step.copies for step in simulation.steps)
    simulation.check_over()


def test_siblings_that_want_prompt_logprobs_compute_every_position() -> None:
    simulation = _simulation(max_step_tokens=64)
    request = request_of(14, 6, prompt_logprobs=True)
    for _ in range(3):
        simulation.add(request)
        simulation.step()
    simulation.run()
    assert [_num_computed(simulation, sequence) for sequence in simulation.sequences] == [19, 19, 19]
    simulation.check_over()


def test_equal_prompts_of_different_askers_copy_nothing() -> None:
    simulation = _simulation()
    for _ in range(2):
        simulation.add(request_of(14, 9))
    simulation.run()
    assert simulation.sequences[1].num_cached == 12
    simulation.check_over()
