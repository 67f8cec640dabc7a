"""OpenMP threads of a serving shard sleep while they wait, whatever the environment of the test says."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from headrace_shard import __main__ as program
sys.argv = ["headrace-shard", "--model-path", "/nonexistent", "--listen", "unix:///nonexistent/socket"]
try:
    program.main()
except SystemExit:
    print(os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_sleep_unless_told_otherwise(given: dict[str, str], policy: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    ended = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert ended.stdout.split() == [policy]
