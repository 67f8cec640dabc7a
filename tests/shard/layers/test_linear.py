"""Joined products are their parts side by side."""

import torch
from headrace_shard.layers.linear import Linear
from torch.nn.functional import linear


def test_joined_products_split_into_their_parts() -> None:
    layer = Linear(4, 3, 2, has_bias=True)
    parts = []
    for number, size in enumerate((3, 2)):
        weight, bias = torch.randn(size, 4), torch.randn(size)
        layer.weight.data[layer.rows(number)] = weight
        assert layer.bias is not None
        layer.bias.data[layer.rows(number)] = bias
        parts.append((weight, bias))
    hidden = torch.randn(5, 4)
    for result, (weight, bias) in zip(layer.split(layer(hidden)), parts, strict=True):
        torch.testing.assert_close(result, linear(hidden, weight, bias))
