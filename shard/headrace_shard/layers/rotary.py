"""Rotary position embedding (Su et al. 2021), with the frequency scalings of linear interpolation (Chen et
al. 2023) and of Llama 3.1. Knows no layers: one rotation serves all of them.

Heads are rotated in halves, number i with number i + D/2, as Hugging Face checkpoints have it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace_shard.checkpoint.config import RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and signed sines of a step's positions, [T, 1, D] float32; every layer uses the same.

    The first half of the sines is negated, so that x turned is x * cos + (x with its halves swapped) * sin.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """The frequencies; angles are computed once per step, exact for positions up to 2^24."""

    frequencies: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        frequencies = inverse_frequencies(head_dim, theta, scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """[T] int64 to the rotation of each."""
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn heads [T, H, D] by their positions; computed in float32, given back in the dtype of `heads`."""
    exact = heads.float()
    swapped = exact.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(exact * rotation.cos, swapped, rotation.sin).to(heads.dtype)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """[D/2] float32: radians by which each pair of numbers turns per position."""
    # Computed, not loaded: on the CPU even while the parameters of the network are on the meta device.
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
