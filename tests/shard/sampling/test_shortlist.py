"""Short lists against a full sort, with many equal values."""

import torch
from headrace_shard.sampling.shortlist import (
    BLOCK,
    argmax,
    best_columns,
    marked_columns,
    ranked_columns,
    shortlist,
    top_columns,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.shard.sampling.rows import random_logits


def _ranked(row: Tensor) -> list[int]:
    """Columns by falling value, the lower column first among equals."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda column: (-values[column], column))


@st.composite
def _tables(draw: st.DrawFn) -> Tensor:
    num_columns = draw(st.sampled_from([1, 2, 31, 32, 33, 64, 100, 500, 1000, 1023]))
    table = random_logits(
        draw(st.integers(1, 4)),
        num_columns,
        seed=draw(st.integers(0, 1000)),
        spread=draw(st.sampled_from([0.0, 0.1, 3.0])),
    )
    # Few distinct values, so that there are equals everywhere.
    table = (table * 2).round() / 2 if draw(st.booleans()) else table
    return torch.where(table < -4, -torch.inf, table)


@settings(max_examples=150, deadline=None)
@given(_tables(), st.data())
def test_top_columns_are_those_of_a_full_sort(table: Tensor, data: st.DataObject) -> None:
    num_best = data.draw(st.integers(1, table.shape[1]))
    expected = [_ranked(row)[:num_best] for row in table]
    assert top_columns(table, num_best).tolist() == expected
    assert ranked_columns(table, num_best).tolist() == expected
    assert best_columns(table, num_best).tolist() == [sorted(columns) for columns in expected]


@settings(max_examples=150, deadline=None)
@given(_tables())
def test_argmax_is_the_first_of_the_highest(table: Tensor) -> None:
    columns, highest = argmax(table)
    assert columns.tolist() == [_ranked(row)[0] for row in table]
    assert torch.equal(highest, table.amax(1))


@settings(max_examples=150, deadline=None)
@given(_tables(), st.integers(1, 40))
def test_a_list_is_in_order_and_bounds_the_rest(table: Tensor, num_best: int) -> None:
    listed = shortlist(table, num_best)
    num_listed = listed.values.shape[1]
    columns = listed.columns(torch.arange(num_listed).expand(len(table), -1))
    assert torch.equal(table.gather(1, columns), listed.values)
    assert (columns.diff(dim=1) > 0).all()
    assert torch.equal(listed.maxima, table.amax(1))
    is_listed = torch.zeros_like(table, dtype=torch.bool).scatter_(1, columns, True)
    rest = torch.where(is_listed, -torch.inf, table)
    assert (rest <= listed.bounds.unsqueeze(1)).all()


def test_negative_zero_equals_zero() -> None:
    table = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert top_columns(table, 3).tolist() == [[1, 2, 3]]


def test_a_nan_anywhere_shows_in_the_maxima() -> None:
    for number in (torch.nan, -torch.nan):
        table = random_logits(3, 10 * BLOCK + 5)
        table[0, 7] = number
        table[1, -1] = number
        for num_best in (1, 4, 1000):
            assert shortlist(table, num_best).maxima.isnan().tolist() == [True, True, False]
        assert argmax(table)[1].isnan().tolist() == [True, True, False]


def test_marked_columns_are_padded() -> None:
    is_marked = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    columns, is_real = marked_columns(is_marked)
    assert is_real.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert columns[0].tolist() == [1, 3, 4]
    assert columns[2, 0] == 0


def test_nothing_marked_leaves_one_column() -> None:
    columns, is_real = marked_columns(torch.zeros(2, 9, dtype=torch.bool))
    assert columns.shape == is_real.shape == (2, 1)
    assert not is_real.any()
