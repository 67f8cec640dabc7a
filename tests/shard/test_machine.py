"""Limits of control groups, read from files laid out as the kernel lays them out, and memory."""

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from headrace_shard.machine import (
    GIB,
    LargePages,
    available_host_bytes,
    is_lost,
    num_usable_cores,
    small_pages,
    spelled,
)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def membership(root: Path, *lines: str) -> None:
    write(root / "proc/self", cgroup="\n".join(lines))


def test_without_groups_the_machine_decides(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) > 0
    assert num_usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_version_2_limit_counts_from_any_group_above(tmp_path: Path) -> None:
    membership(tmp_path, "0::/pods/one")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "pods/one", memory__max="max", memory__current="5")
    write(
        groups / "pods", memory__max="1000", memory__current="700", memory__stat="anon 1\ninactive_file 200"
    )
    assert available_host_bytes(tmp_path) == 500


def test_version_2_in_a_container_sees_only_the_mount(tmp_path: Path) -> None:
    membership(tmp_path, "0::/../../the/path/of/the/host")
    write(
        tmp_path / "sys/fs/cgroup", memory__max="1000", memory__current="400", memory__stat="inactive_file 0"
    )
    assert available_host_bytes(tmp_path) == 600


def test_version_1_limit(tmp_path: Path) -> None:
    membership(tmp_path, "9:cpu,cpuacct:/", "4:memory:/docker/abc", "1:name=systemd:/")
    write(
        tmp_path / "sys/fs/cgroup/memory",
        memory__limit_in_bytes="2000",
        memory__usage_in_bytes="1500",
        memory__stat="inactive_file 7\ntotal_inactive_file 100",
    )
    assert available_host_bytes(tmp_path) == 600


def test_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    membership(tmp_path, "0::/")
    write(tmp_path / "sys/fs/cgroup", memory__max="1000", memory__current="4000", memory__stat="anon 4000")
    assert available_host_bytes(tmp_path) == 0


def test_quota_limits_cores(tmp_path: Path) -> None:
    membership(tmp_path, "0::/")
    write(tmp_path / "sys/fs/cgroup", cpu__max="50000 100000")
    assert num_usable_cores(tmp_path) == 1
    write(tmp_path / "sys/fs/cgroup", cpu__max="max 100000")
    assert num_usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_version_1_quota_limits_cores(tmp_path: Path) -> None:
    membership(tmp_path, "2:cpu:/")
    write(tmp_path / "sys/fs/cgroup/cpu", cpu__cfs_quota_us="130000", cpu__cfs_period_us="100000")
    assert num_usable_cores(tmp_path) == 1
    write(tmp_path / "sys/fs/cgroup/cpu", cpu__cfs_quota_us="-1")
    assert num_usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_sizes_are_spelled_for_people() -> None:
    assert spelled(3 * GIB // 2) == "1.5 GiB"
    assert spelled(3 * 2**20) == "3.0 MiB"


def test_gpu_is_lost_when_nothing_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    assert not is_lost(gpu)
    assert asked == [gpu]

    def fail(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert is_lost(gpu)
    assert not is_lost(torch.device("cpu"))


@pytest.mark.parametrize("sizes", [[0, 1, 100, 2**20], [2**26, 2**26 + 1, 64], [2**27]])
def test_large_pages_hold_zeros_side_by_side(sizes: list[int]) -> None:
    pages = LargePages()
    parts = [pages.take(size) for size in sizes]
    assert [len(part) for part in parts] == sizes
    assert not any(part.any() for part in parts)
    assert all(part.data_ptr() % 64 == 0 for part in parts if len(part))
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    for number, part in enumerate(parts):
        assert (part == number + 1).all()


def test_pages_outlive_what_made_them() -> None:
    part = LargePages().take(100).view(torch.float32)
    part.fill_(3.0)
    assert part.sum() == 75


def test_small_pages_take_memory_as_it_is_written() -> None:
    """A cache is filled bit by bit: a byte in each of 64 MiB must not take them all at once."""
    process = psutil.Process()
    pages = small_pages(2**30)
    before = process.memory_info().rss
    pages[:: 2**24] = 1
    assert process.memory_info().rss - before < 2**23
    assert pages.view(torch.int64)[1 : 2**20].any() == 0


def test_more_than_the_system_maps_is_no_memory() -> None:
    with pytest.raises(MemoryError, match=r"does not map 8388608\.0 GiB"):
        LargePages().take(2**53)


def num_new_pages() -> int:
    """Pages that the system provides for steps of which each frees 60 MiB before the next one begins."""

    def step() -> None:
        tensors = [torch.ones(3 * 1024**2, dtype=torch.uint8) for _ in range(20)]
        assert all(tensor.all() for tensor in tensors)

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another malloc than glibc's")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    program = (
        "from headrace_shard.machine import keep_freed_memory; "
        "from tests.shard.test_machine import num_new_pages; "
        "print(num_new_pages()); keep_freed_memory(); print(num_new_pages())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert 10 * kept < given_back
