"""Memory and cores that this process may use, memory in pages of a size, and whether the GPU still answers.
Knows no model.

Limits of control groups (cgroups, both versions) count as much as the machine's own: in a container the
machine has more of everything than the process will get.
"""

import ctypes
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil
import torch
from torch import Tensor

GIB = 1024**3

_LARGE_PAGE_BYTES = 2 * 1024**2
_CHUNK_BYTES = 64 * 1024**2
_CACHE_LINE_BYTES = 64

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MAX_MMAP_THRESHOLD = 32 * 1024**2  # more is refused
_NEVER_TRIM = 2**31 - 1


class LargePages:
    """Memory of the host for tensors that lie one beside the other, in large pages where the system has them.

    With pages of 4 KiB a step spends a tenth of its time on looking up where weights lie.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        """What is left of the newest piece; tensors keep the pieces alive that they lie in."""

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of zeros, on a cache line; the system provides pages when they are written.

        Raises MemoryError when the process cannot have so many.
        """
        if num_bytes > len(self._chunk):
            self._chunk = _map(max(num_bytes, _CHUNK_BYTES), is_large=True)
        taken = self._chunk[:num_bytes]
        self._chunk = self._chunk[-(-num_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES :]
        return taken


def small_pages(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 of zeros, in pages of the usual size; the system provides them when they are written.

    For what is filled bit by bit while others wait: the first write to a large page takes milliseconds, and
    a token is written to all layers at once. Raises MemoryError when the process cannot have so many.
    """
    return _map(num_bytes, is_large=False)


def _map(num_bytes: int, *, is_large: bool) -> Tensor:
    """[num_bytes] uint8 from the border of a large page on."""
    try:
        memory = mmap.mmap(-1, num_bytes + _LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system does not map {spelled(num_bytes)}: {error}") from error
    name = "MADV_HUGEPAGE" if is_large else "MADV_NOHUGEPAGE"
    if hasattr(mmap, name):
        # A wish: some systems have no large pages.
        with suppress(OSError):
            memory.madvise(getattr(mmap, name))
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _LARGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def keep_freed_memory() -> None:
    """Leave what this process frees from now on with it, for whoever asks next (glibc; elsewhere nothing).

    A step frees what it computed, and the next one needs as much. When the system takes it back in between,
    its pages have to be cleared anew, at times thousands of them a step for the logits of 32 sequences. What
    was freed before this call goes back first.
    """
    library = ctypes.CDLL(None)
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is None or trim is None:
        return
    trim(0)
    mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes this process may still take: what the machine has left, or what its control groups leave."""
    headrooms = [psutil.virtual_memory().available]
    for version, folder in _groups("memory", root):
        headroom = _headroom_v2(folder) if version == 2 else _headroom_v1(folder)
        if headroom is not None:
            headrooms.append(headroom)
    return max(0, min(headrooms))


def available_device_bytes(fraction: float) -> int:
    """Bytes of the current GPU that are free when `1 - fraction` of all its memory is left alone."""
    free, total = torch.cuda.mem_get_info()
    return max(0, int(free - (1 - fraction) * total))


def is_lost(device: torch.device) -> bool:
    """Whether no call to the device can succeed any more; waits for what the device is doing.

    After some faults (an illegal access, an assertion in a kernel, a broken GPU) CUDA gives every later call
    of the process the same error.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def num_usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may run on, but no more than its CPU quota pays for; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for version, folder in _groups("cpu", root):
        if version == 2:
            quota, _, period = (_text(folder / "cpu.max") or "max 100000").partition(" ")
        else:
            quota = _text(folder / "cpu.cfs_quota_us") or "-1"
            period = _text(folder / "cpu.cfs_period_us") or "100000"
        if quota not in ("max", "-1"):
            cores = min(cores, int(quota) / int(period))
    return max(1, math.floor(cores))


def spelled(num_bytes: float) -> str:
    """For messages: GiB, or MiB when it is less than one."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 1024**2:.1f} MiB"


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of each control group the process is in, from the innermost out."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        elif number == "0":
            version, mount = 2, root / "sys/fs/cgroup"
        else:
            continue
        # In a container the path may be the host's; then only the mount itself is there to be read.
        group = PurePosixPath(path)
        for folder in (group, *group.parents):
            yield version, mount / str(folder).lstrip("/")


def _headroom_v2(folder: Path) -> int | None:
    limit = _text(folder / "memory.max")
    usage = _text(folder / "memory.current")
    if limit is None or limit == "max" or usage is None:
        return None
    return int(limit) - int(usage) + _cached(folder, "inactive_file")


def _headroom_v1(folder: Path) -> int | None:
    limit = _text(folder / "memory.limit_in_bytes")
    usage = _text(folder / "memory.usage_in_bytes")
    if limit is None or usage is None:
        return None
    return int(limit) - int(usage) + _cached(folder, "total_inactive_file")


def _cached(folder: Path, name: str) -> int:
    """Bytes of cached files, which count as used but which the kernel gives back when asked."""
    lines = (line.split() for line in (_text(folder / "memory.stat") or "").splitlines())
    return next((int(line[1]) for line in lines if line[0] == name), 0)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
