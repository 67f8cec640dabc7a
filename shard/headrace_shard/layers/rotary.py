"""Rotary position embedding (Su et al. 2021), with the frequency scalings of linear interpolation (Chen et
al. 2023) and of Llama 3.1. Knows no layers: one table serves all of them.

Heads are rotated in halves, number i with number i + D/2, as Hugging Face checkpoints have it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace_shard.checkpoint.config import RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a step's positions, [T, 1, D/2] float32; every layer of the step uses the same."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """The table of all positions, computed once in float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        # Computed, not loaded: on the CPU even while the parameters around it are still on the meta device.
        angles = torch.outer(
            torch.arange(max_positions, dtype=torch.float32, device="cpu"),
            inverse_frequencies(head_dim, theta, scaling),
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """[T] int64 to the rotation of each."""
        return Rotation(self.cos[positions, None], self.sin[positions, None])


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn heads [T, H, D] by their positions; computed in float32, given back in the dtype of `heads`."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = rotation.cos, rotation.sin
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """[D/2] float32: radians by which each pair of numbers turns per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow the pairs whose wave is long against the original context, keep the short, blend in between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
