"""Token ids to vectors, and vectors to logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_shard.kernels.dense import DenseKernels, PackedWeight
from headrace_shard.layers.linear import Linear
from headrace_shard.layers.native import NativeLayer


class Embedding(NativeLayer):
    """A table of one vector per token id. A tied output layer multiplies with the same parameter."""

    packed: PackedWeight | None = None

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.is_tied = False
        """Set by the output layer that is tied to this table."""

    def use(self, kernels: DenseKernels) -> None:
        """Pack a tied table: a step multiplies with all of it, but looks up a few rows only."""
        if self.is_tied and kernels.can_pack(self.weight):
            self.packed = kernels.pack(self.weight.data)
            self.weight = nn.Parameter(self.packed.panels, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to [T, hidden_size]."""
        if self.packed is not None:
            return self.packed.rows(token_ids)
        return functional.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] to [R, vocab_size]."""
        if self.packed is not None:
            return self.packed.multiply(hidden)
        return functional.linear(hidden, self.weight)


class TiedOutputLayer(nn.Module):
    """Logits over the vocabulary with the embedding's table; has no parameter of its own."""

    def __init__(self, table: Embedding) -> None:
        super().__init__()
        table.is_tied = True
        # In a list, so that the table is not registered as a second parameter.
        self._tables = [table]

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] to [R, vocab_size]."""
        return self._tables[0].logits(hidden)


def output_layer(vocab_size: int, hidden_size: int, tied_to: Embedding | None) -> nn.Module:
    """From hidden states to logits: with the embedding's table when `tied_to` is given, else with its own."""
    if tied_to is not None:
        return TiedOutputLayer(tied_to)
    return Linear(hidden_size, vocab_size, has_bias=False)
