"""Matrix products. A product may join several of a checkpoint's, one below the other."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.layers.native import NativeLayer


class Linear(NativeLayer):
    """y = x W^T + b, with W [sum of out_sizes, in_size]; `out_sizes` are the rows of the joined products.

    With kernels, `weight` holds the same numbers in the kernels' own order.
    """

    def __init__(self, in_size: int, *out_sizes: int, has_bias: bool) -> None:
        super().__init__()
        self.out_sizes = out_sizes
        self.out_size = sum(out_sizes)
        self.weight = nn.Parameter(torch.empty(self.out_size, in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.out_size), requires_grad=False) if has_bias else None

    def rows(self, part: int) -> slice:
        """Rows of weight and bias that belong to the joined product number `part`."""
        start = sum(self.out_sizes[:part])
        return slice(start, start + self.out_sizes[part])

    def use(self, kernels: DenseKernels) -> None:
        """Pack the weight for `kernels`, if it has a form that they take."""
        if kernels.can_pack(self.weight):
            self.weight = nn.Parameter(kernels.pack(self.weight), requires_grad=False)
            super().use(kernels)

    def forward(self, hidden: Tensor, addend: Tensor | None = None) -> Tensor:
        """[T, in_size] to [T, sum of out_sizes]; `addend`, of that shape, is added to the product."""
        if self.kernels is not None:
            return self.kernels.multiply(hidden, self.weight, self.out_size, bias=self.bias, addend=addend)
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
            return
        packed = kernels.pack_gated(self.weight[self.rows(0)], self.weight[self.rows(1)])
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.kernels = kernels

    def forward(self, hidden: Tensor, addend: Tensor | None = None) -> Tensor:
        """[T, in_size] to [T, out_size]."""
        if self.kernels is not None and self.bias is None:
            return self.kernels.multiply(hidden, self.weight, self.out_sizes[0], addend=addend, is_gated=True)
        gate, value = self.split(super().forward(hidden))
        product = silu(gate) * value
        return product if addend is None else product + addend
