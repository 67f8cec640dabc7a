"""Matrix products. A product may join several of a checkpoint's, one below the other."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from headrace_shard.kernels.dense import DenseKernels, PackedWeight
from headrace_shard.layers.native import NativeLayer


class Linear(NativeLayer):
    """y = x W^T + b, with W [sum of out_sizes, in_size]; `out_sizes` are the rows of the joined products.

    With kernels, `weight` holds the same numbers in the kernels' own order.
    """

    packed: PackedWeight | None = None

    def __init__(self, in_size: int, *out_sizes: int, has_bias: bool) -> None:
        super().__init__()
        self.out_sizes = out_sizes
        self.weight = nn.Parameter(torch.empty(sum(out_sizes), in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(out_sizes)), requires_grad=False) if has_bias else None

    def rows(self, part: int) -> slice:
        """Rows of weight and bias that belong to the joined product number `part`."""
        start = sum(self.out_sizes[:part])
        return slice(start, start + self.out_sizes[part])

    def use(self, kernels: DenseKernels) -> None:
        """Pack the weight for `kernels`, if it has a form that they take."""
        if kernels.can_pack(self.weight):
            self._keep(kernels.pack(self.weight.data, self.bias))

    def _keep(self, packed: PackedWeight) -> None:
        self.packed = packed
        self.weight = nn.Parameter(packed.panels, requires_grad=False)

    def forward(self, hidden: Tensor, addend: Tensor | None = None) -> Tensor:
        """[T, in_size] to [T, sum of out_sizes]; `addend`, of that shape, is added to the product."""
        if self.packed is not None:
            return self.packed.multiply(hidden, addend)
        product = linear(hidden, self.weight, self.bias)
        return product if addend is None else product + addend

    def split(self, joined: Tensor) -> Sequence[Tensor]:
        """The joined products' results, as views of what `forward` gave."""
        return torch.split(joined, list(self.out_sizes), dim=-1)


class GatedLinear(Linear):
    """silu(x G^T) * (x U^T) (Shazeer 2020, SwiGLU), with G and U [out_size, in_size] joined, G first."""

    def __init__(self, in_size: int, out_size: int, *, has_bias: bool) -> None:
        super().__init__(in_size, out_size, out_size, has_bias=has_bias)

    def use(self, kernels: DenseKernels) -> None:
        """Pack G and U side by side, so that one pass gives the result; with a bias they stay apart."""
        if self.bias is not None or not kernels.can_pack(self.weight):
            super().use(kernels)
        else:
            self._keep(kernels.pack_gated(self.weight.data[self.rows(0)], self.weight.data[self.rows(1)]))

    def forward(self, hidden: Tensor, addend: Tensor | None = None) -> Tensor:
        """[T, in_size] to [T, out_size]; `addend`, of that shape, is added to the product."""
        if self.packed is not None and self.bias is None:
            return self.packed.multiply(hidden, addend)
        gate, value = self.split(super().forward(hidden))
        product = silu(gate) * value
        return product if addend is None else product + addend
