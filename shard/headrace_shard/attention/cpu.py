"""Paged attention by our own kernels for the CPU. Layout and work are those of `kernels/`."""

from torch import Tensor

from headrace_shard.config import ShardSettings
from headrace_shard.inputs import ForwardInputs
from headrace_shard.kernels import build
from headrace_shard.kernels.paged import PagedKernels, cache_shape


def create(settings: ShardSettings) -> "CpuBackend":
    """Builds the kernels at first use. Raises KernelUnavailable when there is no compiler or it fails."""
    return CpuBackend(PagedKernels(build.for_machine(settings.cxx)))


class CpuBackend:
    """A cache whose blocks lie in the order in which the kernels multiply."""

    name = "cpu"
    block_size = build.BLOCK_SIZE

    def __init__(self, kernels: PagedKernels) -> None:
        self._kernels = kernels
        self.means = f"native kernels for {kernels.instructions}"

    def cache_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's keys, and of its values."""
        return cache_shape(num_blocks, num_kv_heads, head_dim)

    def write(
        self, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Store keys and values [T, KV, D] at `slots` [T]."""
        self._kernels.write(keys, values, key_cache, value_cache, slots)

    def attend(
        self, queries: Tensor, key_cache: Tensor, value_cache: Tensor, inputs: ForwardInputs, scale: float
    ) -> Tensor:
        """Causal attention of queries [T, H, D] over their sequences' cache; gives [T, H, D]."""
        return self._kernels.attend(
            queries,
            key_cache,
            value_cache,
            inputs.query_starts,
            inputs.context_lens,
            inputs.block_tables,
            scale,
        )
