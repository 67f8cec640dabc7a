"""RMSNorm against its definition in float64."""

import pytest
import torch
from headrace_shard.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(576, 1e-5)
    norm.weight.data = torch.randn(576, generator=generator).to(dtype)
    # Squares of these are above the largest float16.
    hidden = (torch.randn(3, 576, generator=generator) * 300).to(dtype)
    exact = hidden.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    steps = torch.finfo(dtype).eps
    torch.testing.assert_close(norm(hidden).double(), exact, rtol=1.1 * steps, atol=1e-5)
