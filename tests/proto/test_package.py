"""What importing the package does for those who import gRPC after it."""

import os
import subprocess
import sys

import pytest

PROGRAM = "import headrace_proto, os; print(os.environ['GRPC_VERBOSITY'])"


@pytest.mark.parametrize(("asked", "taken"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_prints_errors_only_unless_it_is_asked_for_more(asked: str | None, taken: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environment |= {"GRPC_VERBOSITY": asked} if asked else {}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == taken
