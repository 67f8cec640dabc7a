"""The feed-forward part of a block."""

from torch import Tensor, nn

from headrace_shard.layers.linear import GatedLinear, Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, SwiGLU), gate and up as one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, has_bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(hidden_size, intermediate_size, has_bias=has_bias)
        self.down_proj = Linear(intermediate_size, hidden_size, has_bias=has_bias)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """[T, hidden_size] to [T, hidden_size], added to `residual`."""
        output: Tensor = self.down_proj(self.gate_up_proj(hidden), residual)
        return output
