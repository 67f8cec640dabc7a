"""Scheduler: who runs in a step, and what its result means."""

import pytest
from headrace_router.scheduling.request import FinishReason, Request, SamplingParams, Sequence, Status
from headrace_router.scheduling.scheduler import MAX_OVERTAKEN, Scheduler
from headrace_router.scheduling.step import PromptLogprobs, SampledToken, Step, StepResult

from tests.router.scheduling.simulation import Simulation, limits_of, request_of


def _counts(step: Step) -> dict[int, int]:
    return {part.sequence.id: part.num_tokens for part in step.scheduled}


def _result(step: Step, token_ids: dict[int, int]) -> StepResult:
    return StepResult(
        tokens=[SampledToken(sequence_id=i, token_id=t, logprob=-1.0) for i, t in token_ids.items()],
        prompt_logprobs=[],
        errors=[],
        forward_seconds=0.0,
        sample_seconds=0.0,
        idle_seconds=0.0,
        num_sequences=0,
    )


def _schedule(scheduler: Scheduler) -> Step:
    step = scheduler.schedule(0.0)
    assert step is not None
    return step


def _sequence(number: int, **fields: object) -> Sequence:
    values = {"prompt_ids": (1, 2, 3), "sampling": SamplingParams(), "max_new_tokens": 3} | fields
    return Sequence(id=number, request=Request(**values), arrived_at=0.0)  # type: ignore[arg-type]


# ---- what to run


def test_decodes_come_before_prompts_and_prompts_come_in_chunks() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=10)))
    simulation.add(request_of(3, 20))
    simulation.step()
    simulation.add(request_of(25, 2))
    for expected in ({1: 1, 2: 9}, {1: 1, 2: 9}, {1: 1, 2: 7}, {1: 1, 2: 1}):
        simulation.step()
        assert _counts(simulation.steps[-1]) == expected
    assert [step.is_prefill for step in simulation.steps] == [True, True, True, True, False]
    assert [part.samples for part in simulation.steps[1].scheduled] == [True, False]


def test_a_short_prompt_is_not_stuck_behind_long_ones() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=32)))
    longs = [simulation.add(request_of(90, 1)) for _ in range(3)]
    simulation.step()
    short = simulation.add(request_of(8, 1))
    simulation.step()
    assert short.status is Status.FINISHED
    assert all(long.status is Status.RUNNING or not long.output_ids for long in longs)


def test_the_oldest_prompt_is_sure_of_half_the_budget() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=16)))
    long = simulation.add(request_of(80, 1))
    simulation.step()
    while long.num_computed < 80:
        computed = long.num_computed
        for _ in range(4):
            simulation.add(request_of(8, 1))
        simulation.step()
        assert long.status is Status.FINISHED or long.num_computed >= computed + 7
        if long.status is Status.FINISHED:
            break
    assert len(simulation.steps) <= 11


def test_equal_requests_are_admitted_and_finished_in_order() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=8, max_step_sequences=3)))
    for salt in range(10):
        simulation.add(request_of(12, 4, salt=salt))
    finished: list[int] = []
    while len(finished) < 10:
        finished += [u.sequence.id for u in simulation.step() if u.sequence.status is Status.FINISHED]
    admitted = [sequence.id for step in simulation.steps for sequence in step.admitted]
    assert admitted == sorted(admitted)
    assert finished == sorted(finished)


def test_no_more_run_than_a_step_may_carry() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_sequences=2)))
    for _ in range(5):
        simulation.add(request_of(4, 4))
    simulation.step()
    assert (simulation.scheduler.num_running, simulation.scheduler.num_waiting) == (2, 3)
    simulation.run()
    simulation.check_over()


def test_schedule_may_be_called_before_the_result_is_known() -> None:
    scheduler = Scheduler(limits_of(max_step_tokens=8))
    scheduler.add(_sequence(1, prompt_ids=tuple(range(1, 13))))
    first, second = _schedule(scheduler), _schedule(scheduler)
    assert (_counts(first), _counts(second)) == ({1: 8}, {1: 4})
    # Everything known is on its way: there is nothing to compute until a token comes back.
    assert scheduler.schedule(0.0) is None
    scheduler.update(_result(first, {}))
    scheduler.update(_result(second, {1: 9}))
    assert _counts(_schedule(scheduler)) == {1: 1}


# ---- waiting_served_ratio, max_waiting_tokens


def test_waiting_ones_are_admitted_once_they_are_enough() -> None:
    simulation = Simulation(Scheduler(limits_of(), waiting_served_ratio=0.5, max_waiting_tokens=1000))
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
    simulation = Simulation(Scheduler(limits_of(), waiting_served_ratio=2.0, max_waiting_tokens=3))
    simulation.add(request_of(2, 100))
    simulation.step()
    simulation.add(request_of(2, 100))
    for expected in (1, 1, 1, 2):
        simulation.step()
        assert simulation.scheduler.num_running == expected
    assert simulation.steps[-1].is_overdue


# ---- blocks


def test_blocks_are_taken_when_a_sequence_reaches_them() -> None:
    simulation = Simulation(Scheduler(limits_of(block_size=4)))
    simulation.add(request_of(3, 8))
    used = []
    for _ in range(7):
        simulation.step()
        used.append(simulation.scheduler.blocks.num_used)
    # 3 prompt tokens in the first step, then one more in each.
    assert used == [1, 1, 2, 2, 2, 2, 3]


def test_a_dry_pool_preempts_the_youngest_which_comes_back_whole() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=8, block_size=4)))
    old, young = simulation.add(request_of(8, 20)), simulation.add(request_of(8, 20, salt=7))
    while not young.num_preemptions:
        simulation.step()
    assert (old.status, young.status) == (Status.RUNNING, Status.WAITING)
    assert simulation.steps[-1].num_preempted == 1
    assert young.id in simulation.steps[-1].dropped_ids
    assert young.output_ids
    assert old.num_preemptions == 0
    simulation.run()
    assert young.num_preemptions == 1
    assert young.admitted_at == 0.0
    simulation.check_over()


def test_the_front_of_the_queue_is_passed_only_so_often() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=20, block_size=4, max_step_tokens=64)))
    simulation.add(request_of(30, 40))
    simulation.step()
    large = simulation.add(request_of(60, 4))
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
    for _ in range(3):
        simulation.add(request_of(7, 5))
    simulation.step()
    late = simulation.add(request_of(8, 4))
    simulation.step()
    # Four blocks are free, but three of them will be wanted by those that run.
    assert simulation.scheduler.blocks.num_free == 4
    assert late.status is Status.WAITING
    simulation.run()
    assert all(sequence.num_preemptions == 0 for sequence in simulation.sequences)


def test_what_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(limits_of(num_blocks=10, block_size=4, max_total_tokens=40))
    assert scheduler.can_hold(_sequence(1, max_new_tokens=37))
    assert not scheduler.can_hold(_sequence(1, max_new_tokens=38))
    with pytest.raises(ValueError, match="longer than 40 tokens"):
        scheduler.add(_sequence(1, max_new_tokens=38))


def test_the_longest_request_runs_in_a_pool_of_its_size() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=10, block_size=4)))
    sequence = simulation.add(request_of(20, 20))
    other = simulation.add(request_of(20, 20, salt=1))
    simulation.run()
    assert sequence.num_preemptions == 0
    assert other.finish_reason is FinishReason.LENGTH
    simulation.check_over()


# ---- ends


def _finished(request: Request, *token_ids: int) -> Sequence:
    scheduler = Scheduler(limits_of())
    sequence = Sequence(id=1, request=request, arrived_at=0.0)
    scheduler.add(sequence)
    for token_id in token_ids:
        assert sequence.status is not Status.FINISHED
        scheduler.update(_result(_schedule(scheduler), {1: token_id}))
    return sequence


def test_ends() -> None:
    def request(**fields: object) -> Request:
        return _sequence(1, max_new_tokens=3, eos_token_ids=frozenset({0, 7}), **fields).request

    assert _finished(request(), 4, 5, 6).finish_reason is FinishReason.LENGTH
    assert _finished(request(), 4, 0).finish_reason is FinishReason.EOS
    assert _finished(request(), 7).finish_reason is FinishReason.EOS
    assert _finished(request(stop_token_ids=frozenset({4})), 4).finish_reason is FinishReason.STOP
    # Length comes first, even if the last token is one that ends a sequence.
    assert _finished(request(), 4, 5, 0).finish_reason is FinishReason.LENGTH


def test_nothing_but_length_ends_before_min_new_tokens() -> None:
    fields = {"max_new_tokens": 5, "min_new_tokens": 2, "eos_token_ids": frozenset({0})}
    assert _finished(_sequence(1, **fields).request, 0, 0).finish_reason is None
    assert _finished(_sequence(1, **fields).request, 4, 0, 0).finish_reason is FinishReason.EOS


def test_a_prompt_alone_generates_nothing() -> None:
    scheduler = Scheduler(limits_of(max_step_tokens=4))
    sequence = _sequence(1, prompt_ids=(1, 2, 3, 4, 5), max_new_tokens=0, prompt_logprobs=True)
    scheduler.add(sequence)
    first = _schedule(scheduler)
    result = _result(first, {})
    part = PromptLogprobs(sequence_id=1, start=1, logprobs=[-1.0] * 4, top=[[]] * 4)
    result.prompt_logprobs.append(part)
    (update,) = scheduler.update(result)
    assert (update.prompt_logprobs, update.token, sequence.status) == (part, None, Status.RUNNING)
    (update,) = scheduler.update(_result(_schedule(scheduler), {1: 9}))
    assert (update.token, sequence.finish_reason, sequence.output_ids) == (None, FinishReason.LENGTH, [])


def test_prompt_logprobs_come_with_the_first_token() -> None:
    scheduler = Scheduler(limits_of())
    sequence = _sequence(1, prompt_logprobs=True)
    scheduler.add(sequence)
    assert sequence.wants_prompt_logprobs
    result = _result(_schedule(scheduler), {1: 9})
    result.prompt_logprobs.append(PromptLogprobs(sequence_id=1, start=1, logprobs=[-1.0] * 2, top=[[]] * 2))
    (update,) = scheduler.update(result)
    assert update.token is not None and update.prompt_logprobs is not None
    assert not sequence.wants_prompt_logprobs


# ---- cancelling and failing


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_cancelling_takes_effect_before_the_next_step(num_steps: int) -> None:
    """In the queue, in the middle of the prompt, decoding."""
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=8)))
    sequence = simulation.add(request_of(14, 5))
    for _ in range(num_steps):
        simulation.step()
    assert simulation.scheduler.finish(sequence, FinishReason.CANCELLED)
    assert not simulation.scheduler.finish(sequence, FinishReason.CANCELLED)
    assert sequence.finish_reason is FinishReason.CANCELLED
    assert simulation.scheduler.blocks.num_used == 0
    assert simulation.scheduler.schedule(0.0) is None
    assert simulation.scheduler.take_dropped() == ([1] if num_steps else [])


def test_a_cancelled_sequence_rides_along_and_its_late_token_is_ignored() -> None:
    scheduler = Scheduler(limits_of())
    sequences = [_sequence(1), _sequence(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    step = _schedule(scheduler)
    scheduler.finish(sequences[0], FinishReason.CANCELLED)
    updates = scheduler.update(_result(step, {1: 5, 2: 6}))
    assert [update.sequence.id for update in updates] == [2]
    assert sequences[0].output_ids == []
    assert _schedule(scheduler).dropped_ids == [1]


def test_one_sequence_fails_alone() -> None:
    scheduler = Scheduler(limits_of())
    sequences = [_sequence(1), _sequence(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    result = _result(_schedule(scheduler), {2: 6})
    result.errors.append((1, "no"))
    updates = {update.sequence.id: update for update in scheduler.update(result)}
    assert updates[1].error == "no"
    assert [sequence.status for sequence in sequences] == [Status.FINISHED, Status.RUNNING]
    # The shard has dropped it by itself.
    assert _schedule(scheduler).dropped_ids == []


def test_a_failed_step_takes_its_sequences_and_no_others() -> None:
    scheduler = Scheduler(limits_of(max_step_tokens=8))
    for number, num_prompt in ((1, 30), (2, 30), (3, 30)):
        scheduler.add(_sequence(number, prompt_ids=tuple(range(num_prompt))))
    first = _schedule(scheduler)
    assert _counts(first) == {1: 4, 2: 4}
    scheduler.update(_result(first, {}))
    scheduler._admit(scheduler.waiting[0], [], first, 0.0)
    step = _schedule(scheduler)
    failed = scheduler.fail_step(step)
    assert sorted(sequence.id for sequence in failed) == sorted(_counts(step))
    assert all(sequence.finish_reason is FinishReason.FAILED for sequence in failed)
    assert [sequence.id for sequence in scheduler.waiting] == [3]
    assert (scheduler.num_running, scheduler.blocks.num_used, scheduler.take_dropped()) == (0, 0, [])
    assert _schedule(scheduler).scheduled[0].is_new


def test_a_lost_shard_fails_what_had_tokens_and_replays_the_rest_once() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=16)))
    scheduler = simulation.scheduler
    begun, computing = simulation.add(request_of(4, 20)), simulation.add(request_of(60, 20))
    simulation.step()
    queued = simulation.add(request_of(4, 4))
    assert begun.output_ids and not computing.output_ids
    assert scheduler.lose_shard() == [begun]
    assert begun.finish_reason is FinishReason.FAILED
    assert scheduler.waiting == [computing, queued]
    simulation.known.clear()
    simulation.step()
    assert scheduler.lose_shard() == [computing] or computing.num_replays == 1
    assert computing not in scheduler.waiting
