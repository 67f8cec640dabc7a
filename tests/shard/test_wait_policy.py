"""OpenMP threads of a serving shard look a few times, then sleep, unless the environment says otherwise."""

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
    print(os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "policy", "num_looks"),
    [
        ({}, "PASSIVE", "300"),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE", "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", "None"),
    ],
)
def test_threads_sleep_unless_told_otherwise(given: dict[str, str], policy: str, num_looks: str) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    ended = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert ended.stdout.split() == [policy, num_looks]
