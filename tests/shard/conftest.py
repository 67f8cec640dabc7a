"""Engines on a tiny model, each with a small router before it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from headrace_shard.engine import Engine
from headrace_shard.loading import LoadedModel

from tests.shard.small_router import SmallRouter, execute_on, load_tiny, make_engine
from tests.tiny import make_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; nobody writes to it."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load_tiny(folder)


@pytest.fixture
def engine(loaded: LoadedModel) -> Engine:
    return make_engine(loaded)


@pytest.fixture
def router(engine: Engine) -> SmallRouter:
    return SmallRouter(execute_on(engine))


@pytest.fixture
def fresh(folder: Path) -> Callable[[], SmallRouter]:
    """Makes routers, each with an engine and a model of its own."""
    return lambda: SmallRouter(execute_on(make_engine(load_tiny(folder))))
