"""headrace's scheduler keeps its promises under whole traces, and the adapter counts right."""

import pytest
from headrace_router.scheduling.policy import Policy as Knobs

from bench.simulation.figures import figures
from bench.simulation.headrace_policy import HeadracePolicy
from bench.simulation.mixes import synthesize
from bench.simulation.traces import Arrival, Segment
from tests.bench.replaying import arrival, machine, replayed


def policy(*, num_blocks: int = 64, max_in_flight: int = 2, knobs: Knobs | None = None) -> HeadracePolicy:
    made = machine(num_blocks=num_blocks, max_running=64)
    return HeadracePolicy("headrace", made, knobs or Knobs(), max_in_flight)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [1100, 6000])
@pytest.mark.parametrize("name", ["chat", "agents"])
def test_everybody_gets_all_tokens_and_everything_is_given_back(
    name: str, num_blocks: int, max_in_flight: int
) -> None:
    trace = synthesize(name, num_requests=120, rate=40.0, seed=3)
    headrace = policy(num_blocks=num_blocks, max_in_flight=max_in_flight)
    record = replayed(headrace, trace, num_blocks=num_blocks)
    found = figures(record, headrace.counters)
    assert record.num_answered + record.num_refused == 120 and record.num_answered > 90
    assert record.num_stuck == 0
    assert (headrace.num_held_slots, headrace.num_unused_slots) == (0, 0)
    assert found.num_recomputed_tokens >= 0
    if not found.num_preemptions:
        assert found.num_recomputed_tokens == 0
    # An end is known late only while another step is out.
    assert found.num_wasted_rows <= (record.num_answered if max_in_flight == 2 else 0)


def test_answers_are_cached_with_the_prompt() -> None:
    first = arrival(1, 64, 40)
    again = Arrival(at=1.0, prompt=(*first.prompt, first.output), output=Segment(99, 2), max_new_tokens=9)
    record = replayed(policy(), [first, again])
    assert record.num_cached_tokens == 96, "103 tokens were computed: six whole blocks"


def test_without_prefix_caching_nothing_is_found() -> None:
    first, again = arrival(1, 64, 4), arrival(1, 64, 4, at=1.0)
    record = replayed(policy(knobs=Knobs(prefix_caching=False)), [first, again])
    assert record.num_cached_tokens == 0


def test_a_pool_too_small_for_all_preempts_and_computes_again() -> None:
    headrace = policy(num_blocks=32)
    record = replayed(
        headrace, [arrival(key, 40, 200, max_new_tokens=200) for key in range(4)], num_blocks=32
    )
    found = figures(record, headrace.counters)
    assert record.num_answered == 4
    assert found.num_preemptions > 0 and found.useful_share < 1.0


def test_the_same_trace_gives_the_same_record() -> None:
    trace = synthesize("rag", num_requests=60, rate=10.0, seed=4)
    first, second = (replayed(policy(num_blocks=4000), trace, num_blocks=4000) for _ in range(2))
    assert first == second
