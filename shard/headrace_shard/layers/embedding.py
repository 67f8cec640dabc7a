"""Token ids to vectors, and vectors to logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """A table of one vector per token id. A tied output layer shares the table's parameter."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to [T, hidden_size]."""
        return functional.embedding(token_ids, self.weight)


class OutputLayer(nn.Module):
    """Logits over the vocabulary: with its own matrix, or with the embedding's when `tied_to` is given."""

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: Embedding | None) -> None:
        super().__init__()
        if tied_to is None:
            self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        # In a list, so that the shared table is not registered as a second parameter.
        self._tied_to = [tied_to] if tied_to is not None else []

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] to [R, vocab_size]."""
        weight = self._tied_to[0].weight if self._tied_to else self.weight
        return functional.linear(hidden, weight)
