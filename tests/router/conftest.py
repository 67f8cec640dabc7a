"""The running routers that tests of the API share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_shard import made_up
from tests.router.running import RunningRouter, tokenizer_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared_router(model_folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, max_input_tokens=200, max_total_tokens=256) as router:
        yield router


@pytest.fixture
def router(shared_router: RunningRouter) -> Iterator[RunningRouter]:
    """With default settings but small limits, its shard as new; nothing may be left running."""
    shared_router.shard.answer = made_up(shared_router.shard.vocab_size)
    shared_router.shard.step_seconds = 0.0
    yield shared_router
    shared_router.do(shared_router.shard.gate.set)
    shared_router.wait_for(lambda: shared_router.service.engine.num_active == 0)
    assert shared_router.shard.violations == []
