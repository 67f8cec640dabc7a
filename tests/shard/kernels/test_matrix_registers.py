"""Intel AMX is the system's to give and every library's to use: neither changes what we compute."""

import errno
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import torch
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.kernels.paged import PagedKernels
from torch import Tensor
from torch.nn.functional import linear

from tests.shard.kernels.dense import make_step

pytestmark = [pytest.mark.usefixtures("amx")]


def computing(cache: Path, permission: str) -> tuple[str, int]:
    """Instructions of the kernels in a process of their own, and its system's answer to who wants AMX."""
    command = [sys.executable, "-m", "tests.shard.kernels.computing", str(cache), permission]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    instructions, answer = done.stdout.split()
    return instructions, int(answer)


def test_matrix_registers_are_used_where_permitted(kernels: PagedKernels, cache_folder: Path) -> None:
    instructions, answer = computing(cache_folder, "permitted")
    if answer != 0:
        pytest.skip("this system refuses matrix registers")
    assert instructions == kernels.instructions == "AMX-BF16"


@pytest.mark.usefixtures("kernels")
def test_process_that_is_refused_them_computes_with_vectors(cache_folder: Path) -> None:
    assert computing(cache_folder, "refused") == ("AVX512-BF16", errno.EPERM)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Interleaved:
    """Computations of ours with matrices of several sizes, and one of torch's: oneDNN uses AMX for it."""

    def __init__(self, dense: DenseKernels, kernels: PagedKernels) -> None:
        self._ours: list[Callable[[], Tensor]] = []
        for num_rows, depth in ((1, 64), (16, 40), (45, 74), (600, 128)):
            weight = dense.pack(random(1, 200, depth))
            self._ours.append(partial(weight.multiply, random(2, num_rows, depth)))
        # With 64 numbers all matrices of a call are of one size: it ends with the settings it begins with.
        for steps, head_dim in (([(700, 1)], 64), ([(30, 20), (900, 3)], 80)):
            step = make_step(steps, dtype=torch.bfloat16, group=3, head_dim=head_dim)
            self._ours.append(partial(step.attend, kernels))
        self._theirs = partial(linear, random(3, 512, 1024), random(4, 256, 1024))
        self._expected = [compute() for compute in self._ours]
        self._theirs_expected = self._theirs()

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for compute, expected in zip(self._ours, self._expected, strict=True):
                assert torch.equal(compute(), expected)
                assert torch.equal(self._theirs(), self._theirs_expected)
                assert torch.equal(compute(), expected)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_torch_may_multiply_between_our_calls(
    dense: DenseKernels, kernels: PagedKernels, set_threads: Callable[[int], None], num_threads: int
) -> None:
    set_threads(num_threads)
    Interleaved(dense, kernels).run(10)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_torch_may_multiply_in_another_thread_meanwhile(
    dense: DenseKernels, kernels: PagedKernels, set_threads: Callable[[int], None], num_threads: int
) -> None:
    set_threads(num_threads)
    interleaved, start = Interleaved(dense, kernels), Barrier(2)

    def run() -> None:
        start.wait()
        interleaved.run(10)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run) for _ in range(2)]:
            done.result()
