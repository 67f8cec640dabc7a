"""Which attention backend is taken where."""

import pytest
import torch
from headrace_shard.attention.base import pick
from headrace_shard.errors import UnsupportedDevice


def test_named_backend() -> None:
    backend, why = pick("sdpa", torch.device("cpu"))
    assert backend.name == "sdpa"
    assert "as asked" in why


def test_auto_says_what_it_took_and_why() -> None:
    backend, why = pick("auto", torch.device("cuda"))
    assert backend.name == "sdpa"
    assert "cuda" in why


def test_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(UnsupportedDevice, match="'flash' is unknown; there are: sdpa, cpu"):
        pick("flash", torch.device("cpu"))


def test_cpu_kernels_are_refused_on_a_gpu() -> None:
    with pytest.raises(UnsupportedDevice, match="--attention sdpa"):
        pick("cpu", torch.device("cuda"))
