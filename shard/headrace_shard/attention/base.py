"""What an attention backend is, and which one is taken where. Knows no model.

A backend owns the layout of the KV cache: it names the block size, the shape of one layer's tensor, writes to
it and reads from it. `sdpa` is the reference that every other one is compared with.
"""

import importlib
from typing import Protocol

import torch
from torch import Tensor

from headrace_shard.errors import KernelUnavailable, UnsupportedDevice
from headrace_shard.inputs import ForwardInputs

# Name to "module:Class", imported only when chosen.
_BACKENDS = {
    "sdpa": "headrace_shard.attention.sdpa:SdpaBackend",
    "cpu": "headrace_shard.attention.cpu:CpuBackend",
}


class AttentionBackend(Protocol):
    """T tokens, H query heads, KV heads of keys and values, D numbers per head."""

    name: str
    block_size: int
    """Tokens per KV block."""

    def cache_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's keys, and of its values."""
        ...

    def write(
        self, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Store keys and values [T, KV, D] at `slots` [T]."""
        ...

    def attend(
        self, queries: Tensor, key_cache: Tensor, value_cache: Tensor, inputs: ForwardInputs, scale: float
    ) -> Tensor:
        """Causal attention of queries [T, H, D] over their sequences' cache; gives [T, H, D]."""
        ...


def pick(name: str, device: torch.device, *, cxx: str) -> tuple[AttentionBackend, str]:
    """The backend called `name`, or for "auto" the fastest that works on `device`, and one line saying why.

    `cxx` is the compiler of the native kernels. Raises UnsupportedDevice when the named one cannot be used
    there, KernelUnavailable when it cannot be built.
    """
    if name == "auto":
        if device.type != "cpu":
            return _create("sdpa", cxx), f"attention: sdpa, the one for {device.type}"
        try:
            return _create("cpu", cxx), "attention: cpu, native kernels"
        except KernelUnavailable as error:
            return _create(
                "sdpa", cxx
            ), f"attention: sdpa, since the native kernels are not available: {error}"
    if name not in _BACKENDS:
        raise UnsupportedDevice(f"attention backend {name!r} is unknown; there are: {', '.join(_BACKENDS)}")
    if name == "cpu" and device.type != "cpu":
        raise UnsupportedDevice(
            f"attention backend 'cpu' cannot run on device '{device}'; use --attention sdpa"
        )
    return _create(name, cxx), f"attention: {name}, as asked"


def _create(name: str, cxx: str) -> AttentionBackend:
    module, _, class_name = _BACKENDS[name].partition(":")
    made = getattr(importlib.import_module(module), class_name)
    backend: AttentionBackend = made(cxx) if name == "cpu" else made()  # only the one has kernels to build
    return backend
