"""What every test may count on: no test asserts a time, none needs a GPU unless it says so."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# A slow machine is no bug, and the same commit gives the same verdict everywhere.
hypothesis.settings.register_profile("headrace", deadline=None, derandomize=True)
hypothesis.settings.load_profile("headrace")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device, but fail there for who asks for them."""
    if config.getoption("markexpr") == "gpu" or any(Path("/dev").glob("nvidia[0-9]*")):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def free_port() -> int:
    """A TCP port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    """Lets a test call `logs.setup`, which changes the logging of the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
