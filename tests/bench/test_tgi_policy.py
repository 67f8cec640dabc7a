"""The rules of Text Generation Inference, one by one."""

import pytest

from bench.simulation.cost import Work
from bench.simulation.jobs import Job
from bench.simulation.mixes import synthesize
from bench.simulation.tgi_policy import TgiKnobs, TgiPolicy
from bench.simulation.traces import Arrival, Segment
from tests.bench.replaying import arrival, machine, replayed


def policy(knobs: TgiKnobs | None = None, *, num_blocks: int = 64, max_step_tokens: int = 512) -> TgiPolicy:
    made = machine(num_blocks=num_blocks, max_step_tokens=max_step_tokens)
    return TgiPolicy("tgi", made, knobs or TgiKnobs(), longest_prompt=600)


def add(to: TgiPolicy, item: Arrival) -> Job:
    output = item.output_ids()
    job = Job(index=0, arrival=item, arrived_at=0.0, output=output, num_left=len(output))
    assert to.add(job, 0.0)
    return job


def step(of: TgiPolicy) -> tuple[Work, list[Job]]:
    work = of.schedule(0.0)
    assert work is not None
    return work, of.answer(0.01)


def test_the_worst_case_is_reserved_before_the_first_step() -> None:
    tgi = policy()
    add(tgi, arrival(1, 100, 5, max_new_tokens=200))
    tgi.schedule(0.0)
    assert tgi.num_held_slots == 304, "299 tokens: the last one's KV is never written"
    assert tgi.num_unused_slots == 204


def test_the_front_of_the_queue_blocks_who_would_fit() -> None:
    tgi = policy()
    add(tgi, arrival(1, 100, 50, max_new_tokens=400))
    step(tgi)
    add(tgi, arrival(2, 300, 5, max_new_tokens=400))
    add(tgi, arrival(3, 16, 5, max_new_tokens=16))
    step(tgi)
    assert (tgi.num_running, tgi.num_waiting) == (1, 2)


def test_a_prompt_is_computed_beside_decodes_and_a_step_without_admission_follows() -> None:
    tgi = policy()
    first = add(tgi, arrival(1, 100, 50))
    assert step(tgi)[0].num_tokens == 100
    add(tgi, arrival(2, 30, 5))
    work, gained = step(tgi)
    assert (work.num_rows, work.num_tokens, work.num_samples) == (2, 31, 2)
    assert first in gained
    add(tgi, arrival(3, 30, 5))
    assert step(tgi)[0].num_tokens == 2
    assert step(tgi)[0].num_tokens == 32


def test_without_chunking_running_ones_stall_for_a_prompt() -> None:
    tgi = policy(TgiKnobs(chunking=False))
    first = add(tgi, arrival(1, 100, 50))
    step(tgi)
    add(tgi, arrival(2, 600, 5))
    work, gained = step(tgi)
    assert (work.num_rows, work.num_tokens) == (1, 600), "the budget is raised to the longest prompt"
    assert first not in gained
    assert len(step(tgi)[1]) == 2


def test_too_few_waiting_ones_wait_for_max_waiting_tokens() -> None:
    tgi = policy(TgiKnobs(chunking=False, waiting_served_ratio=1.0, max_waiting_tokens=3))
    add(tgi, arrival(1, 20, 50))
    add(tgi, arrival(2, 20, 50))
    step(tgi)
    add(tgi, arrival(3, 20, 50))
    assert [step(tgi)[0].num_tokens for _ in range(4)] == [2, 2, 20, 3]


def test_a_long_prompt_is_cut_to_the_budget_and_shared_from_the_last_to_the_first() -> None:
    tgi = policy(max_step_tokens=64)
    add(tgi, arrival(1, 150, 5))
    assert step(tgi)[0].num_tokens == 64
    add(tgi, arrival(2, 40, 5))
    # The running one needs the whole budget for its next chunk, so nobody joins.
    work, gained = step(tgi)
    assert (work.num_rows, work.num_tokens, gained) == (1, 64, [])
    # It needs 22 more; 42 are left, rounded up to whole blocks.
    work, gained = step(tgi)
    assert (work.num_rows, work.num_tokens, len(gained)) == (2, 62, 2)


def test_a_prompt_is_shared_only_after_its_request_has_ended() -> None:
    tgi = policy()
    system = Segment(1000, 64)
    first = add(tgi, arrival(1, 20, 2, prefix=(system,)))
    step(tgi)
    second = add(tgi, arrival(2, 20, 2, prefix=(system,)))
    step(tgi)
    assert first.num_left == 0
    third = add(tgi, arrival(3, 20, 2, prefix=(system,)))
    step(tgi)
    step(tgi)
    assert (second.num_cached, third.num_cached) == (0, 64)


def test_answers_are_not_cached() -> None:
    first = arrival(1, 64, 40)
    again = Arrival(at=1.0, prompt=(*first.prompt, first.output), output=Segment(99, 2), max_new_tokens=9)
    record = replayed(policy(), [first, again])
    assert record.num_cached_tokens == 64


def test_a_prompt_that_is_cached_whole_computes_one_token() -> None:
    first, again = (arrival(1, 64, 3, at=at) for at in (0.0, 1.0))
    record = replayed(policy(), [first, again])
    assert record.num_cached_tokens == 63


def test_a_long_answer_joins_the_queue_again_after_each_slice() -> None:
    tgi = policy(TgiKnobs(prefix_caching=False), num_blocks=512)
    record = replayed(tgi, [arrival(1, 100, 1500, max_new_tokens=1500)], num_blocks=512)
    assert record.num_output_tokens == 1500 and record.num_answered == 1
    # The second slice computes the prompt and the first slice, of which the last token was new.
    assert tgi.counters.num_computed_tokens == 100 + 1499 + 100 + 1023


def test_who_needs_more_blocks_than_there_are_is_refused() -> None:
    record = replayed(policy(), [arrival(1, 1000, 5, max_new_tokens=24), arrival(2, 10, 5)])
    assert (record.num_refused, record.num_answered) == (1, 1), "a block is reserved"


@pytest.mark.parametrize("knobs", [TgiKnobs(), TgiKnobs(chunking=False), TgiKnobs(prefix_caching=False)])
def test_every_token_is_computed_once_and_everything_given_back(knobs: TgiKnobs) -> None:
    trace = synthesize("chat", num_requests=150, rate=20.0, seed=3)
    tgi = TgiPolicy("tgi", machine(num_blocks=3000), knobs, longest_prompt=16384)
    record = replayed(tgi, trace, num_blocks=3000)
    assert record.num_answered == 150
    assert record.num_output_tokens == sum(item.output.num_tokens for item in trace.arrivals)
    useful = record.num_prompt_tokens - record.num_cached_tokens + sum(record.gap_counts)
    assert tgi.counters.num_computed_tokens == useful
    assert (tgi.num_held_slots, tgi.num_unused_slots) == (0, 0)
    assert bool(record.num_cached_tokens) == knobs.prefix_caching
