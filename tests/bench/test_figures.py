"""Figures are what a slow and plain computation gives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.figures import Spread, spread

VALUES = st.lists(st.tuples(st.floats(0.001, 100.0), st.integers(1, 5)), min_size=1, max_size=50)


@given(VALUES)
def test_counted_values_are_as_if_written_out(pairs: list[tuple[float, int]]) -> None:
    values, counts = np.array([value for value, _ in pairs]), np.array([count for _, count in pairs])
    assert spread(values, counts) == spread(np.repeat(values, counts))


@given(VALUES)
def test_percentiles_are_values_of_their_rank(pairs: list[tuple[float, int]]) -> None:
    values = sorted(value for value, count in pairs for _ in range(count))
    found = spread(np.array(values))
    assert found.max == values[-1]
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value is not None
        assert sum(other <= value for other in values) >= share * len(values) - 1e-9
        assert sum(other < value for other in values) < share * len(values) + 1e-9


def test_nothing_has_no_percentiles() -> None:
    assert spread(np.array([])) == Spread(p50=None, p90=None, p99=None, max=None)
