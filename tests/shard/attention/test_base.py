"""Which attention backend is taken where."""

import re
import sys
from types import ModuleType
from typing import NoReturn

import pytest
import torch
from headrace_shard.attention import base
from headrace_shard.attention.base import pick
from headrace_shard.config import ShardSettings
from headrace_shard.errors import KernelUnavailable, UnsupportedDevice

CPU = torch.device("cpu")


def create(settings: ShardSettings) -> NoReturn:
    """As of a backend whose kernels cannot be built on this machine."""
    raise KernelUnavailable(f"there is no compiler {settings.cxx}")


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("unbuildable")
    module.__dict__["create"] = create
    monkeypatch.setitem(sys.modules, "unbuildable", module)
    monkeypatch.setitem(base._BACKENDS, "cpu", "unbuildable")


def test_named_backend() -> None:
    backend, why = pick(ShardSettings(attention="sdpa", cxx="c++"), CPU)
    assert backend.name == "sdpa"
    assert why == "attention: sdpa, plain torch, as asked"


def test_auto_takes_the_kernels_on_a_cpu() -> None:
    backend, why = pick(ShardSettings(), CPU)
    assert backend.name == "cpu"
    instructions = "AMX-BF16|AVX512(-BF16)?|AVX2|NEON|128-bit vectors"
    assert re.fullmatch(rf"attention: cpu, native kernels for ({instructions})", why)


@pytest.mark.parametrize("name", base._BACKENDS)
def test_every_backend_is_made_of_the_settings_alone(name: str) -> None:
    backend, _ = pick(ShardSettings(attention=name), CPU)
    assert backend.name == name


def test_auto_says_what_it_took_and_why() -> None:
    backend, why = pick(ShardSettings(attention="auto", cxx="c++"), torch.device("cuda"))
    assert backend.name == "sdpa"
    assert "cuda" in why


@pytest.mark.usefixtures("without_compiler")
def test_auto_takes_torch_where_kernels_cannot_be_built() -> None:
    backend, why = pick(ShardSettings(attention="auto", cxx="c++"), CPU)
    assert backend.name == "sdpa"
    assert "there is no compiler c++" in why


@pytest.mark.usefixtures("without_compiler")
def test_kernels_that_were_asked_for_by_name_are_not_replaced() -> None:
    with pytest.raises(KernelUnavailable, match="there is no compiler"):
        pick(ShardSettings(attention="cpu", cxx="c++"), CPU)


def test_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(UnsupportedDevice, match="'flash' is unknown; there are: sdpa, cpu"):
        pick(ShardSettings(attention="flash", cxx="c++"), CPU)


def test_cpu_kernels_are_refused_on_a_gpu() -> None:
    with pytest.raises(UnsupportedDevice, match="--attention sdpa"):
        pick(ShardSettings(attention="cpu", cxx="c++"), torch.device("cuda"))
