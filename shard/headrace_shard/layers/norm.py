"""Root mean square normalisation (Zhang and Sennrich 2019)."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the quotient is computed in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, size] to [T, size]."""
        exact = hidden.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return exact.to(hidden.dtype) * self.weight
