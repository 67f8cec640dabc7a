"""What the scheduler's bench calls good, and that its loads are what they say."""

import pytest

from bench.scheduler import TAIL, Figure, Load


@pytest.mark.parametrize(
    ("p50", "p99", "holds"),
    [(1.0, float(TAIL), True), (1.1, 1.2, False), (0.5, TAIL + 0.1, False)],
)
def test_the_median_is_held_to_the_limit_and_the_tail_to_a_multiple(
    p50: float, p99: float, holds: bool
) -> None:
    assert Figure(name="a", p50_seconds=p50, p99_seconds=p99, limit_seconds=1.0).holds == holds
    assert Figure(name="a", p50_seconds=p50, p99_seconds=p99).holds


def test_as_many_priorities_wait_as_are_asked_for() -> None:
    load = Load(301, new_tokens=range(8, 16), num_priorities=301)
    assert {sequence.request.priority for sequence in load.scheduler.waiting} == set(range(-150, 151))
