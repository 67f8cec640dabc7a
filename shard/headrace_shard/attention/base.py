"""What an attention backend is, and which one is taken where. Knows no model.

A backend owns the layout of the KV cache: it names the block size, the shape of one layer's tensor, writes to
it and reads from it. `sdpa` is the reference that every other one is compared with.
"""

import importlib
from typing import Protocol

import torch
from torch import Tensor

from headrace_shard.config import ShardSettings
from headrace_shard.errors import KernelUnavailable, UnsupportedDevice
from headrace_shard.inputs import ForwardInputs

# Name to the module that makes it, imported only when chosen: `create(settings) -> AttentionBackend`.
_BACKENDS = {"sdpa": "headrace_shard.attention.sdpa", "cpu": "headrace_shard.attention.cpu"}


class AttentionBackend(Protocol):
    """T tokens, H query heads, KV heads of keys and values, D numbers per head."""

    name: str
    means: str
    """What it computes with, in words."""
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


def pick(settings: ShardSettings, device: torch.device) -> tuple[AttentionBackend, str]:
    """The backend that is asked for, or for "auto" the fastest that works on `device`, and a line saying why.

    Raises UnsupportedDevice when the one asked for cannot be used there, KernelUnavailable when it cannot be
    built.
    """
    name = settings.attention
    if name == "auto":
        if device.type != "cpu":
            return _create("sdpa", settings), f"attention: sdpa, the one for {device.type}"
        try:
            backend = _create("cpu", settings)
        except KernelUnavailable as error:
            why = f"since the native kernels are not available: {error}"
            return _create("sdpa", settings), f"attention: sdpa, {why}"
        return backend, f"attention: cpu, {backend.means}"
    if name not in _BACKENDS:
        raise UnsupportedDevice(f"attention backend {name!r} is unknown; there are: {', '.join(_BACKENDS)}")
    if name == "cpu" and device.type != "cpu":
        raise UnsupportedDevice(
            f"attention backend 'cpu' cannot run on device '{device}'; use --attention sdpa"
        )
    backend = _create(name, settings)
    return backend, f"attention: {name}, {backend.means}, as asked"


def _create(name: str, settings: ShardSettings) -> AttentionBackend:
    backend: AttentionBackend = importlib.import_module(_BACKENDS[name]).create(settings)
    return backend
