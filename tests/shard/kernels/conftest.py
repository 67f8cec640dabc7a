"""Kernels built once per run into a folder of their own, and a thread count that is put back."""

import ctypes
import platform
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from headrace_shard.config import ShardSettings
from headrace_shard.kernels import build
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.kernels.paged import PagedKernels

X86 = platform.machine() == "x86_64"
CPUINFO = Path("/proc/cpuinfo")
AMX = CPUINFO.is_file() and "amx_bf16" in CPUINFO.read_text().split()

WITHOUT_AMX = "native without AMX"
"""The machine's own instructions, but for its matrix registers."""


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels are kept that this run has built."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def library(cache_folder: Path) -> Callable[[str], ctypes.CDLL]:
    """The kernels for an architecture, built when first asked for."""

    def load(architecture: str) -> ctypes.CDLL:
        if architecture == WITHOUT_AMX:
            return build.load(cache_folder, f"{ShardSettings.cxx} -mno-amx-tile")
        return build.load(cache_folder, ShardSettings.cxx, architecture)

    return cache(load)


@pytest.fixture(scope="session")
def built(library: Callable[[str], ctypes.CDLL]) -> Callable[[str], PagedKernels]:
    return cache(lambda architecture: PagedKernels(library(architecture)))


@pytest.fixture(scope="session")
def built_dense(library: Callable[[str], ctypes.CDLL]) -> Callable[[str], DenseKernels]:
    return cache(lambda architecture: DenseKernels(library(architecture)))


@pytest.fixture(
    params=[
        "native",
        # The other paths of the sources: bfloat16 in vectors; four floats in a vector, and eight.
        pytest.param(
            WITHOUT_AMX, marks=[pytest.mark.slow, pytest.mark.skipif(not AMX, reason="needs Intel AMX")]
        ),
        pytest.param("x86-64", marks=[pytest.mark.slow, pytest.mark.skipif(not X86, reason="needs x86")]),
        pytest.param("x86-64-v3", marks=[pytest.mark.slow, pytest.mark.skipif(not X86, reason="needs x86")]),
    ]
)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "x86-64-v3" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("needs AVX2")
    return name


@pytest.fixture
def any_kernels(built: Callable[[str], PagedKernels], architecture: str) -> PagedKernels:
    return built(architecture)


@pytest.fixture
def any_dense(built_dense: Callable[[str], DenseKernels], architecture: str) -> DenseKernels:
    return built_dense(architecture)


@pytest.fixture
def kernels(built: Callable[[str], PagedKernels]) -> PagedKernels:
    return built("native")


@pytest.fixture
def dense(built_dense: Callable[[str], DenseKernels]) -> DenseKernels:
    return built_dense("native")


@pytest.fixture
def amx() -> None:
    """Skips a test where the processor has no matrix registers."""
    if not AMX:
        pytest.skip("needs Intel AMX")


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
