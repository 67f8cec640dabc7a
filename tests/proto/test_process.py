"""Children die with their launcher: tried with three real generations of processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from headrace_proto.process import PARENT_VARIABLE, die_with_parent, environment_for_child

CHILD = """
import os, pathlib, sys, time
from headrace_proto.process import die_with_parent
die_with_parent(os.environ)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""

LAUNCHER = """
import os, subprocess, sys, time
from headrace_proto.process import environment_for_child
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], env=os.environ | environment_for_child())
time.sleep(60)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_child_dies_when_its_launcher_is_killed(tmp_path: Path) -> None:
    written = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, CHILD, str(written)]) as launcher:
        try:
            assert wait_for(lambda: written.exists() and written.read_text() != "")
            child = int(written.read_text())
            assert is_running(child)
        finally:
            launcher.send_signal(signal.SIGKILL)
    assert wait_for(lambda: not is_running(child))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_child_of_a_launcher_that_is_gone_exits() -> None:
    environment = os.environ | {PARENT_VARIABLE: "1" if os.getpid() != 1 else "2"}
    result = subprocess.run(
        [sys.executable, "-c", CHILD, "/dev/null"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 1
    assert "is gone already" in result.stderr


def test_process_started_by_hand_is_left_alone() -> None:
    die_with_parent({})


def test_environment_names_this_process() -> None:
    assert environment_for_child() == {PARENT_VARIABLE: str(os.getpid())}


def test_what_is_loaded_is_not_looked_at_again() -> None:
    script = """
import gc, sys
from headrace_proto.process import keep_what_is_loaded

loaded = [[] for _ in range(100_000)]
ring = []
ring.append(ring)
del ring
keep_what_is_loaded()
seen = len(gc.get_objects())
assert gc.get_freeze_count() > 100_000, gc.get_freeze_count()
assert seen < 1_000, seen
ring = []
ring.append(ring)
del ring
assert gc.collect() == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True)
