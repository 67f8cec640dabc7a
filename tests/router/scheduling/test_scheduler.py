"""Scheduler: who runs in a step, and what its result means. One step at a time; for two see test_overlap."""

import pytest
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.request import FinishReason, Request, SamplingParams, Sequence, Status
from headrace_router.scheduling.scheduler import NO_TOKEN, Scheduler
from headrace_router.scheduling.step import PromptLogprobs, SampledToken, Step, StepResult

from tests.router.scheduling.device import result_of
from tests.router.scheduling.simulation import Simulation, counts, limits_of, request_of


def _result(token_ids: dict[int, int]) -> StepResult:
    return result_of([SampledToken(sequence_id=i, token_id=t, logprob=-1.0) for i, t in token_ids.items()])


def _schedule(scheduler: Scheduler) -> Step:
    step = scheduler.schedule(0.0)
    assert step is not None
    return step


def _sequence(number: int, **fields: object) -> Sequence:
    values = {"prompt_ids": (1, 2, 3), "sampling": SamplingParams(), "max_new_tokens": 3} | fields
    return Sequence(id=number, request=Request(**values), arrived_at=0.0)  # type: ignore[arg-type]


# ---- what to run


def test_decodes_come_before_prompts_and_prompts_come_in_chunks() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=10), Policy(max_step_slowdown=0)))
    simulation.add(request_of(3, 20))
    simulation.step()
    simulation.add(request_of(25, 2))
    for expected in ({1: 1, 2: 9}, {1: 1, 2: 9}, {1: 1, 2: 7}, {1: 1, 2: 1}):
        simulation.step()
        assert counts(simulation.steps[-1]) == expected
    assert [step.is_prefill for step in simulation.steps] == [True, True, True, True, False]
    assert [sequence.id for sequence in simulation.steps[1].samplers] == [1]
    assert [[end for _, end in step.chunks] for step in simulation.steps] == [[3], [9], [18], [25], []]


def test_a_short_prompt_is_not_stuck_behind_long_ones() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=32)))
    longs = [simulation.add(request_of(90, 1, variant=variant)) for variant in range(3)]
    simulation.step()
    short = simulation.add(request_of(8, 1, variant=9))
    simulation.step()
    assert short.status is Status.FINISHED
    assert all(long.status is Status.RUNNING or not long.output_ids for long in longs)


def test_the_oldest_prompt_is_sure_of_half_the_budget() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=16)))
    long = simulation.add(request_of(80, 1))
    simulation.step()
    while long.num_computed < 80:
        computed = long.num_computed
        for variant in range(1, 5):
            simulation.add(request_of(8, 1, variant=len(simulation.steps) + variant))
        simulation.step()
        if long.status is Status.FINISHED:
            break
        assert long.num_computed >= computed + 7
    assert len(simulation.steps) <= 11


@pytest.mark.parametrize("depth", [1, 2])
def test_equal_requests_are_admitted_and_finished_in_order(depth: int) -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=8, max_step_sequences=3)), depth=depth)
    for variant in range(10):
        simulation.add(request_of(12, 4, variant=variant))
    finished: list[int] = []
    while len(finished) < 10:
        finished += [u.sequence.id for u in simulation.step() if u.sequence.status is Status.FINISHED]
    admitted = [sequence.id for step in simulation.steps for sequence in step.admitted]
    assert admitted == sorted(admitted)
    assert finished == sorted(finished)


def test_better_priorities_are_computed_first_and_worse_ones_get_on() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=16)))
    worse = simulation.add(request_of(60, 1, priority=1))
    simulation.step()
    assert worse.num_computed == 16
    for variant in range(1, 4):
        simulation.add(request_of(40, 1, variant=variant))
    simulation.step()
    assert counts(simulation.steps[-1]) == {1: 2, 2: 14}


# ---- blocks


def test_blocks_are_taken_when_a_sequence_reaches_them() -> None:
    simulation = Simulation(Scheduler(limits_of(block_size=4)))
    simulation.add(request_of(3, 8))
    held = []
    for _ in range(7):
        simulation.step()
        held.append((simulation.scheduler.blocks.num_held, simulation.scheduler.num_unused_slots))
    # 3 prompt tokens in the first step, then one more in each.
    assert held == [(1, 1), (1, 0), (2, 3), (2, 2), (2, 1), (2, 0), (3, 3)]


def test_a_dry_pool_preempts_the_youngest_which_comes_back_whole() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=8, block_size=4)))
    old, young = simulation.add(request_of(8, 20)), simulation.add(request_of(8, 20, variant=20))
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


def test_a_dry_pool_preempts_the_worst_priority_first() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=9, block_size=4)))
    worse = simulation.add(request_of(8, 20, priority=1))
    others = [simulation.add(request_of(8, 8, variant=variant)) for variant in (20, 30)]
    simulation.run()
    assert worse.num_preemptions == 1
    assert all(not other.num_preemptions for other in others)
    simulation.check_over()


def test_a_preempted_sequence_comes_back_through_the_cache() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=12, block_size=4)))
    for variant in (0, 20):
        simulation.add(request_of(8, 28, variant=variant))
    while not any(sequence.num_preemptions for sequence in simulation.sequences):
        simulation.step()
    young = simulation.sequences[1]
    simulation.scheduler.finish(simulation.sequences[0], FinishReason.CANCELLED)
    simulation.step()
    (arrival,) = simulation.steps[-1].arrivals
    assert arrival.sequence is young
    # All that was computed whole and not evicted; never the last token, which has not been.
    assert 0 < arrival.num_computed <= young.num_tokens - 1
    assert arrival.num_computed % 4 == 0
    simulation.run()
    simulation.check_over()


def test_what_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(limits_of(num_blocks=10, block_size=4, max_total_tokens=40))
    assert scheduler.can_hold(_sequence(1, max_new_tokens=37))
    assert not scheduler.can_hold(_sequence(1, max_new_tokens=38))
    with pytest.raises(ValueError, match="longer than 40 tokens"):
        scheduler.add(_sequence(1, max_new_tokens=38))


def test_the_longest_request_runs_in_a_pool_of_its_size() -> None:
    simulation = Simulation(Scheduler(limits_of(num_blocks=10, block_size=4)))
    sequence = simulation.add(request_of(20, 20))
    other = simulation.add(request_of(20, 20, variant=30))
    simulation.run()
    assert sequence.num_preemptions == 0
    assert other.finish_reason is FinishReason.LENGTH
    simulation.check_over()


def test_a_sequence_moves_to_a_scheduler_with_blocks_of_another_size() -> None:
    first = Simulation(Scheduler(limits_of(num_blocks=8, block_size=4)))
    for variant in (0, 20):
        first.add(request_of(8, 20, variant=variant))
    while not first.sequences[1].num_preemptions:
        first.step()
    second = Simulation(Scheduler(limits_of(num_blocks=8, block_size=8)))
    for sequence in first.scheduler.waiting:
        second.sequences.append(sequence)
        second.num_preempted_elsewhere += sequence.num_preemptions
        second.scheduler.add(sequence)
    second.run()
    second.check_over()


# ---- ends


def _finished(request: Request, *token_ids: int) -> Sequence:
    scheduler = Scheduler(limits_of())
    sequence = Sequence(id=1, request=request, arrived_at=0.0)
    scheduler.add(sequence)
    for token_id in token_ids:
        assert sequence.status is not Status.FINISHED
        _schedule(scheduler)
        scheduler.update(_result({1: token_id}))
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
    _schedule(scheduler)
    result = _result({})
    part = PromptLogprobs(sequence_id=1, start=1, logprobs=[-1.0] * 4, top=[[]] * 4)
    result.prompt_logprobs.append(part)
    (update,) = scheduler.update(result)
    assert (update.prompt_logprobs, update.token, sequence.status) == (part, None, Status.RUNNING)
    _schedule(scheduler)
    (update,) = scheduler.update(_result({1: 9}))
    assert (update.token, sequence.finish_reason, sequence.output_ids) == (None, FinishReason.LENGTH, [])


def test_prompt_logprobs_come_with_the_first_token() -> None:
    scheduler = Scheduler(limits_of())
    sequence = _sequence(1, prompt_logprobs=True)
    scheduler.add(sequence)
    assert sequence.wants_prompt_logprobs
    _schedule(scheduler)
    result = _result({1: 9})
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
    assert simulation.scheduler.blocks.num_held == 0
    assert simulation.scheduler.schedule(0.0) is None
    assert simulation.scheduler.take_dropped() == ([1] if num_steps else [])


def test_one_sequence_fails_alone() -> None:
    scheduler = Scheduler(limits_of())
    sequences = [_sequence(1), _sequence(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    _schedule(scheduler)
    result = _result({2: 6})
    result.errors.append((1, "no"))
    updates = {update.sequence.id: update for update in scheduler.update(result)}
    assert updates[1].error == "no"
    assert [sequence.status for sequence in sequences] == [Status.FINISHED, Status.RUNNING]
    # The shard has dropped it by itself.
    assert _schedule(scheduler).dropped_ids == []


def test_a_sequence_that_gets_neither_token_nor_error_fails() -> None:
    scheduler = Scheduler(limits_of())
    sequences = [_sequence(1), _sequence(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    _schedule(scheduler)
    first, second = scheduler.update(_result({2: 6}))
    assert (first.sequence.id, first.error) == (1, NO_TOKEN)
    assert second.token is not None
    assert sequences[0].finish_reason is FinishReason.FAILED
    assert _schedule(scheduler).dropped_ids == [1]


def test_a_lost_shard_fails_what_had_tokens_and_replays_the_rest_once() -> None:
    simulation = Simulation(Scheduler(limits_of(max_step_tokens=16)))
    scheduler = simulation.scheduler
    begun, computing = simulation.add(request_of(4, 20)), simulation.add(request_of(60, 20, variant=30))
    simulation.step()
    queued = simulation.add(request_of(4, 4))
    assert begun.output_ids and not computing.output_ids
    assert simulation.lose_shard() == [begun]
    assert begun.finish_reason is FinishReason.FAILED
    assert scheduler.waiting == [computing, queued]
    # What the cache had is gone with the shard.
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    simulation.step()
    assert simulation.lose_shard() == [computing] or computing.num_replays == 1
    assert computing not in scheduler.waiting


def test_whoever_gave_way_often_enough_keeps_its_blocks() -> None:
    """A pool in which two have no room beside each other, and one of a better priority who never stops."""
    limits = limits_of(num_blocks=12, block_size=4, max_step_tokens=2, max_step_sequences=2)
    simulation = Simulation(Scheduler(limits))
    again = simulation.add(request_of(1, 25))
    victim = simulation.add(request_of(2, 32, variant=30, priority=1))
    for variant in range(3000):
        simulation.step()
        if again.status is Status.FINISHED:
            again = simulation.add(request_of(1, 25, variant=variant))
        if victim.status is Status.FINISHED:
            break
    assert victim.finish_reason is FinishReason.LENGTH
    assert victim.num_preemptions >= 2
