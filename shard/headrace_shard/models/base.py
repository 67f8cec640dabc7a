"""What every network offers to the runner. Knows no architecture."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from headrace_shard.attention.base import AttentionBackend
from headrace_shard.inputs import ForwardInputs
from headrace_shard.kv_cache import KVCache
from headrace_shard.layers.attention import Attention


class CausalLM(nn.Module, ABC):
    """A decoder over a paged cache: prompt chunks and decodes in one forward pass."""

    packed_modules: ClassVar[dict[str, tuple[str, int]]]
    """Module name in checkpoints to the product that it is part of, and its number therein."""

    backend: AttentionBackend
    """Set by `load_model`."""

    def bind_cache(self, cache: KVCache) -> None:
        """Use this cache from now on; its tensors are layer by layer those of the attention layers."""
        layers = (module for module in self.modules() if isinstance(module, Attention))
        for layer, keys, values in zip(layers, cache.keys, cache.values, strict=True):
            layer.bind(self.backend, keys, values)

    @abstractmethod
    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Hidden states [T, hidden_size] after the last norm; writes keys and values to the cache."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] to [R, vocab_size], in the model's dtype."""
