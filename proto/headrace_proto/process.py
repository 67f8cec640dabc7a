"""How a child process lives and dies: with its launcher, whatever kills that, and without long pauses of its
own. Knows no process by name.

The launcher adds `environment_for_child()` to a child's environment; the child calls `die_with_parent`
first thing in `main`. A process that was started by hand finds no such variable and lives on its own. The
kernel does the work (prctl(2), PR_SET_PDEATHSIG), so not even SIGKILL of the launcher leaves a child
behind. Linux only.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Mapping

PARENT_VARIABLE = "HEADRACE_PARENT_PID"
"""Names the launcher's process id in the environment of its children."""

_PR_SET_PDEATHSIG = 1


def environment_for_child() -> dict[str, str]:
    """What a launcher adds to the environment of a child that shall die with it.

    The kernel watches the thread that starts the child, so start it from one that lives as long as the
    process.
    """
    return {PARENT_VARIABLE: str(os.getpid())}


def die_with_parent(environment: Mapping[str, str]) -> None:
    """Lets the kernel kill this process when its launcher dies; without the variable does nothing.

    Exits at once when the launcher is gone already. Raises OSError if the kernel refuses.
    """
    parent = environment.get(PARENT_VARIABLE)
    if not parent or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGKILL, not SIGTERM: nobody is left who would wait for a drain.
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The launcher may have died between starting us and the call above; then no signal will ever come.
    if str(os.getppid()) != parent:
        sys.exit(f"the launcher (process {parent}) is gone already")


def keep_what_is_loaded() -> None:
    """Takes all objects there are out of the sight of the garbage collector; to be called before serving.

    What was imported and loaded stays until the end. A full collection would look at hundreds of thousands of
    such objects, a tenth of a second in which no token goes out.
    """
    gc.collect()
    gc.freeze()
