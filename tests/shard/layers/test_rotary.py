"""Rotary frequencies and rotation against transformers' own."""

from typing import Any

import pytest
import torch
from headrace_shard.checkpoint.config import RopeScaling
from headrace_shard.layers.rotary import RotaryEmbedding, rotate
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

LLAMA3 = RopeScaling(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
)
SCALINGS: dict[str, tuple[RopeScaling | None, dict[str, Any]]] = {
    "default": (None, {"rope_type": "default"}),
    "linear": (RopeScaling(rope_type="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        LLAMA3,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_is_that_of_transformers(name: str) -> None:
    scaling, parameters = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 500.0, **parameters},
    )
    positions = torch.tensor([0, 1, 7, 100, 511])
    heads = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    theirs, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    ours = rotate(heads, RotaryEmbedding(32, 500.0, scaling)(positions))
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_half_precision_is_rounded_once() -> None:
    positions = torch.tensor([3, 4000])
    heads = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotation = RotaryEmbedding(16, 10000.0, None)(positions)
    assert torch.equal(rotate(heads, rotation), rotate(heads.float(), rotation).bfloat16())
