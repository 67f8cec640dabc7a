"""Self-attention over the paged cache, for any backend. The only layer that reads `ForwardInputs`."""

from torch import Tensor

from headrace_shard.attention.base import AttentionBackend
from headrace_shard.inputs import ForwardInputs
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.layers.linear import Linear
from headrace_shard.layers.native import NativeLayer
from headrace_shard.layers.rotary import Rotation, rotate


class Attention(NativeLayer):
    """Grouped-query attention (Ainslie et al. 2023); query, key and value as one product.

    Must be given a backend and this layer's cache with `bind` before it can run.
    """

    backend: AttentionBackend
    key_cache: Tensor
    value_cache: Tensor
    _kernels: DenseKernels | None = None

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        has_qkv_bias: bool,
        has_output_bias: bool,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        query_size, key_size = num_heads * head_dim, num_kv_heads * head_dim
        self.qkv_proj = Linear(hidden_size, query_size, key_size, key_size, has_bias=has_qkv_bias)
        self.o_proj = Linear(query_size, hidden_size, has_bias=has_output_bias)

    def bind(self, backend: AttentionBackend, key_cache: Tensor, value_cache: Tensor) -> None:
        """Use this backend and these tensors of its layout from now on."""
        self.backend, self.key_cache, self.value_cache = backend, key_cache, value_cache

    def use(self, kernels: DenseKernels) -> None:
        """Rotate with `kernels` from now on; the products are layers of their own."""
        self._kernels = kernels

    def forward(self, hidden: Tensor, rotation: Rotation, inputs: ForwardInputs, residual: Tensor) -> Tensor:
        """[T, hidden_size] to [T, hidden_size], added to `residual`; writes the tokens' keys and values."""
        heads = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        num_turned = self.num_heads + self.num_kv_heads
        # Queries and keys lie side by side, so one rotation turns both.
        turned = heads[:, :num_turned]
        if self._kernels is not None:
            self._kernels.rotate(turned, rotation.cos, rotation.sin)
        else:
            turned = rotate(turned, rotation)
        queries, keys = turned[:, : self.num_heads], turned[:, self.num_heads :]
        self.backend.write(keys, heads[:, num_turned:], self.key_cache, self.value_cache, inputs.slots)
        mixed = self.backend.attend(queries, self.key_cache, self.value_cache, inputs, self.scale)
        output: Tensor = self.o_proj(mixed.reshape(len(hidden), -1), residual)
        return output
