"""One server of a tiny model for all tests that do not hurt it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Server, running
from tests.tiny import make_checkpoint


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model with a context that long prompts and long answers fit into."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama", max_positions=8192)


@pytest.fixture(scope="session")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--model-id", str(tiny_folder), "--dtype", "float32"]
    with running(tmp_path_factory.mktemp("server"), *arguments) as running_server:
        yield running_server
