"""Tables of sequences live as long as a test."""

from collections.abc import Iterator

import pytest

from tests.shard.sampling.rows import table


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    yield
    table.cache_clear()
