"""Folders that a launcher uses and others may clear away: who still uses one, and who is dead.

A claim is a shared flock(2) on the folder itself. The kernel drops it with the process, whatever ends that;
unlike a process id it is never somebody else's later, and it holds between containers that share a folder.
Knows nothing of what is in a folder.
"""

import fcntl
import os
import shutil
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""How one is opened, to be locked."""


def claim(folder: Path) -> int | None:
    """Keeps a folder from being cleared away; None if it has just been.

    The claim lasts until the descriptor is closed or the process ends. A file system without such locks
    gives none, and clears none away either.
    """
    try:
        descriptor = os.open(folder, FOLDER)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # it is being cleared away now
        os.close(descriptor)
        return None
    except OSError:
        return descriptor
    if not _is_still_there(folder, descriptor):
        os.close(descriptor)
        return None
    return descriptor


def clear_away(folder: Path) -> bool:
    """Removes a folder of this user's that nobody claims; whether it did. What cannot be removed stays."""
    try:
        descriptor = os.open(folder, FOLDER | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # In one step, so that nobody ever finds the half of it under its name.
        grave = folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}"))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    shutil.rmtree(grave, ignore_errors=True)
    return True


def _is_still_there(folder: Path, descriptor: int) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))
