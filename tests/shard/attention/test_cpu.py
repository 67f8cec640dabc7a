"""The cpu backend in the place of sdpa: same cache, same inputs, same answers."""

import pytest
import torch
from headrace_shard.attention.base import AttentionBackend, pick
from headrace_shard.attention.sdpa import SdpaBackend
from headrace_shard.config import ShardSettings
from torch import Tensor

from tests.shard.stepping import Paged

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64


@pytest.fixture(scope="module")
def cpu() -> AttentionBackend:
    backend, _ = pick(ShardSettings(attention="cpu"), torch.device("cpu"))
    assert backend.name == "cpu"
    return backend


def run(backend: AttentionBackend, dtype: torch.dtype) -> list[Tensor]:
    """Three steps of two sequences, prompts in chunks beside decodes: each step's outputs."""
    generator = torch.Generator().manual_seed(1)
    shape = backend.cache_shape(40, KV_HEADS, HEAD_DIM)
    key_cache, value_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    paged = Paged(backend.block_size, num_blocks=40)
    paged.add("long", [0] * 400)
    paged.add("short", [0] * 12)
    outputs = []
    for step in ({"long": 270, "short": 10}, {"short": 1, "long": 77}, {"short": 1, "long": 1}):
        inputs = paged.inputs(step)
        num_tokens = len(inputs.token_ids)
        fused = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
        queries, keys, values = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)  # type: ignore[no-untyped-call]
        backend.write(keys, values, key_cache, value_cache, inputs.slots)
        outputs.append(backend.attend(queries, key_cache, value_cache, inputs, HEAD_DIM**-0.5))
    return outputs


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_same_as_sdpa(cpu: AttentionBackend, dtype: torch.dtype, tolerance: float) -> None:
    for ours, theirs in zip(run(cpu, dtype), run(SdpaBackend(), dtype), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
