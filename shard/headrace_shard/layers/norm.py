"""Root mean square normalisation (Zhang and Sennrich 2019)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.layers.native import NativeLayer


class RMSNorm(NativeLayer):
    """x / rms(x) * weight, computed in float32 whatever the dtype of x, and rounded once."""

    _native: tuple[DenseKernels, Tensor] | None = None
    """The kernels, and the weight where a module finds it at once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def use(self, kernels: DenseKernels) -> None:
        """Compute with `kernels` from now on."""
        self._native = kernels, self.weight.data

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, size] to [T, size]."""
        if self._native is not None:
            kernels, weight = self._native
            return kernels.normalise(hidden, weight, self.eps)
        return rms_norm(hidden, self.weight.shape, self.weight, self.eps)
