"""Matrix products. A product may join several of a checkpoint's, one below the other."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Linear(nn.Module):
    """y = x W^T + b, with W [sum of out_sizes, in_size]; `out_sizes` are the rows of the joined products."""

    def __init__(self, in_size: int, *out_sizes: int, has_bias: bool) -> None:
        super().__init__()
        self.out_sizes = out_sizes
        self.weight = nn.Parameter(torch.empty(sum(out_sizes), in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(out_sizes)), requires_grad=False) if has_bias else None

    def rows(self, part: int) -> slice:
        """Rows of weight and bias that belong to the joined product number `part`."""
        start = sum(self.out_sizes[:part])
        return slice(start, start + self.out_sizes[part])

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, in_size] to [T, sum of out_sizes]."""
        return linear(hidden, self.weight, self.bias)

    def split(self, joined: Tensor) -> Sequence[Tensor]:
        """The joined products' results, as views of what `forward` gave."""
        return torch.split(joined, list(self.out_sizes), dim=-1)
