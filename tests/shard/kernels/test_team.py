"""Every unit of what a team shares is computed, and computed once: by more threads than there are cores or
units, and by fewer than were asked for."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from headrace_shard.kernels.dense import DenseKernels, PackedWeight
from headrace_shard.kernels.paged import PagedKernels
from headrace_shard.kernels.rows import FORMATS
from torch import Tensor

from tests.shard.kernels.dense import make_step

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TEAMS = [2, 3, 7, 64]

SetThreads = Callable[[int], None]


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def add_product(dense: DenseKernels, packed: PackedWeight, x: Tensor, y: Tensor) -> None:
    """y += x W^T where y lies: what is computed twice is added twice, what nobody computes is missing."""
    assert x.is_contiguous() and y.is_contiguous() and y.shape == (len(x), packed.num_results)
    dense.library.headrace_multiply(
        FORMATS[x.dtype],
        x.data_ptr(),
        x.stride(0),
        packed.panels.data_ptr(),
        None,
        y.data_ptr(),
        y.data_ptr(),
        len(x),
        packed.depth,
        packed.num_results,
        packed.is_gated,
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", TEAMS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_every_part_of_a_product_is_added_once(
    any_dense: DenseKernels,
    set_threads: SetThreads,
    dtype: torch.dtype,
    num_threads: int,
    is_gated: bool,
) -> None:
    """Fewer parts than threads, one more, many; groups of rows that no number of threads divides."""
    for num_rows, num_results in ((1, 1), (1, 33), (1, 2100), (33, 64), (70, 1111), (230, 97), (1000, 64)):
        weights = [random(seed, num_results, 34, dtype=dtype) for seed in (1, 2)]
        packed = any_dense.pack_gated(*weights) if is_gated else any_dense.pack(weights[0])
        x, before = random(3, num_rows, 34, dtype=dtype), random(4, num_rows, num_results, dtype=dtype)
        set_threads(1)
        expected = packed.multiply(x, before)
        set_threads(num_threads)
        for _ in range(5):
            y = before.clone()
            add_product(any_dense, packed, x, y)
            assert torch.equal(y, expected)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_product_with_the_vocabulary_of_a_large_model(
    dense: DenseKernels, set_threads: SetThreads, num_threads: int
) -> None:
    """Thousands of parts for each thread, of weights alone."""
    # Small whole numbers: no sum is rounded, by whatever instructions.
    x, weight = torch.tensor([[3.0, -5.0]]).bfloat16(), random(1, 2**18 + 5, 2, dtype=torch.bfloat16).round()
    packed, y = dense.pack(weight), torch.zeros(1, len(weight), dtype=torch.bfloat16)
    set_threads(num_threads)
    add_product(dense, packed, x, y)
    assert torch.equal(y, x @ weight.T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_so_deep_that_no_two_groups_of_rows_fit_a_cache(
    any_dense: DenseKernels, set_threads: SetThreads, dtype: torch.dtype
) -> None:
    x, weight = random(1, 200, 8250, dtype=dtype), random(2, 100, 8250, dtype=dtype) / 8250**0.5
    packed = any_dense.pack(weight)
    set_threads(1)
    together = packed.multiply(x)
    exact, tolerance = x.double() @ weight.double().T, max(torch.finfo(dtype).eps, 1e-4)
    torch.testing.assert_close(together.double(), exact, rtol=tolerance, atol=tolerance)
    set_threads(3)
    assert torch.equal(packed.multiply(x), together)
    assert torch.equal(torch.cat([packed.multiply(row[None]) for row in x[::40]]), together[::40])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", TEAMS)
def test_every_row_is_attended_with(
    any_kernels: PagedKernels,
    set_threads: SetThreads,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_threads: int,
) -> None:
    """One task, fewer than threads, one more, many; of the longest context every tile is a task."""
    # What nobody writes is NaN.
    monkeypatch.setattr(torch, "empty", partial(torch.full, fill_value=torch.nan))
    for steps in ([(0, 1)], [(9, 1), (30, 2)], [(5, 1)] * 3, [(40, 1)] * 65, [(2000, 9), (0, 70), (600, 1)]):
        step = make_step(steps, dtype=dtype, num_kv_heads=1, group=3, head_dim=20)
        set_threads(1)
        expected = step.attend(any_kernels)
        set_threads(num_threads)
        for _ in range(3):
            assert torch.equal(step.attend(any_kernels), expected)


FEWER = """
import sys
from pathlib import Path
import torch
from headrace_shard.config import ShardSettings
from headrace_shard.kernels import build
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.kernels.paged import PagedKernels
from tests.shard.kernels.dense import make_step

library = build.load(Path(sys.argv[1]), ShardSettings.cxx)
paged, dense = PagedKernels(library), DenseKernels(library)
for dtype in (torch.float32, torch.bfloat16):
    x, packed = torch.randn(70, 64).to(dtype), dense.pack(torch.randn(1000, 64).to(dtype))
    step = make_step([(2000, 9), (0, 70), (600, 1), (3, 1)], dtype=dtype, group=3)
    torch.set_num_threads(1)
    product, attended = packed.multiply(x), step.attend(paged)
    torch.set_num_threads(8)
    for _ in range(20):
        assert torch.equal(packed.multiply(x), product)
        assert torch.equal(step.attend(paged), attended)
"""


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("limit", ["1", "2", "3"])
def test_team_of_fewer_threads_than_asked_for(cache_folder: Path, limit: str) -> None:
    environment = os.environ | {"OMP_THREAD_LIMIT": limit}
    subprocess.run([sys.executable, "-c", FEWER, str(cache_folder)], env=environment, check=True)
