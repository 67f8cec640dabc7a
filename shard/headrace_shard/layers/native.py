"""What a layer is that can compute with the native kernels. Knows no kernel and no layer."""

from abc import abstractmethod

from torch import nn

from headrace_shard.kernels.dense import DenseKernels


class NativeLayer(nn.Module):
    """A layer that computes in plain torch until it is given kernels."""

    @abstractmethod
    def use(self, kernels: DenseKernels) -> None:
        """Compute with `kernels` from now on; called once, when the layer's weights are filled."""
