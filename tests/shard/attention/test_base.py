"""Which attention backend is taken where."""

import sys
from types import ModuleType

import pytest
import torch
from headrace_shard.attention import base
from headrace_shard.attention.base import pick
from headrace_shard.errors import KernelUnavailable, UnsupportedDevice

CPU = torch.device("cpu")


class Unbuildable:
    """A backend whose kernels cannot be built on this machine."""

    def __init__(self, cxx: str) -> None:
        assert cxx == "c++"
        raise KernelUnavailable("there is no compiler")


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("unbuildable")
    module.__dict__["Unbuildable"] = Unbuildable
    monkeypatch.setitem(sys.modules, "unbuildable", module)
    monkeypatch.setitem(base._BACKENDS, "cpu", "unbuildable:Unbuildable")


def test_named_backend() -> None:
    backend, why = pick("sdpa", CPU, cxx="c++")
    assert backend.name == "sdpa"
    assert "as asked" in why


def test_auto_says_what_it_took_and_why() -> None:
    backend, why = pick("auto", torch.device("cuda"), cxx="c++")
    assert backend.name == "sdpa"
    assert "cuda" in why


@pytest.mark.usefixtures("without_compiler")
def test_auto_takes_torch_where_kernels_cannot_be_built() -> None:
    backend, why = pick("auto", CPU, cxx="c++")
    assert backend.name == "sdpa"
    assert "there is no compiler" in why


@pytest.mark.usefixtures("without_compiler")
def test_kernels_that_were_asked_for_by_name_are_not_replaced() -> None:
    with pytest.raises(KernelUnavailable, match="there is no compiler"):
        pick("cpu", CPU, cxx="c++")


def test_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(UnsupportedDevice, match="'flash' is unknown; there are: sdpa, cpu"):
        pick("flash", CPU, cxx="c++")


def test_cpu_kernels_are_refused_on_a_gpu() -> None:
    with pytest.raises(UnsupportedDevice, match="--attention sdpa"):
        pick("cpu", torch.device("cuda"), cxx="c++")
